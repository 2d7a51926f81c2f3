"""Makes large language models smaller and faster after training."""

from functools import cache
from typing import Any

from niwaki._version import __version__ as __version__


@cache
def _homes() -> dict[str, str]:
    """The public names by the module that defines them, as the stub for type checkers imports them.

    The stub is read, and a module loaded, when somebody asks for a name: ``niwaki --help`` is to be quick.
    """
    import ast
    from pathlib import Path

    return {
        name.name: statement.module
        for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
        if isinstance(statement, ast.ImportFrom) and statement.module and statement.module != "niwaki._version"
        for name in statement.names
    }


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__all__":
        return sorted(_homes())
    if name in _homes():
        return getattr(importlib.import_module(_homes()[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})  # for completion, also of what is not loaded yet
