"""Files that take time to make are made once, for all tests and by one of their processes."""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

from niwaki.files import replace_file

_MADE: dict[str, dict[str, bytes]] = {}


def made_once(path: Path, name: str, make: Callable[[Path], object]) -> Path:
    """``path`` with copies of the files that ``make`` writes to an empty directory, one by ``name``."""
    if name not in _MADE:
        place = os.environ.get("NIWAKI_MADE")  # of all processes of tests, which conftest.py makes
        kept = Path(place, hashlib.sha256(name.encode()).hexdigest()) if place else None
        if kept and kept.exists():
            _MADE[name] = pickle.loads(kept.read_bytes())
        else:
            with tempfile.TemporaryDirectory() as directory:
                make(Path(directory))
                found = [file for file in Path(directory).rglob("*") if file.is_file()]
                _MADE[name] = {str(file.relative_to(directory)): file.read_bytes() for file in found}
            if kept:
                replace_file(kept, pickle.dumps(_MADE[name]))
    for file, content in _MADE[name].items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_bytes(content)
    return path
