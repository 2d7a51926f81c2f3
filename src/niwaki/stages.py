"""Stages by name: as text such as "prune 2:4 effort=best", and in the TOML files of recipes."""

import importlib
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from niwaki.arguments import given_fields
from niwaki.errors import UnknownNameError, UsageError, named, shown
from niwaki.exports.export import Export, Pack
from niwaki.files import given_path
from niwaki.healing.heal import Heal
from niwaki.named import find
from niwaki.pruning.embeddings import QuantizeEmbeddings
from niwaki.pruning.prune import Prune, Quantize
from niwaki.runs.stage import Stage, label
from niwaki.shrinking.shrink import Shrink
from niwaki.shrinking.vocabulary import ShrinkVocabulary

#: By name in recipes and on the command line.
STAGES: dict[str, Callable[..., Stage]] = {
    "vocabulary": ShrinkVocabulary,
    "shrink": Shrink,
    "prune": Prune,
    "quantize": Quantize,
    "heal": Heal,
    "embeddings": QuantizeEmbeddings,
    "pack": Pack,
    "export": Export,
}
#: The parameter that may stand without its name.
_FIRST = {"vocabulary": "size", "prune": "pattern", "quantize": "grid", "embeddings": "grid", "export": "format"}
#: For words without a name.
_EXAMPLES = {"shrink": "neurons=0.25", "prune": "pattern=0.5", "quantize": "grid=int4:128", "heal": "max_time=30m"}
#: What a recipe has beside its stages.
_STAGES = "stages"


def make_stages(given: Sequence[Stage | str]) -> list[Stage]:
    """The stages that are ``given``, as such or as text; UsageError where one is not valid, which it names."""
    stages = []
    for number, each in enumerate(given):
        with named(label(number, len(given), _name_in(each) if isinstance(each, str) else "")):
            if isinstance(each, type):
                raise UsageError(f"a stage has its parameters, as in {each.__name__}(...); got the class alone")
            stages.append(make_stage(each) if isinstance(each, str) else each)
    return stages


def _name_in(text: str) -> str:
    """The name of the stage that ``text`` describes; "" where there is none of that name."""
    name = text.split()[0] if text.split() else ""
    return name if name in STAGES else ""


def make_stage(text: str) -> Stage:
    """The stage that ``text`` describes: its name and parameters, such as "prune 2:4 effort=best".

    UsageError where it is not valid; UnknownNameError, which is one, for names.
    """
    try:
        name, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise UsageError(f"{text!r} is no stage: {error}; such as 'shrink neurons=0.25'") from None
    find("stage", name, STAGES)
    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            if name not in _FIRST or _FIRST[name] in given:
                hint = f", such as {_EXAMPLES[name]}" if name in _EXAMPLES else ""
                raise UsageError(f"{word!r} of the stage {text!r} has no name; parameters are written NAME=VALUE{hint}")
            key, value = _FIRST[name], word
        if key in given:
            raise UsageError(f"the stage {text!r} gives {key} twice")
        given[key] = value
    return _made(name, given)


def _made(name: str, given: dict[str, Any]) -> Stage:
    """The stage called ``name`` with parameters as in a recipe, of which text may stand for numbers."""
    kind: Any = find("stage", name, STAGES)
    hints = get_type_hints(kind)
    known = {field: hints[field] for field in given_fields(kind)}
    for key, value in given.items():
        if key not in known:
            raise UnknownNameError(f"parameter of the stage {name}", key, known)
        given[key] = _value(f"{key} of the stage {name}", value, known[key])
    made: Stage = kind(**given)
    return made


def _value(name: str, value: Any, hint: Any) -> Any:
    """``value`` as a field of type ``hint`` takes it."""
    kinds = get_args(hint) or (hint,)
    if not isinstance(value, str) or str in kinds or all(isinstance(kind, str) for kind in kinds):
        return value
    for kind, make in ((bool, {"true": True, "false": False}.__getitem__), (int, int), (float, float)):
        if kind in kinds:
            try:
                return make(value)
            except (ValueError, KeyError):
                continue
    raise UsageError(f"{name} cannot be {shown(value)}")


def read_recipe(path: str | Path) -> list[Stage]:
    """The stages of a recipe: a TOML file with a list of tables called ``stages``.

    Each has the ``stage``'s name and its parameters. UsageError, which names the file, where it is not valid.
    """
    file = given_path(path)
    try:
        values = _toml(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{file} is no TOML file: {error}") from error
    tables = values.pop(_STAGES, None)
    if values or not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        others = f"; it has {', '.join(map(repr, values))}" if values else ""
        raise UsageError(
            f"{file} is no recipe, which has a table [[{_STAGES}]] for each stage, with its name as 'stage'{others}"
        )
    stages = []
    for number, table in enumerate(tables):
        if not isinstance(name := table.pop("stage", None), str):
            raise UsageError(
                f"{file}: table {number + 1} of {_STAGES} does not say which stage it is, as in stage = 'prune'"
            )
        try:
            with named(label(number, len(tables), _name_in(name))):
                stages.append(_made(name, table))
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from None
    return stages


def _toml(file: Path) -> dict[str, Any]:
    try:
        toml: Any = importlib.import_module("tomllib")
    except ImportError:  # Python 3.10
        toml = importlib.import_module("tomli")
    values: dict[str, Any] = toml.loads(file.read_text(encoding="utf-8"))
    return values
