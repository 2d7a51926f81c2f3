"""Nothing heavy is loaded before it is needed; that imports go one way import-linter sees to (pyproject.toml)."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import niwaki
from niwaki.layer import patterns
from support.forks import Ended, forked

ROOT = Path(niwaki.__file__).parent


def kinds_of(kind: type) -> set[type]:
    """A class and all that are derived from it."""
    below: list[type] = kind.__subclasses__()
    return {kind}.union(*map(kinds_of, below))


@pytest.mark.parametrize("path", sorted((ROOT / "layer" / "solvers").glob("*.py")), ids=lambda path: path.name)
def test_solvers_do_not_look_at_patterns(path: Path) -> None:
    """A solver that tells patterns apart has a branch to forget when a pattern is added."""
    pattern_classes = {each.__name__ for each in kinds_of(patterns.Pattern)}
    assert {"Pattern", "NM", "PerRow", "_Partial"} <= pattern_classes
    for node in ast.walk(ast.parse(path.read_text())):
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if isinstance(node, ast.Name | ast.alias):
            name = node.id if isinstance(node, ast.Name) else node.name
            assert name != "NM", f"{path.name}: NM"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type"):
            assert not names & (pattern_classes | {"pattern"}), ast.unparse(node)
        if isinstance(node, ast.MatchClass):
            assert not names & pattern_classes, ast.unparse(node)


def modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after ``code``."""
    show = "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", f"{code}\n{show}"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_import_niwaki_loads_neither_torch_nor_transformers_and_offers_all_names() -> None:
    loaded = modules_after("import niwaki; niwaki.__version__; assert set(niwaki.__all__) <= set(dir(niwaki))")
    assert "niwaki" in loaded
    assert not loaded & {"torch", "transformers"}


@pytest.mark.slow
def test_solvers_do_not_load_transformers() -> None:
    loaded = modules_after("import niwaki.layer.solvers")
    assert "torch" in loaded
    assert not loaded & {"transformers", "accelerate", "safetensors", "tokenizers"}


@pytest.mark.slow
def test_faces_do_not_load_torch() -> None:
    """``niwaki --help`` and reading a record are quick."""
    parts = ("cli.app", "cli.main", "records.record", "options", "files", "errors", "reports.page", "reports.material")
    assert not modules_after("\n".join(f"import niwaki.{part}" for part in parts)) & {"torch", "transformers"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no forks")
def test_public_names_are_not_modules_of_the_same_name() -> None:
    """In any order, and also after all modules were imported: of a niwaki that is imported anew."""
    fresh: ModuleType = niwaki

    def look() -> None:
        for name in [*fresh.__all__, *reversed(fresh.__all__)]:
            value = getattr(fresh, name)
            assert not isinstance(value, ModuleType), f"niwaki.{name} is a module"
            if isinstance(value, type | FunctionType):  # and no table, or type of a callable
                assert value.__name__ == name

    def work() -> None:
        nonlocal fresh
        for name in [name for name in sys.modules if name.partition(".")[0] == "niwaki"]:
            del sys.modules[name]
        fresh = importlib.import_module("niwaki")
        assert fresh is not niwaki
        look()
        for module in pkgutil.walk_packages(fresh.__path__, "niwaki."):
            if module.name not in ("niwaki.__main__", "niwaki._kernels"):  # the native library is no module
                importlib.import_module(module.name)
        look()

    assert forked(work) == Ended(0, "", "")


def test_names_of_files_and_formats_are_of_one_thing_each() -> None:
    """What reads GGUF files and what writes them, and tensors of one format and of another, are told apart by name."""
    rooms = ("checkpoints", "models", "packed", "exports")
    paths = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    modules = Counter(path.name for path in paths if path.name.startswith("gguf_"))
    classes = Counter(
        node.name for path in paths for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in (modules | classes).items() if count > 1] == []
