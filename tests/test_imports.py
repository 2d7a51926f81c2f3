"""Imports go one way, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import niwaki
from niwaki.layer import patterns

ROOT = Path(niwaki.__file__).parent

#: What the modules of the numerical core, and those that know one thing only, may import of niwaki.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "words": set(),
    "rows": set(),
    "selection": {"rows"},
    "patterns": {"errors", "rows", "selection"},
    "precision": {"errors"},
    "linalg": {"errors", "precision"},
    "problem": {"errors", "linalg"},
    "settings": {"errors"},
    "quantization": {"errors"},
    "rounding": {"linalg", "precision", "problem", "quantization"},
    "solvers": {"errors", "patterns", "linalg", "problem", "settings"},
    "effort": {"errors", "settings"},
    "targets": {"linalg", "problem"},
    "checkpoint": {"errors"},
    "calibration": {"errors"},
    "record": {"errors", "precision", "words"},
    "report": {"errors", "record", "display", "table", "speed", "words"},
    "packed": {
        *("errors", "record", "card", "checkpoint", "layout", "blocks", "output", "quantization", "scales"),
    },
    "specimens": {
        *("errors", "record", "report", "display", "checkpoint", "calibration", "layout", "blocks"),
        *("generating", "packed"),
    },
    "table": {"errors", "record"},
    "progress": {"record", "table"},
    "tasks": {"errors", "checkpoint", "calibration", "blocks", "packed"},
    "families": set(),
    "layout": {"errors", "families", "checkpoint"},
    "distributed": {"errors", "rows"},
    "states": {"errors", "checkpoint"},
    "inputs": {"errors", "layout", "linalg", "distributed", "precision"},
    "block": {
        *("errors", "checkpoint", "layout", "linalg", "inputs", "distributed", "states", "precision"),
    },
    "blocks": {"errors", "families", "checkpoint", "layout", "states", "block"},
    "allocation": set(),
    "sensitivity": {"errors", "layout", "block", "blocks", "distributed", "states"},
    "synthetic": {"errors", "blocks", "distributed"},
    "fitting": {"block", "distributed", "effort", "errors", "layout", "record", "states"},
    "scales": {"errors", "checkpoint", "layout", "quantization"},
    "masks": {"errors", "checkpoint", "layout", "blocks", "patterns", "solvers"},
    "output": {"errors", "checkpoint", "record", "__init__"},
    "structured": {"errors", "linalg", "problem"},
    "units": {"errors", "layout", "blocks"},
    "smaller": {"errors", "blocks", "states", "units"},
}
#: Only these may import these of niwaki.
MAY_BE_IMPORTED_BY = {
    "cli": {"__main__"},
    "pipeline": {"cli", "comparison", "shrinking", "__init__"},
    "walk": {"pipeline", "shrinking"},
    "exporting": {"cli", "__init__"},
    "block": {"blocks", "fitting", "planning", "sensitivity", "shrinking", "walk"},
    "blocks": {
        *(
            "pipeline",
            "walk",
            "masks",
            "exporting",
            "planning",
            "sensitivity",
            "perplexity",
            "survey",
            "units",
            "smaller",
            "shrinking",
            "synthetic",
            "comparison",
            "specimens",
            "packed",
            "tasks",
            "__init__",
        ),
    },
}
#: The insides of models are known to ``blocks`` only, and to ``block`` without a name of transformers; how files name
#: them to ``layout``; ``synthetic`` lets them write.
TRANSFORMERS_AT_IMPORT = dict.fromkeys(("blocks", "layout", "synthetic"), "transformers")
#: Loaded where it is needed: for its tokenizers, to generate text, and to silence its logging.
TRANSFORMERS_LATER = {
    "calibration": "transformers",
    "generating": "transformers",
    "packed": "transformers",
    "tasks": "transformers",
    "cli": "transformers.utils",
}


@dataclass(frozen=True)
class Import:
    """``importer`` is the first part of a module's name within niwaki: all of ``solvers`` is one."""

    importer: str
    name: str  # in full, such as niwaki.layer.solvers.admm or transformers.utils
    later: bool  # in a function, or for type checkers only

    @property
    def part(self) -> str | None:
        """What of niwaki is imported: "solvers", or "__init__" for the package itself."""
        package, _, rest = self.name.partition(".")
        if package != "niwaki":
            return None
        return rest.split(".")[0] or "__init__"


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    later: set[int] = set()
    for node in ast.walk(tree):
        checked = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if checked or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            later.update(map(id, ast.walk(node)))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            # "from niwaki import card" is an import of niwaki.pruning.card.
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if is_module(name) else str(node.module) for name in modules]
        for name in names:
            yield Import(part_of(path), name, id(node) in later)


