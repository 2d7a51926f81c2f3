"""Stages by name: as text such as "prune 2:4 effort=best", and as the tables of recipes."""

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from typing import Any, cast, get_args, get_type_hints

from niwaki.arguments import given_fields
from niwaki.choices import FIRST_PARAMETERS
from niwaki.effort import Effort, effort_text, make_effort
from niwaki.errors import UnknownNameError, UsageError, named, shown
from niwaki.exports.export import Export, Pack
from niwaki.healing.heal import Heal
from niwaki.layer.block_types import BlockGrid
from niwaki.layer.grid import Grid, parse_grid
from niwaki.layer.patterns import Pattern, parse_pattern
from niwaki.layer.solvers import Solver, make_solver, solver_text
from niwaki.pruning.embeddings import QuantizeEmbeddings
from niwaki.pruning.prune import Prune, Quantize
from niwaki.quantities import find, parse_stage
from niwaki.records.recipe import Recipe, public_name
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
#: Parameters that may be the directory of another model.
_MODELS = {"teacher", "mask_from"}
#: Of values that are no text, the text that stands for one, and what makes one of text.
_TEXTS: tuple[tuple[type, Callable[[Any], str], Callable[[str], Any]], ...] = (
    (Pattern, str, parse_pattern),
    (Grid, str, parse_grid),
    (BlockGrid, str, parse_grid),
    (Effort, effort_text, make_effort),
    (Solver, solver_text, make_solver),
)


def make_stages(given: Sequence[Stage | str]) -> list[Stage]:
    """The stages that are ``given``, as such or as text; UsageError where one is not valid, which it names."""
    stages = []
    for number, each in enumerate(given):
        with named(label(number, len(given), _name_in(each) if isinstance(each, str) else "")):
            if isinstance(each, type):
                raise UsageError(f"give a stage with its parameters, as in {each.__name__}(...); got only the class")
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
    return _made(*parse_stage(text))


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


def stages_of(recipe: Recipe) -> list[Stage]:
    """The stages of a recipe; UsageError where one is not valid."""
    stages = []
    for number, table in enumerate(recipe.stages):
        given = dict(table)
        if not isinstance(name := given.pop("stage", None), str):
            raise UsageError(f"table {number + 1} of stages does not say which stage it is, as in stage = 'prune'")
        with named(label(number, len(recipe.stages), _name_in(name))):
            stages.append(_made(name, given))
    return stages


def table_of(stage: Stage) -> dict[str, Any]:
    """``stage`` as a recipe has it: its name and the parameters that were given.

    UsageError where one cannot be said in a recipe, such as a solver that is not among niwaki's own.
    """
    kind: Any = STAGES.get(stage.name)
    if type(stage) is not kind:
        raise UsageError(f"{type(stage).__name__} is not one of niwaki's own stages")
    usual = {field.name: field.default for field in dataclasses.fields(cast("Any", stage))}
    given = {name: getattr(stage, name) for name in given_fields(kind) if getattr(stage, name) != usual[name]}
    said = {name: public_name(value) if name in _MODELS else _said(name, value) for name, value in given.items()}
    return {"stage": stage.name, **said}


def text_of(stage: Stage) -> str:
    """``stage`` as text that :func:`make_stage` reads; UsageError as :func:`table_of` raises it."""
    words = []
    for name, value in table_of(stage).items():
        said = str(value).lower() if isinstance(value, bool) else str(value)
        given = said if name in ("stage", FIRST_PARAMETERS[stage.name]) else f"{name}={said}"
        words.append(shlex.quote(given))
    return " ".join(words)


def _said(name: str, value: Any) -> Any:
    """The parameter ``value`` as text or a number that stands for it; UsageError where none does."""
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, tuple):
        return list(value)
    for kind, as_text, make in _TEXTS:
        if isinstance(value, kind):
            with contextlib.suppress(UsageError, LookupError):
                if make(text := as_text(value)) == value:
                    return text
    raise UsageError(f"{name} is {type(value).__name__}, which a recipe cannot contain")
