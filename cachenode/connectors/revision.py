"""A digest of what an engine loaded, cheap for weights of any size."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SMALL = 1024 * 1024
SAMPLES = 1024
SAMPLE_BYTES = 4096
_NAMES_ONLY = {"_name_or_path", "transformers_version"}


def revision_of(model: str, said: str, config: Mapping[str, Any]) -> str:
    """32 hex digits: of a folder, its files; else the model's name and what is ``said`` of its version.
    ``config`` is what the engine made of the model's configuration, overrides included.

    Large files count by name, size, time and 1,024 samples of 4 KiB: copies of a folder that keep the
    times are equal, and retrained weights are not. Raises OSError."""
    state = hashlib.sha256(b"hotprefix/revision/1")
    kept = {key: value for key, value in config.items() if key not in _NAMES_ONLY}
    state.update(json.dumps(kept, sort_keys=True, default=str).encode())
    folder = Path(model)
    if not folder.is_dir():
        state.update(f"{len(model)}:{model}{said}".encode())
        return state.hexdigest()[:32]
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        status = file.stat()
        state.update(f"{len(file.name)}:{file.name}{status.st_size},".encode("utf-8", "surrogateescape"))
        if status.st_size <= SMALL:
            state.update(file.read_bytes())
            continue
        state.update(f"{status.st_mtime_ns},".encode())
        with file.open("rb") as opened:
            for number in range(SAMPLES):
                opened.seek(number * (status.st_size - SAMPLE_BYTES) // (SAMPLES - 1))
                state.update(opened.read(SAMPLE_BYTES))
    return state.hexdigest()[:32]
