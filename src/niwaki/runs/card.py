"""What the output says about itself: its model card, README.md, and its record, niwaki.json; and config.json."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from niwaki._version import __version__
from niwaki.checkpoints.reading import Checkpoint
from niwaki.effort import described
from niwaki.errors import UsageError
from niwaki.files import digest, digests, given_path, input_errors, output_errors, replace_file
from niwaki.options import Calibration, Compute, Measurement
from niwaki.records.perplexity import Perplexity
from niwaki.records.recipe import EARLIER_RECIPE, RECIPE, Recipe, Table, public_name
from niwaki.records.record import Record, calibration_of, facts
from niwaki.records.wording import markdown

# The model card of a directory: its README.md.

#: The card of a model that was written in another form, whose own card says what that is.
DENSE_CARD = "README.dense.md"
_NOTES = "\n\nNotes:\n\n"
_LONGEST = 2**20  # characters of what stands at the top of a card


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Takes no aliases: a card needs none, and a few lines of them can stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def top(readme: Path) -> dict[str, Any]:
    """What stands between the lines ``---`` of a card, with a list of texts as its tags; empty if that is not valid."""
    try:
        text = readme.read_text(encoding="utf-8-sig") if readme.is_file() else ""
        match = re.match(r"\s*---\n(.*?)\n---[ \t]*(?:\n|$)", text[:_LONGEST], re.DOTALL)
        values = yaml.load(match[1], _Loader) if match else None  # noqa: S506 - derived from the safe one
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError):  # as that library does
        return {}
    if not isinstance(values, dict):
        return {}
    tags = values.get("tags")
    tags = tags if isinstance(tags, list) else [tags]
    return {**values, "tags": [tag for tag in tags if isinstance(tag, str)]}


def notes(record: Record) -> str:
    """The end of a pruned model's card."""
    listed = "\n".join(f"* {markdown(note)}" for note in record.notes)
    has = "the full record: versions, command" + (", and every matrix" if record.matrices else " and curve")
    full = f"`niwaki.json` has {has}." + (
        " That of the pruning, if it has one, is `niwaki.base.json`." * record.only_heals
    )
    return f"{_NOTES if listed else ''}{listed}\n\n{full}\n"


def restate(directory: Path, old: str, new: str) -> None:
    """Puts the note ``new`` into the record in ``directory``, if it has one, and leaves out ``old``."""
    file = directory / "niwaki.json"
    if file.is_file():
        record = Record.load(file)
        record.notes = [*(note for note in record.notes if note != old), new]
        record.save(file)


def check_card(model: Path) -> None:
    """UsageError where ``model`` has a file with the name that its card is to get in another form of it."""
    if (model / DENSE_CARD).exists():
        raise UsageError(f"the model has a file {DENSE_CARD}, where its README.md belongs; rename it")


def write_card_of_form(
    directory: Path, library: str, tags: set[str], text: str, own: str, *, measured: bool = True
) -> None:
    """Writes the card of a model in another form: ``text``, for those who load it with ``library``.

    The model's own card becomes ``README.dense.md``, of which the text says that it is ``own``; what stands at its top
    stays in the new one, without what was ``measured`` where that is not true of this form.
    """
    readme, dense = directory / "README.md", ""
    with output_errors(directory):
        about = top(readme)
        if readme.exists():
            readme.replace(directory / DENSE_CARD)
            dense = f"\n[{DENSE_CARD}]({DENSE_CARD}) is {own}.\n"
        if not measured:
            about.pop("model-index", None)
        about |= {"library_name": library, "tags": sorted({*about.get("tags", []), *tags})}
        head = yaml.safe_dump(about, sort_keys=False, allow_unicode=True)
        # Names need not be text.
        readme.write_text(f"---\n{head}---\n{text}{dense}", encoding="utf-8", errors="backslashreplace")


