"""The recipe of a run: what it was asked for, and digests of what it read and wrote."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import UsageError
from niwaki.files import digest, digests, given_path, input_errors, output_errors
from niwaki.options import Calibration, Compute, Measurement
from niwaki.records.recipe import EARLIER_RECIPE, RECIPE, Recipe, Table, public_name
from niwaki.records.record import Record

#: What stands for a text that was not given by a name. No file is called so.
_TOKENS = "<tokens that were given in Python>"
_WEIGHTS = (".safetensors", ".gguf")


def begin_recipe(
    stages: list[Table], model: str, calibration: Calibration, measurement: Measurement, compute: Compute
) -> Recipe:
    """The recipe of a run that is asked for, without digests; UsageError where two of its texts have the same name."""
    names = [public_name(text) for text in calibration.texts if isinstance(text, str)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two texts are called {twice}, and recipes name no directories")
    here = _table(compute)
    here.pop("max_memory", None)  # which changes no result
    return Recipe(stages, _table(calibration), _table(measurement), here, model={"name": public_name(model)})


def with_texts(recipe: Recipe, calibration: Calibration) -> Recipe:
    """The ``recipe`` with digests of local texts."""
    return dataclasses.replace(recipe, texts=digests_of_texts(calibration))


def digests_of_texts(calibration: Calibration) -> dict[str, str]:
    """Those of local texts, by the names of their files."""
    texts = {}
    for text in calibration.texts:
        with contextlib.suppress(UsageError, OSError):  # what is no path, or cannot be read, is for others to say
            if isinstance(text, str) and (path := given_path(text)).is_file():
                texts[path.name] = digest(path)
    return texts


def with_weights(recipe: Recipe, source: Path) -> Recipe:
    """The ``recipe`` with digests of the weights of the model in the directory ``source``, unless it has them."""
    if recipe.weights:
        return recipe
    with input_errors(source):
        weights = {name: digest(source / name) for name in sorted(Checkpoint(source).files)}
    return dataclasses.replace(recipe, weights=weights)


def with_result(recipe: Recipe, record: Record, directory: Path) -> Recipe:
    """The ``recipe`` with what the ``record`` says of versions, and digests of the weights in the ``directory``."""
    with output_errors(directory):
        result = digests(directory, ends=_WEIGHTS)
    made_with = {**record.versions, "device": record.device, "dtype": record.dtype}
    return dataclasses.replace(recipe, made_with=made_with, result=result)


def write_recipe(recipe: Recipe, directory: Path) -> None:
    """Writes it to ``directory``; one that is there is of the model that was read, and stays with a number."""
    with output_errors(directory):
        if (earlier := directory / RECIPE).exists():
            earlier.replace(directory / f"recipe.{len(earlier_recipes(directory)) + 1}.toml")
        (directory / RECIPE).write_text(recipe.toml(), encoding="utf-8")


def earlier_recipes(directory: Path) -> list[str]:
    """Names of the recipes of the models that the one in ``directory`` was made from, the first of them first."""
    found = (EARLIER_RECIPE.fullmatch(path.name) for path in directory.iterdir())
    return [each[0] for each in sorted(filter(None, found), key=lambda each: int(each[1]))]


def extend_recipe(directory: Path, stage: str, **parameters: str) -> None:
    """Adds the last ``stage`` to the recipe in ``directory``, if it has one; "unpack" takes the stage "pack" from it.

    Another's file of that name stays as it is. Files of llama.cpp have the name of the directory that they were made
    from, which is another one in a run: no digests are given for these.
    """
    try:
        recipe = Recipe.read(directory / RECIPE)
    except UsageError:
        return
    stages = recipe.stages[:-1] if stage == "unpack" else [*recipe.stages, {"stage": stage, **parameters}]
    with output_errors(directory):
        is_named = stage == "export" and parameters["format"].startswith("gguf")
        result = {} if is_named else digests(directory, ends=_WEIGHTS)
        made = dataclasses.replace(recipe, stages=stages, result=result)
        (directory / RECIPE).write_text(made.toml(), encoding="utf-8")


def _table(options: Calibration | Measurement | Compute) -> Table:
    """What was chosen of the ``options``, as a recipe has it."""
    return {name: _said(value) for name, value in options.chosen.items()}


def _said(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_said(each) for each in value]
    if isinstance(value, str):
        return public_name(value)
    return value if isinstance(value, bool | int | float) else _TOKENS
