"""``niwaki export``: a model in a format that other programs read, by itself or as the last stage of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from niwaki.arguments import checked, checked_names
from niwaki.checkpoints.reading import Checkpoint
from niwaki.choices import ExportFormat
from niwaki.errors import UsageError
from niwaki.exports.compressed_tensors import W8A8, CompressedTensors, Float8, PackedFloats, PackedIntegers
from niwaki.exports.gguf_file import KINDS, Gguf, write_gguf
from niwaki.files import is_gguf_file
from niwaki.layer.grid import FloatGrid
from niwaki.models.locate import locate_model
from niwaki.models.scales import grid_of
from niwaki.packed.pack import Packed
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.runs.conversion import Conversion, convert, model_name, write_form
from niwaki.runs.stage import Run, Stage, Task

#: Those of compressed-tensors.
_FOR_SERVERS: dict[str, type[CompressedTensors]] = {"compressed-tensors": PackedIntegers, "w8a8": W8A8, "fp8": Float8}


@checked
def export(
    model: str | Path,
    out: str | Path,
    format: ExportFormat = "compressed-tensors",  # noqa: A002 - it is the word for it
    progress: Progress | None = None,
) -> list[str]:
    """Writes a model in a ``format`` that is smaller or for other programs.

    | format | what it is | for which models |
    |---|---|---|
    | "compressed-tensors" | packed integers, for transformers and vLLM | on a grid, as by ``quantize`` |
    | "w8a8" | the same of 8 bits, for inputs that are rounded to 8 bits too | on the grid "int8" |
    | "fp8" | weights in FP8, for inputs that are rounded to FP8 too | any that is not on a grid |
    | "packed" | a mask and values, for :func:`niwaki.load` | pruned, or on a grid |
    | "gguf" | one file, for llama.cpp and Ollama, with the numbers that there are | on a grid of llama.cpp's |
    | "gguf-f16", "gguf-q8_0", "gguf-q4_0" | the same, rounded to the nearest | LLaMA, Qwen, Gemma and more |

    Only one tensor is in memory at a time.

    Args:
        model: A directory or hub id.
        out: Output directory, new or empty. For GGUF it receives the file, such as ``model-Q8_0.gguf``, a model card
            and the record; if the name ends in ".gguf", ``out`` is the file itself.
        format: "compressed-tensors", "w8a8", "fp8", "packed", "gguf", "gguf-f16", "gguf-q8_0" or "gguf-q4_0".
        progress: Receives the progress of the export.

    Returns:
        Notes on the result, a sentence each, such as where llama.cpp differs.

    Raises:
        UsageError: ``out`` is taken or inside the model's directory; the weights are not on a grid, or not on one that
            the format has; no matrix would be smaller packed.
        UnsupportedModelError: the format does not support the model, or llama.cpp would compute something else.
        CheckpointError: scales are missing, or do not belong to the weights.
        OutputError: weights are not on their grid any more, or a file cannot be written.
        NiwakiError: see :mod:`niwaki.errors`. After an error nothing is left.
    """
    is_file = is_gguf_file(out, format)
    form = _opened(format, Checkpoint(locate_model(str(model))), str(model), progress or Progress())
    if is_file and isinstance(form, Gguf):
        return write_gguf(form, model, out)
    return convert(form, model, out, "export", format=format)


def _opened(
    how: ExportFormat, checkpoint: Checkpoint, name: str, progress: Progress, changes: Mapping[str, Any] = {}
) -> Conversion:
    """The model ``name`` as the format ``how`` has it; ``changes`` are what stages to come change in config.json."""
    if how == "packed":
        return Packed(checkpoint, progress)
    if how == "compressed-tensors" and isinstance(grid_of(checkpoint), FloatGrid):
        return PackedFloats(checkpoint, name, progress)
    if how in _FOR_SERVERS:
        return _FOR_SERVERS[how](checkpoint, name, progress)
    form = Gguf(checkpoint, KINDS[how], changes, progress)
    if checkpoint.pruning.has_factors:
        progress.note(f"{how} has no factors: matrices are written as the products of their two, dense")
    return form


@checked_names
@dataclass(frozen=True)
class Export(Stage):
    """The stage that writes the model in another ``format``, as :func:`niwaki.export` does; it is the last of a run."""

    format: ExportFormat = "compressed-tensors"

    name: ClassVar[str] = "export"
    is_format: ClassVar[bool] = True
    keeps_factors: ClassVar[bool] = True

    @property
    def fuses_layers(self) -> bool:  # type: ignore[override]
        return self.format == "compressed-tensors"

    def check_order(self, before: tuple[Stage, ...]) -> None:
        if self.format == "packed":
            if not any(stage.makes_zeros or stage.grid for stage in before):
                raise UsageError(f"{self.name} comes after prune or quantize: there are no zeros to leave out yet")
            if any(stage.keep_format for stage in before):
                raise UsageError("weights that stay in FP8 or MXFP4 cannot be packed; prune without keep_format")
        elif not before:
            raise UsageError(
                "there is nothing to do before the export: to export a model as it is, use 'niwaki export'"
            )

    def open(self, run: Run) -> Exporting:
        return Exporting(self, run)

    def __str__(self) -> str:
        return self.format


@checked_names
@dataclass(frozen=True)
class Pack(Export):
    """The stage that writes the model without its zeros, as :func:`niwaki.pack` does: ``Export("packed")``."""

    format: ExportFormat = field(default="packed", init=False)

    name: ClassVar[str] = "pack"

    def __str__(self) -> str:
        return ""


class Exporting(Task):
    """:class:`Export`, opened for a run: what the configuration that comes out of the stages before allows."""

    def __init__(self, stage: Export, run: Run) -> None:
        self._format = stage.format
        checkpoint = Checkpoint(run.reading)
        has_zeros = checkpoint.pruning.pattern or any(stage.makes_zeros for stage in run.stages)
        checkpoint.config = {**checkpoint.config, **run.foreseen}
        form = _opened(stage.format, checkpoint, run.model, run.progress, run.foreseen)
        if isinstance(form, Packed) and not has_zeros:
            form.check_groups(run.model)
        run.carried(checkpoint, form.size, form.kept)

    def asked(self) -> dict[str, Any]:
        return {"format": self._format}

    def expected(self, speed: float) -> float:
        return 0.0

    def work(self, run: Run) -> Record:
        assert run.earlier
        if run.place:
            form = _opened(self._format, Checkpoint(run.reading), run.model, run.progress)
            carried = run.carried(form.checkpoint, form.size, form.kept)
            assert carried
            form.check(run.model)
            run.place.clear([])
            for note in write_form(form, carried, run.place.directory, model_name(run.model, run.source)):
                run.progress.note(note)
            run.clock.lap("write")
        return dataclasses.replace(run.earlier)