def is_module(name: str) -> bool:
    package, *rest = name.split(".")
    path = ROOT.joinpath(*rest)
    return package == "niwaki" and (path.with_suffix(".py").exists() or (path / "__init__.py").exists())


FILES = sorted(ROOT.rglob("*.py"))
IMPORTS = [found for path in FILES for found in imports_of(path)]


def test_the_walk_sees_imports() -> None:
    """So that the tests below do not pass because nothing was found."""
    assert Import("solvers", "niwaki.layer.linalg", later=False) in IMPORTS
    assert Import("blocks", "transformers", later=False) in IMPORTS
    assert Import("__init__", "niwaki.pruning.prune", later=True) in IMPORTS
    assert Import("__init__", "importlib", later=True) in IMPORTS


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_core_imports_only_what_is_below_it(part: str) -> None:
    found = {i.part for i in IMPORTS if i.importer == part and i.part not in (None, part)}
    assert found <= MAY_IMPORT[part]


@pytest.mark.parametrize("part", MAY_BE_IMPORTED_BY)
def test_imported_only_by_what_is_above_it(part: str) -> None:
    assert {i.importer for i in IMPORTS if i.part == part} <= {part, *MAY_BE_IMPORTED_BY[part]}


def test_there_are_no_circles() -> None:
    """Of the package itself only __version__ is imported, which is there before everything else."""
    below: dict[str, set[str]] = {}
    for i in IMPORTS:
        if i.part not in (None, "__init__", i.importer) and i.importer != "__init__":
            below.setdefault(i.importer, set()).add(str(i.part))
    TopologicalSorter(below).prepare()  # raises CycleError, with the circle


def test_transformers_is_known_to_two_modules_only() -> None:
    for i in IMPORTS:
        if i.name.split(".")[0] == "transformers":
            allowed = {**TRANSFORMERS_AT_IMPORT, **(TRANSFORMERS_LATER if i.later else {})}
            assert i.importer in allowed, i
            assert f"{i.name}.".startswith(f"{allowed[i.importer]}."), i


def kinds_of(kind: type) -> set[type]:
    """A class and all that are derived from it."""
    below: list[type] = kind.__subclasses__()
    return {kind}.union(*map(kinds_of, below))


@pytest.mark.parametrize("path", sorted((ROOT / "solvers").glob("*.py")), ids=lambda path: path.name)
def test_solvers_do_not_look_at_patterns(path: Path) -> None:
    """A solver that tells patterns apart has a branch to forget when a pattern is added."""
    pattern_classes = {each.__name__ for each in kinds_of(patterns.Pattern)}
    assert {"Pattern", "NM", "PerRow", "Partial"} <= pattern_classes
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


def test_import_niwaki_loads_neither_torch_nor_transformers() -> None:
    loaded = modules_after("import niwaki; niwaki.__version__")
    assert "niwaki" in loaded
    assert not loaded & {"torch", "transformers"}


def test_public_names_are_offered_before_they_are_loaded() -> None:
    modules_after("import niwaki; assert set(niwaki.__all__) <= set(dir(niwaki))")


def test_solvers_do_not_load_transformers() -> None:
    loaded = modules_after("import niwaki.layer.solvers")
    assert "torch" in loaded
    assert not loaded & {"transformers", "accelerate", "safetensors", "tokenizers"}


@pytest.mark.parametrize("part", ["cli", "record", "errors", "report"])
def test_faces_do_not_load_torch(part: str) -> None:
    """``niwaki --help`` and reading a record are quick."""
    assert not modules_after(f"import niwaki.{part}") & {"torch", "transformers"}


@pytest.mark.parametrize("before", ["nothing", "all modules"])
def test_public_names_are_not_modules_of_the_same_name(before: str) -> None:
    """Whatever was imported before, in any order, and also the second time."""
    code = f"""
import importlib, pkgutil, types
import niwaki
if {before!r} == "all modules":
    for module in pkgutil.iter_modules(niwaki.__path__, "niwaki."):
        if module.name not in ("niwaki.__main__", "niwaki._kernels"):  # the native library is no module
            importlib.import_module(module.name)
for name in [*niwaki.__all__, *reversed(niwaki.__all__)]:
    value = getattr(niwaki, name)
    assert not isinstance(value, types.ModuleType), f"niwaki.{{name}} is a module"
    assert value.__name__ == name
"""
    modules_after(code)
