"""Makes large language models smaller and faster after training."""

import ast
from pathlib import Path
from typing import Any

from niwaki._version import __version__ as __version__

#: The public names by the module that defines them, loaded when they are asked for: ``niwaki --help`` is to be quick.
_HOMES = {
    name.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(statement, ast.ImportFrom) and statement.module != "niwaki._version"
    for name in statement.names
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # for completion, also of what is not loaded yet
