"""``hotprefix node``: a cache node from the merged configuration."""

import os
from collections.abc import Sequence

from cachenode import serve
from hotprefix import settings
from hotprefix.errors import UserError


def main(arguments: Sequence[str]) -> int:
    """Serves until SIGINT or SIGTERM."""
    if "-h" in arguments or "--help" in arguments:
        flags = settings.NODE.usage()
        print(f"usage: hotprefix node [FLAGS]\n\nEach flag with its variable:\n{flags}", end="")
        return 0
    loaded = settings.NODE.load(arguments, os.environ)
    try:
        return serve.run(loaded.config)
    except OSError as error:
        raise UserError(f"the node cannot start: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"the node cannot start: {error}") from error
