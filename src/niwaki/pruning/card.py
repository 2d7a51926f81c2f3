"""The model card: README.md of the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from niwaki.files import output_errors
from niwaki.models.model_card import notes, top
from niwaki.pruning.effort import described
from niwaki.records.parameters import in_words
from niwaki.records.record import Record
from niwaki.records.wording import counted

#: The dense model's own card, which the new one replaces.
BASE_CARD = "README.base.md"


def write(directory: Path, record: Record) -> None:
    """Writes README.md; a card that was carried over keeps its text as ``README.base.md``.

    Nothing in it depends on the clock: the same run makes the same card.
    """
    readme = directory / "README.md"
    with output_errors(directory):
        inherited = top(readme)
        if readme.exists():
            readme.replace(directory / BASE_CARD)
        readme.write_text(_text(record, inherited), encoding="utf-8")


def _text(record: Record, inherited: dict[str, Any]) -> str:
    name = Path(record.model).name or record.model
    where = f" in {record.part}" if record.part else ""
    structure = record.structure
    tags = inherited.get("tags", [])
    data = ModelCardData(
        base_model=record.model if record.model.count("/") == 1 else name,
        library_name="transformers",
        license=inherited.get("license"),
        license_name=inherited.get("license_name"),
        license_link=inherited.get("license_link"),
        language=inherited.get("language"),
        tags=sorted({*tags, "niwaki", "pruned", *([] if structure else ["sparse"])}),
    )
    if structure:
        title = f"{structure.share} smaller"
        about = (
            f"`{name}` without some of its parts, which niwaki removed after training. It is dense and loads as any "
            "other model of its kind."
        )
        rows = [f"| removed | {record.pattern} |", f"| parameters | {structure} |"]
    else:
        title = f"{100 * record.sparsity:.4g} % sparse{where}"
        about = (
            f"The linear matrices of the decoder blocks of `{name}`, pruned after training with niwaki{where}. "
            "Zeros are stored as such, so this loads wherever the dense model does."
        )
        rows = [
            f"| pattern | {record.pattern} |",
            *([f"| mask from | {record.mask_from} |"] if record.mask_from else []),
            f"| zeros in the pruned matrices | {100 * record.sparsity:.2f} % |",
        ]
    lines = [
        "---",
        data.to_yaml(),
        "---",
        "",
        f"# {name}, {title}",
        "",
        about,
        "",
        "| | |",
        "|---|---|",
        f"| method | {in_words(record.solver)} |",
        *([f"| effort | {described(record.effort)} |"] if record.effort else []),
        *rows,
        *([f"| grid of the weights | {record.rounding} |"] if record.quantization else []),
        f"| calibration | {counted(record.calibration['samples'], 'window')} of "
        f"{record.calibration['sequence_length']} tokens of {Path(record.calibration['source']).name} |",
        *([f"| own text | {record.own_text} |"] if record.own_text else []),
        *(
            [f"| output error of the matrices, relative, geometric mean | {record.mean_error:.4g} |"]
            if record.matrices
            else []
        ),
    ]
    for when, measured in record.perplexity.items():
        error = "" if measured.standard_error is None else f" ± {measured.standard_error:.2f}"
        lines.append(
            f"| perplexity {when} | {measured.value:.2f}{error} "
            f"({measured.tokens:,} tokens, context {measured.context:,}, {Path(measured.text).name}) |"
        )
    if not record.perplexity:
        lines.append("| perplexity | not measured |")
    return "\n".join(lines) + notes(record)
