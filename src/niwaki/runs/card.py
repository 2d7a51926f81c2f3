"""What the output says about itself: its model card, README.md, and its record, niwaki.json; and config.json."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from niwaki._version import __version__
from niwaki.effort import described
from niwaki.files import output_errors, replace_file
from niwaki.records.facts import calibration_of, facts
from niwaki.records.perplexity import Perplexity
from niwaki.records.recipe import public_name
from niwaki.records.record import Record
from niwaki.records.wording import markdown
from niwaki.runs.model_card import notes, top

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
    "{name}, a pruned model, whose remaining weights niwaki trained towards the {what} of the dense model. Zeros "
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
_TRAINED = ", and what is left trained towards the dense model"
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
    measured = record.perplexity.get("after")
    return ModelCardData(
        base_model=base_name(record.teacher or record.model),
        base_model_relation="quantized" if record.only_quantizes else "finetune",  # the hub knows no pruning
        library_name="transformers",
        model_name=record.outcome if measured else None,
        eval_results=[_result(measured)] if measured else None,
        tags=sorted({*inherited.get("tags", []), "niwaki", *_tags(record)}),
        **kept,
    )


def base_name(model: str) -> str:
    """What to call a model that was given by a hub id, or by a directory of which only the name is told."""
    return model if model.count("/") == 1 else Path(model).name or model


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
    if record.structure:
        return (_SHRUNK if record.only_shrinks else _SHRUNK_AND_PRUNED).format(name=name)
    if record.only_heals:
        what = "states" if record.healing and record.healing.of_states else "predictions"
        return _HEALED.format(name=name, what=what)
    if record.has_factors:
        return _FACTORED.format(name=name, where=record.where)
    if record.only_quantizes:
        parts = ["the weights of its decoder blocks{where}"] if record.quantization else []
        parts += ["its embeddings and head"] if record.embeddings else []
        about = _QUANTIZED.replace("{parts}", " and ".join(parts))
    else:
        about = _PRUNED
    return about.format(name=name, where=record.where, trained=_TRAINED * bool(record.healing))


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
