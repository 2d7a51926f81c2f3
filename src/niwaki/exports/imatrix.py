"""Importance matrices for llama.cpp: how large the inputs of each matrix are on a text, by llama.cpp's names.

`llama-quantize --imatrix` weighs the error of each weight by the mean square of its input. Sources: tools/imatrix and
common/imatrix-loader.cpp of llama.cpp, which say what such a file has.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from niwaki.arguments import checked
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import NumericalError, UnsupportedModelError
from niwaki.exports.gguf_file import Gguf, check_place, package
from niwaki.files import new_file
from niwaki.layer.linalg import is_finite, products
from niwaki.models.block import DecoderBlock
from niwaki.models.gram_capture import Products
from niwaki.models.hidden_states import HiddenStates, MemoryBudget
from niwaki.models.locate import locate_model
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.options import Calibration, Compute, Measurement, Text
from niwaki.records.progress import Progress
from niwaki.records.recipe import public_name
from niwaki.records.wording import counted
from niwaki.runs.duration import passes, products_per_second
from niwaki.texts.own import with_answers
from niwaki.texts.sources import usual_calibration
from niwaki.texts.texts import Texts
from niwaki.windows import Windows


@checked
def importance_matrix(
    model: str | Path,
    out: str | Path,
    calibration: Calibration | Text = Calibration(),
    *,
    compute: Compute | str = Compute(),
    progress: Progress | None = None,
) -> list[str]:
    """Writes the importance matrix of a text, which ``llama-quantize --imatrix`` takes.

    Use it where llama.cpp's own tools are to quantize the model: files of :func:`niwaki.compress` need none. The file
    has the sum of the squares of each input of each matrix of the blocks, and of how many tokens it is; of experts that
    of the tokens that they were given. It is what ``llama-imatrix`` computes of the same tokens, with one block in
    memory at a time. Embeddings and head have none, as there.

    Args:
        model: A directory or hub id, of one of the types that niwaki writes for llama.cpp.
        out: The file to write, such as ``imatrix.gguf``; it must not exist.
        calibration: The text, as a name or a :class:`~niwaki.options.Calibration`.
        compute: The device and dtype, as a name or a :class:`~niwaki.options.Compute`.
        progress: Receives the progress.

    Returns:
        Notes, a sentence each, such as on experts without tokens.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`.
    """
    compute, progress = Compute.of(compute), progress or Progress()
    calibration = usual_calibration(Calibration.of(calibration), progress)
    checkpoint = Checkpoint(locate_model(str(model)))
    form, file = Gguf(checkpoint, "F16", {}, progress), check_place(out, [checkpoint.path])
    with contextlib.closing(MemoryBudget(compute.budget)) as budget, products(tf32=False):
        streamed = StreamedModel(checkpoint, compute.device, compute.dtype, budget)
        text = with_answers(streamed, calibration, compute.budget, World(), progress)
        texts = Texts.read(streamed, text, Measurement(samples=0))
        windows = texts.windows
        for note in texts.notes:
            progress.note(note)
        progress.estimate(passes(streamed, windows.tokens.numel()) / products_per_second(streamed.device))
        with new_file(file, lambda there: there.read(4) == b"GGUF") as temporary:  # so that the place is tried first
            powers, notes = _powers(streamed, windows, progress)
            _write(temporary, form, powers, calibration, windows)
    return notes


@dataclass
class _Power:
    """Of the inputs of a matrix the sum of the squares of each, in float64, and how many tokens it is of."""

    sums: Tensor
    tokens: int = 0


def _powers_of_block(
    block: DecoderBlock, states: HiddenStates, progress: Progress
) -> dict[tuple[str, int | None], _Power]:
    """Those of the matrices of a block, by parameter and expert, while it runs on ``states``."""
    found = dict[tuple[str, int | None], _Power]()

    def see(parameter: str, expert: int | None, X: Tensor, together: bool) -> None:
        rows = X[X.any(dim=1)] if together else X.flatten(0, -2)
        zeros = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
        power = found.setdefault((parameter, expert), _Power(zeros))
        power.sums += rows.float().square().sum(dim=0, dtype=torch.float64)
        power.tokens += len(rows)

    with Products(block.matrices, dict(block.module.named_parameters()), see):
        block.advance(states, progress.step)
    return found


def _powers(
    model: StreamedModel, windows: Windows, progress: Progress
) -> tuple[dict[tuple[str, int | None], _Power], list[str]]:
    """By what a matrix is in the checkpoint that of its inputs; and what there is to say."""
    found = dict[tuple[str, int | None], _Power]()
    states, notes, idle = model.embed(windows.tokens), list[str](), 0
    for block in model.stream():
        progress.stage(block.index, "capture", len(states.hidden))
        seen = _powers_of_block(block, states, progress)
        for matrix in block.matrices:
            none = _Power(torch.zeros(matrix.shape[1], dtype=torch.float64))
            power = seen.get((matrix.parameter, matrix.expert), none)
            if not power.tokens and matrix.expert is None and ".experts." not in matrix.name:
                raise UnsupportedModelError(
                    f"{matrix.parameter} is not used when its block runs; please report this model"
                )
            if not is_finite(power.sums):
                raise NumericalError(f"the inputs of {matrix.key} are NaN or infinite on this text; try dtype float32")
            idle += not power.tokens
            found[matrix.entry] = power
    if idle:
        notes.append(
            f"{counted(idle, 'matrix of an expert', 'matrices of experts')} had no tokens on this text, and llama.cpp "
            "takes all their inputs to be alike; give more text"
        )
    return found, notes


def _write(
    file: Path, form: Gguf, powers: dict[tuple[str, int | None], _Power], calibration: Calibration, windows: Windows
) -> None:
    """Writes the file, its tensors by their names in order, as llama-imatrix does."""
    values = dict[str, np.ndarray[Any, Any]]()
    for tensor in form.tensors:
        of_it = [powers[one.entry] for one in tensor.sources if one.entry in powers]
        if not of_it or len(of_it) < len(tensor.sources) or not tensor.name.endswith(".weight"):
            continue
        sums = np.stack([power.sums.cpu().float().numpy() for power in of_it])
        values[f"{tensor.name}.in_sum2"] = tensor.ordered(sums) if tensor.across else sums
        values[f"{tensor.name}.counts"] = np.array([[power.tokens] for power in of_it], np.float32)
    with contextlib.closing(_writer(file)) as writer:
        writer.add_type("imatrix")
        names = (public_name(text) if isinstance(text, str) else "tokens" for text in calibration.texts)
        writer.add_array("imatrix.datasets", [*names])
        writer.add_uint32("imatrix.chunk_count", len(windows.tokens))
        writer.add_uint32("imatrix.chunk_size", windows.tokens.shape[1])
        for name in sorted(values):
            writer.add_tensor(name, values[name])
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()


def _writer(file: Path) -> Any:
    """What writes a GGUF file that is no model, and so has no architecture."""
    gguf = package()

    class WithoutArchitecture(gguf.GGUFWriter):  # type: ignore[misc, name-defined]
        def add_architecture(self) -> None:
            pass

    return WithoutArchitecture(file, "")
