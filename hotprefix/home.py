"""Where hotprefix keeps what it builds and writes. Knows names of folders, not what is in them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

HOME_VARIABLE = "HOTPREFIX_HOME"


class Home(NamedTuple):
    """Everything hotprefix makes on this machine lies under ``root``; removing it is always safe
    while nothing runs."""

    root: Path

    @property
    def engine(self) -> Path:
        """The engine's virtual environment."""
        return self.root / "engine"

    def peer(self, name: str) -> Path:
        """The virtual environment of another project's software that a benchmark compares with."""
        return self.root / "peers" / name

    @property
    def models(self) -> Path:
        """Converted model folders."""
        return self.root / "models"

    @property
    def logs(self) -> Path:
        """One log a part, overwritten by the next start."""
        return self.root / "logs"


def checkout() -> Path:
    """The folder that holds this package: the git work tree, or site-packages."""
    return Path(__file__).resolve().parent.parent


def find_home(environ: Mapping[str, str] = os.environ) -> Home:
    """``HOTPREFIX_HOME``, else ``.hotprefix`` in the checkout, else in the user's home."""
    if given := environ.get(HOME_VARIABLE):
        return Home(Path(given).absolute())
    if (checkout() / "pyproject.toml").exists():
        return Home(checkout() / ".hotprefix")
    return Home(Path.home() / ".hotprefix")