#: What a model is, by what was done to it. All but the first have zeros among their weights.
_SHRUNK = (
    "{name} without some of its parts, which niwaki removed after training. It is dense and loads as any other model "
    "of its kind."
)
_SHRUNK_AND_PRUNED = (
    "{name} without some of its parts, which niwaki removed after training, and with zeros among the weights that are "
    "left. Zeros are stored as such, and it loads as any other model of its kind."
)
_HEALED = (
    "{name}, a pruned model, whose {trained} niwaki trained towards the {what} of the dense model. Zeros "
    "are stored as such, so this loads wherever the dense model does."
)
_PRUNED = (
    "The linear matrices of the decoder blocks of {name}, pruned after training with niwaki{where}{trained}. Zeros are "
    "stored as such, so this loads wherever the dense model does."
)
_FACTORED = (
    "The linear matrices of the decoder blocks of {name}, each made the product of two sparse factors after training "
    "with niwaki{where}. The products are stored, dense, so this loads wherever the dense model does; the factors are "
    "in factors/factors.safetensors, and `niwaki pack` writes these alone."
)
_QUANTIZED = (
    "{name}, with {parts} put on a grid of whole numbers with niwaki{trained}. They "
    "are stored as usual, so this loads wherever the original does; `niwaki pack` makes it small."
)
_TRAINED = ", and {trained} trained towards the dense model"
#: What is trained by methods that leave the weights.
_PARTS = {"norms": "norms and biases", "scales": "scales, norms and biases"}
_AGAIN = (
    "\n`recipe.toml` makes it again: `niwaki run MODEL OUT --recipe recipe.toml`, with the digests of what comes out.\n"
)
#: Keys at the top of the dense model's card that are true of the pruned one too.
_INHERITED = ("license", "license_name", "license_link", "language")


def write(directory: Path, record: Record, has_recipe: bool = False) -> None:
    """Writes the card of the model in ``directory``, README.md; ``has_recipe`` is whether a recipe will be beside it.

    The dense model's card stays as ``README.base.md``. Nothing in the new one depends on the clock: the same run makes
    the same card.
    """
    readme = directory / "README.md"
    record = _public(record)
    with output_errors(directory):
        inherited = top(readme)
        if readme.exists():
            readme.replace(directory / "README.base.md")
    name = markdown(Path(record.model).name or record.model)
    table = "\n".join(f"| {key} | {markdown(value)} |" for key, value in _rows(record).items() if value)
    text = f"# {name}, {record.outcome}\n\n{_about(record, name)}\n\n| | |\n|---|---|\n{table}{notes(record)}"
    replace_file(readme, f"---\n{_data(record, inherited).to_yaml()}\n---\n\n{text}{_AGAIN * has_recipe}")


def write_config(directory: Path, values: dict[str, Any], record: Record) -> None:
    """``config.json``: ``values`` with ``pruning_config``, an extra key that transformers keeps and ignores.

    Not ``quantization_config``: with a sparsity format there, transformers loads random weights.
    """
    whole = {**values, "pruning_config": pruning_config(record)}
    replace_file(directory / "config.json", json.dumps(whole, indent=2) + "\n")


def pruning_config(record: Record) -> dict[str, Any]:
    """What config.json says of how the model was made."""
    record = _public(record)
    return {
        "library": "niwaki",
        "version": __version__,
        **{name: getattr(record, name) for name in ("method", "solver", "effort", "mask_from", "pattern")},
        "sparsity": round(record.sparsity, 6),
        **{name: value for name in ("quantization", "embeddings", "blocks") if (value := getattr(record, name))},
    }


def _data(record: Record, inherited: Mapping[str, Any]) -> ModelCardData:
    """What is at the top of the card, for programs."""
    kept: dict[str, Any] = {key: inherited.get(key) for key in _INHERITED}
    measured, base = record.perplexity.get("after"), record.teacher or record.model
    return ModelCardData(
        base_model=base if base.count("/") == 1 else Path(base).name or base,  # of a directory only the name is told
        base_model_relation="quantized" if record.only_quantizes else "finetune",  # the hub knows no pruning
        library_name="transformers",
        model_name=record.outcome if measured else None,
        eval_results=[_result(measured)] if measured else None,
        tags=sorted({*inherited.get("tags", []), "niwaki", *_tags(record)}),
        **kept,
    )


