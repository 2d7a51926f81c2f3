"""What can be seen to be wrong with what is given before torch is imported, which takes seconds."""

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from niwaki.checkpoints.foreign import recognized
from niwaki.checkpoints.local import check_model, find_local
from niwaki.choices import MASK_NAMES, SOLVER_NAMES, WEIGHT_NAMES
from niwaki.cli.common import names
from niwaki.effort import NO_EFFORT, make_effort
from niwaki.errors import CheckpointError, UnknownNameError, UsageError
from niwaki.files import given_path, is_gguf_file, is_model
from niwaki.options import check_count, check_device, check_dtype
from niwaki.quantities import (
    check_grid_name,
    check_sparsity,
    check_temperature,
    find,
    fraction,
    parse_compressed_size,
    parse_multiple,
    parse_name,
    parse_number,
    parse_parameters,
    parse_positive,
    parse_range,
    parse_share,
    parse_stage,
    parse_time,
    parse_vocabulary,
    read_pattern,
)
from niwaki.runs.workplace import check_comparison, check_file, check_output
from niwaki.texts.sources import check_text

_SOLVERS = dict.fromkeys((*MASK_NAMES, *SOLVER_NAMES, *WEIGHT_NAMES))


def _effort(text: str) -> None:
    if text != NO_EFFORT:  # which some commands know
        make_effort(text)


def _solver(text: str) -> None:
    for each in text.split("+"):
        find("solver", parse_name(each)[0], _SOLVERS)


def _compared(text: str) -> None:
    name, at, effort = text.partition("@")
    _solver(name)
    if at:
        _effort(effort)


def _mask(text: str) -> None:
    if is_model(text):
        find_local(text)
        return
    try:
        _solver(text)
    except UnknownNameError as error:
        raise UsageError(f"there is no directory {text} to take masks from, and {error}") from None


def _pattern(text: str) -> None:
    if (share := fraction(text)) is None:
        read_pattern(text)
    else:
        check_sparsity(float(share))


def _all_of(check: Callable[[str], object], text: str) -> None:
    if not (found := names(text)):
        raise UsageError("say which solvers and which patterns to compare, such as wanda and 0.5")
    for each in found:
        check(each)


def _prompt(text: str) -> None:
    if not text:
        raise UsageError("the prompt is empty; give some text")


def _published(text: str) -> None:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        raise UsageError(f"the name on the hub is OWNER/NAME, such as me/small-model; got {text!r}")


def _stage(text: str) -> None:
    name, given = parse_stage(text)
    if name == "heal" and parse_multiple(str(given.get("tokens"))):
        del given["tokens"]  # so many times those of a stage before
    check({key: value for key, value in given.items() if (name, key) not in _OTHERS})


def _model(text: str) -> None:
    path = find_local(text)
    if path is None:
        check_model(text)
    elif path.is_dir() and not (path / "config.json").exists() and not any(path.glob("*.safetensors*")):
        raise CheckpointError(recognized(path, False) or f"{path} has no config.json; is it a model directory?")


def _count(name: str, given: int | str) -> None:
    check_count(name, parse_number(given) if isinstance(given, str) else given, 1)


def _blocks(given: int | str) -> None:
    if isinstance(given, str):
        parse_range(given)
    else:
        check_count("blocks", given, 0)


def _rate(given: float | str) -> None:
    if isinstance(given, float) and not given > 0:  # text is of a stage, which reads it
        raise UsageError(f"the learning rate must be above 0; got {given}")


def _directory(text: str) -> None:
    if not given_path(text).is_dir():
        raise UsageError(f"there is no directory {text}; give one that niwaki wrote")


def _new_file(text: str) -> None:
    if os.path.lexists(file := given_path(text, 12)):
        raise UsageError(f"{text} exists; choose another name or remove it")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {file.absolute().parent}")


#: By the name of an option, argument or parameter of a stage.
_CHECKS: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(("model", "pruned", "teacher", "against"), _model),
    **dict.fromkeys(("grid", "quantize", "embeddings"), check_grid_name),
    **dict.fromkeys(("sparsity", "pattern"), _pattern),
    **dict.fromkeys(("calibration", "text", "also"), check_text),
    **{name: partial(_count, name) for name in ("tokens", "batch", "prompt_tokens", "repeats", "limit")},
    **{name: partial(parse_share, name) for name in ("neurons", "heads", "experts", "own_text")},
    **{name: partial(parse_positive, name) for name in ("loss", "speed")},
    "directory": _directory,
    "name": _published,
    "prompt": _prompt,
    "record": check_file,
    "new_file": _new_file,
    "patterns": partial(_all_of, _pattern),
    "solver": _solver,
    "solvers": partial(_all_of, _compared),
    "mask_from": _mask,
    "effort": _effort,
    "stages": _stage,
    "blocks": _blocks,
    "vocabulary": parse_vocabulary,
    "parameters": parse_parameters,
    "size": parse_compressed_size,
    "max_time": parse_time,
    "rate": _rate,
    "temperature": check_temperature,
    "device": check_device,
    "dtype": check_dtype,
}
#: Parameters of stages that are something else than the option of that name.
_OTHERS = {("vocabulary", "size"), ("shrink", "blocks")}


def check(given: Mapping[str, Any]) -> None:
    """UsageError where something that was ``given``, by the name of its option or argument, is not valid.

    CalibrationError for texts, CheckpointError for models that cannot be read.
    """
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None and name in _CHECKS:
                _CHECKS[name](each)
    if isinstance(results := given.get("results"), str):
        model = given["model"]
        check_comparison(given_path(results).resolve(), given_path(model), find_local(model))
    if given.get("plan"):
        return  # nothing is written
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return  # of several processes the first one looks, when all are there
    if isinstance(output := given.get("output"), str) and not ("form" in given and is_gguf_file(output, given["form"])):
        models = (given.get(name) for name in ("model", "pruned"))
        check_output(next((find_local(each) for each in models if isinstance(each, str)), None), output)
