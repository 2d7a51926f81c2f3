"""Scripts as they are started, but in this process: an interpreter that loads torch again takes seconds."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest


def run_script(path: Path, *arguments: str) -> int | str | None:
    """What the script ends with: None or 0 if all is well, else a code or a message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.setattr(sys, "path", [str(path.parent), *sys.path])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            return ended.code
    return None
