"""Recipes: what niwaki was asked for, as a file with which anybody can make the same model again."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tomli_w

from niwaki.arguments import checked
from niwaki.errors import UsageError
from niwaki.files import given_path
from niwaki.records.wording import printable

#: What a recipe is called in the directory of the model that was made by it.
RECIPE = "recipe.toml"
#: Where a model was made by several commands, those of all but the last, by their number from 1.
EARLIER_RECIPE = re.compile(r"recipe\.([1-9][0-9]{0,3})\.toml")
#: Characters of the largest file that can be one.
_LONGEST = 1 << 20
_STAGES = "stages"
#: A stage of it, or a group of options: values that TOML has, by name.
Table = dict[str, Any]
Digests = dict[str, Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]]

_HEAD = """\
# How this model was made with niwaki. To make it again{where}:
#
#     niwaki run {model} OUT --recipe {file}
#
# The versions below, the same kind of processor and the same number of threads give the same bytes.
"""
_BY_THE_CLOCK = "# But healing was limited by a time, and how far it comes in that differs from run to run.\n"


@dataclass(frozen=True)
class Recipe:
    """The stages and options of a run, as in ``recipe.toml``; :func:`niwaki.run` and ``niwaki run --recipe`` repeat it.

    Only ``stages`` is required. The options are those of :class:`~niwaki.options.Calibration`,
    :class:`~niwaki.options.Measurement` and :class:`~niwaki.options.Compute`, with their defaults. The other attributes
    show whether another run of the recipe gives the same model.

    Attributes:
        stages: A table for each stage, with its name as "stage" and its parameters.
        calibration: Options for the texts to calibrate on.
        measurement: Options for the text to measure on.
        compute: Options for the device and dtype.
        model: The original model, with its name as "name".
        weights: SHA-256 of the original model's weight files, by name.
        texts: SHA-256 of the local files that were calibrated on, by name.
        made_with: Versions and the device, by name.
        result: SHA-256 of the weight files that were written, by name.
    """

    stages: list[Table]
    calibration: Table = field(default_factory=dict)
    measurement: Table = field(default_factory=dict)
    compute: Table = field(default_factory=dict)
    model: dict[str, str] = field(default_factory=dict)
    weights: Digests = field(default_factory=dict)
    texts: Digests = field(default_factory=dict)
    made_with: dict[str, str] = field(default_factory=dict)
    result: Digests = field(default_factory=dict)

    @classmethod
    @checked
    def read(cls, path: str | Path) -> Recipe:
        """Reads the recipe in the TOML file at ``path``, or in the ``recipe.toml`` of a directory.

        Names and parameters of stages, and values of options, are checked when the recipe is run.

        Raises:
            UsageError: the file is not a valid recipe.
        """
        file = given_path(path)
        file = file / RECIPE if file.is_dir() else file
        try:
            if file.exists() and (not file.is_file() or file.stat().st_size > _LONGEST):
                raise UsageError(f"{file} is not a recipe: it is too large, or not a file")
            values = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{file} is not a TOML file: {error}") from error
        tables = values.get(_STAGES)
        others = [name for name in values if name not in {each.name for each in dataclasses.fields(cls)}]
        if not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
            raise UsageError(
                f"{file} is not a recipe: it needs a table [[{_STAGES}]] for each stage, with its name as 'stage'"
            )
        if others:
            raise UsageError(f"{file} has {', '.join(map(repr, others))}, which recipes do not have")
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"{file} is not a valid recipe: {error}") from error

    def toml(self) -> str:
        """The recipe as TOML text, with a comment that says how to use it."""
        where = f", with {_line(', '.join(self.texts))} in the working directory" if self.texts else ""
        model = shlex.quote(_line(self.model.get("name", ""))) if self.model else "MODEL"
        head = _HEAD.format(where=where, model=model, file=RECIPE)
        if any(stage.get("max_time") for stage in self.stages):
            head += _BY_THE_CLOCK
        values = {name: value for name, value in dataclasses.asdict(self).items() if value}
        return f"{head}\n{tomli_w.dumps(values)}"

    def with_options(self, **given: Table) -> Recipe:
        """The recipe with other options, by the name of their table; options ``given`` here override its own."""
        changed: Any = {name: {**getattr(self, name), **table} for name, table in given.items()}
        return dataclasses.replace(self, **changed)

    def renamed(self, former: str, name: str) -> Recipe:
        """The recipe with the model ``former`` renamed to ``name``."""
        stages = [{key: name if value == former else value for key, value in stage.items()} for stage in self.stages]
        model = {key: name if value == former else value for key, value in self.model.items()}
        return dataclasses.replace(self, stages=stages, model=model)

    def differences(self, other: Recipe) -> list[str]:
        """How ``other``, a run of this recipe, differs from it in model, texts, versions and device, in words."""
        found = [
            f"{what} ({', '.join(names)}) {_has(names)} other bytes"
            for what, here, there in (("the model", self.weights, other.weights), ("the text", self.texts, other.texts))
            if here and (names := sorted(name for name in {**here, **there} if here.get(name) != there.get(name)))
        ]
        differing = [
            f"{name} is {value} and not {self.made_with[name]}"
            for name, value in other.made_with.items()
            if name in self.made_with and self.made_with[name] != value
        ]
        return found + differing

    def outcome(self, other: Recipe) -> str:
        """Whether ``other``, a run of this recipe, made the same weights, as a sentence; "" without any digests."""
        if not self.result:
            return "the recipe has no digests of weights to compare these with" if self.made_with else ""
        if self.result == other.result:
            return "the weights have the bytes that the recipe names: it is the same model"
        why = self.differences(other)
        return "the weights are not those that the recipe names" + (f": {'; '.join(why)}" if why else "")


def public_name(value: str | Path) -> str:
    """A name for those who have other directories: of a path that is there, without its folders."""
    try:
        path = given_path(value)
        return path.absolute().name if path.exists() else str(value)
    except (OSError, UsageError):  # no path, which is for others to say
        return str(value)


def _line(text: str) -> str:
    """``text`` for a comment, which ends with the line."""
    return printable(" ".join(text.split()))


def _has(names: Any) -> str:
    return "has" if len(names) == 1 else "have"
