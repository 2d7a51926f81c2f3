"""What the output says about itself: its model card, README.md, and its record, niwaki.json."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from niwaki.effort import described
from niwaki.files import output_errors, write_json
from niwaki.records.record import CalibrationRecord, Record
from niwaki.records.wording import conversations, counted, in_words, markdown
from niwaki.runs.model_card import notes, top


def write(directory: Path, record: Record) -> None:
    """Writes the card of the model in ``directory``, README.md.

    The dense model's card stays as ``README.base.md``. Nothing in the new one depends on the clock: the same run makes
    the same card.
    """
    readme = directory / "README.md"
    with output_errors(directory):
        inherited = top(readme)
        if readme.exists():
            readme.replace(directory / "README.base.md")
    write_json(readme, _text(record, inherited))


def _text(record: Record, inherited: dict[str, Any]) -> str:
    name = Path(record.model).name or record.model
    base = record.teacher or record.model
    shown = markdown(name)
    where = f" in {record.part}" if record.part else ""
    structure, calibration = record.structure, record.calibration
    kept: dict[str, Any] = {key: inherited.get(key) for key in ("license", "license_name", "license_link", "language")}
    data = ModelCardData(
        base_model=base if base.count("/") == 1 else Path(base).name or base,
        library_name="transformers",
        tags=sorted({*inherited.get("tags", []), "niwaki", "pruned", *([] if record.only_shrinks else ["sparse"])}),
        **kept,
    )
    if structure and not record.only_shrinks:
        title = f"{structure.share} smaller, {100 * record.sparsity:.4g} % sparse" + ", healed" * bool(record.healing)
        about = (
            f"{shown} without some of its parts, which niwaki removed after training, and with zeros among the weights "
            "that are left. Zeros are stored as such, and it loads as any other model of its kind."
        )
    elif structure:
        title = f"{structure.share} smaller" + ", healed" * bool(record.healing)
        about = (
            f"{shown} without some of its parts, which niwaki removed after training. It is dense and loads as any "
            "other model of its kind."
        )
    elif record.only_heals:
        title = f"{100 * record.sparsity:.4g} % sparse, healed" if record.sparsity else "healed"
        about = (
            f"{shown}, a pruned model, whose remaining weights niwaki trained towards the predictions of the dense "
            "model. Zeros are stored as such, so this loads wherever the dense model does."
        )
    else:
        title = f"{100 * record.sparsity:.4g} % sparse{where}" + ", healed" * bool(record.healing)
        trained = ", and what is left trained towards the dense model's predictions" * bool(record.healing)
        about = (
            f"The linear matrices of the decoder blocks of {shown}, pruned after training with niwaki{where}{trained}. "
            "Zeros are stored as such, so this loads wherever the dense model does."
        )
    error = "output error of the matrices, relative, geometric mean"
    rows: dict[str, object] = {
        "method": in_words(record.solver),
        "effort": record.effort and described(record.effort),
        "removed" if record.only_shrinks else "pattern": record.pattern,
        "parameters": structure,
        "healed": record.healing,
        "mask from": record.mask_from,
        "zeros in the pruned matrices": None if record.only_shrinks else f"{100 * record.sparsity:.2f} %",
        "left dense": None if structure else record.stays,
        "format of the weights" if record.kept_format else "grid of the weights": record.rounding,
        "calibration": f"{_samples(calibration)} of "
        f"{' + '.join(Path(source).name for source in calibration['source'].split(' + '))}",
        "own text": record.own_text,
        error: f"{record.mean_error:.4g}" if record.matrices else None,
    }
    for stage, cost in record.costs():
        rows[f"stage {stage.name}"] = ", ".join(filter(None, [stage.asked, cost and f"{cost} nats a token"])) or "done"
    for when, measured in record.perplexity.items():
        rows[f"perplexity {when}"] = (
            f"{measured.figure} ({measured.tokens:,} tokens, context {measured.context:,}, {Path(measured.text).name})"
        )
    if not record.perplexity:
        rows["perplexity"] = "not measured"
    table = "\n".join(f"| {key} | {markdown(value)} |" for key, value in rows.items() if value)
    return f"---\n{data.to_yaml()}\n---\n\n# {shown}, {title}\n\n{about}\n\n| | |\n|---|---|\n{table}" + notes(record)


def _samples(calibration: CalibrationRecord) -> str:
    if "images" in calibration:
        return conversations(calibration)
    return f"{counted(calibration['samples'], 'window')} of {calibration['sequence_length']} tokens"
