"""``hotprefix gateway``: a gateway from the merged configuration."""

import os
from collections.abc import Sequence

from gateway import serve
from hotprefix import settings
from hotprefix.errors import UserError


def main(arguments: Sequence[str]) -> int:
    """Serves until SIGINT or SIGTERM."""
    if "-h" in arguments or "--help" in arguments:
        flags = settings.GATEWAY.usage()
        print(f"usage: hotprefix gateway [FLAGS]\n\nEach flag with its variable:\n{flags}", end="")
        return 0
    loaded = settings.load(arguments, os.environ)
    try:
        serve.run(loaded.config)
    except OSError as error:
        raise UserError(f"the gateway cannot start: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"the gateway cannot start: {error}") from error
    return 0