def _public(record: Record) -> Record:
    """``record`` for those who have other directories: paths that were given are there without their folders."""
    healing, sources = record.healing, str(record.calibration.get("source", "")).split(" + ")
    texts = [each.text for found in (record.perplexity, record.vectors, record.scores) for each in found.values()]
    given = [record.model, record.mask_from or "", healing.teacher if healing else "", *sources, *texts]
    names = {name: public for name in given if name and (public := public_name(name)) != name}

    def told(text: str) -> str:
        for name in sorted(names, key=len, reverse=True):
            public = names[name].replace("\\", r"\\")
            text = re.sub(rf"(?<![\w./~-]){re.escape(name)}(?![\w-])", public, text)
        return text

    return dataclasses.replace(
        record,
        model=told(record.model),
        mask_from=record.mask_from and told(record.mask_from),
        pattern=told(record.pattern),
        healing=healing and dataclasses.replace(healing, teacher=told(healing.teacher)),
        calibration={**record.calibration, **({"source": told(" + ".join(sources))} if any(sources) else {})},
        perplexity={key: dataclasses.replace(each, text=told(each.text)) for key, each in record.perplexity.items()},
        vectors={key: dataclasses.replace(each, text=told(each.text)) for key, each in record.vectors.items()},
        scores={key: dataclasses.replace(each, text=told(each.text)) for key, each in record.scores.items()},
        stages=[dataclasses.replace(stage, asked=told(stage.asked)) for stage in record.stages],
        notes=[told(note) for note in record.notes],
    )


def _result(measured: Perplexity) -> EvalResult:
    """A perplexity as the hub lists it."""
    text = Path(measured.text).name
    return EvalResult(
        task_type="text-generation",
        dataset_name=text,
        dataset_type=re.sub(r"[^\w.-]+", "-", text),
        metric_type="perplexity",
        metric_name=f"perplexity of {measured.tokens:,} tokens, in windows of {measured.context:,}",
        metric_value=round(measured.value, 4),
    )


def _tags(record: Record) -> list[str]:
    """What hubs list the model under."""
    if record.only_quantizes:
        return ["quantized"]
    return ["pruned"] if record.only_shrinks else ["pruned", "sparse"]


def _about(record: Record, name: str) -> str:
    method = record.healing.method if record.healing else ""
    if record.structure:
        return (_SHRUNK if record.only_shrinks else _SHRUNK_AND_PRUNED).format(name=name)
    if record.only_heals:
        what = "states" if record.healing and record.healing.of_states else "predictions"
        return _HEALED.format(name=name, what=what, trained=_PARTS.get(method, "remaining weights"))
    if record.has_factors:
        return _FACTORED.format(name=name, where=record.where)
    if record.only_quantizes:
        parts = ["the weights of its decoder blocks{where}"] if record.quantization else []
        parts += ["its embeddings and head"] if record.embeddings else []
        about = _QUANTIZED.replace("{parts}", " and ".join(parts))
    else:
        about = _PRUNED
    trained = _TRAINED.format(trained=_PARTS.get(method, "what is left")) if method else ""
    return about.format(name=name, where=record.where, trained=trained)


def _rows(record: Record) -> dict[str, str]:
    """The table: names and values, of which those that are empty are left out."""
    rows = {
        "method": record.solved_by,
        "effort": described(record.effort) if record.effort else "",
        **facts(record),
        "calibration": calibration_of(record.calibration) if record.calibration else "",
    }
    for stage, cost in record.costs():
        rows[f"stage {stage.name}"] = ", ".join(filter(None, [stage.asked, cost and cost.words])) or "done"
    return {**rows, **(record.measured() or {"perplexity": "not measured"})}


# The recipe of a run: what it was asked for, and digests of what it read and wrote.

#: What stands for a text that was not given by a name. No file is called so.
_TOKENS = "<tokens that were given in Python>"
_WEIGHTS = (".safetensors", ".gguf")


def begin_recipe(
    stages: list[Table], model: str, calibration: Calibration, measurement: Measurement, compute: Compute
) -> Recipe:
    """The recipe of a run that is asked for, with digests of local texts alone.

    UsageError where two of its texts have the same name.
    """
    names = [public_name(text) for text in calibration.texts if isinstance(text, str)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two texts are called {twice}, and recipes name no directories")
    here = _table(compute)
    here.pop("max_memory", None)  # which changes no result
    what = {"model": {"name": public_name(model)}, "texts": digests_of_texts(calibration)}
    return Recipe(stages, _table(calibration), _table(measurement), here, **what)


def digests_of_texts(calibration: Calibration) -> dict[str, str]:
    """The digests of local texts, by the names of their files."""
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
