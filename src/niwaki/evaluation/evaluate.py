"""The perplexity of a model directory."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import torch

from niwaki.arguments import checked
from niwaki.errors import UsageError
from niwaki.layer.linalg import products
from niwaki.models.device import resident
from niwaki.models.hidden_states import MemoryBudget
from niwaki.models.locate import locate_model
from niwaki.models.streamed import Reference, StreamedModel
from niwaki.models.tokens import find_bos
from niwaki.options import USUAL_TEXT, Compute, Measurement, Text
from niwaki.packed.format import open_checkpoint
from niwaki.records.perplexity import Perplexity
from niwaki.records.progress import Progress
from niwaki.runs.duration import passes, products_per_second
from niwaki.texts.same_text import same_text, with_bytes
from niwaki.texts.sources import check_field
from niwaki.texts.texts import read_heldout
from niwaki.windows import Windows


@checked
def evaluate(
    model: str | Path,
    measurement: Measurement | Text = USUAL_TEXT,
    *,
    against: str | Path | None = None,
    compute: Compute | str = Compute(),
    progress: Progress | None = None,
) -> Perplexity:
    """Measures the perplexity of a model, dense, pruned or packed, on a text, and how far it is from another one.

    Only one decoder block is in memory at a time. For a text given by name, the bits per byte are known too; they
    compare between models with different tokens, which perplexities do not.

    Args:
        model: A directory, GGUF file or hub id.
        measurement: The text, as a name or a :class:`~niwaki.options.Measurement`. By default it is all of WikiText-2's
            test text, in windows of 2,048 tokens, or the model's positions if fewer.
        against: A directory, GGUF file or hub id of another model with the same tokens, such as the dense one. The
            perplexity then has the divergence of the model's predictions from that one's on the same windows. Both
            models run, one after the other.
        compute: The device, as a name or a :class:`~niwaki.options.Compute`.
        progress: Receives the progress of the measurement.

    Returns:
        The perplexity, with its standard error and the protocol by which it was measured.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`; UsageError where the two models have different tokens.
    """
    measurement, compute, progress = Measurement.of(measurement), Compute.of(compute), progress or Progress()
    measurement.only("evaluate", "text", "samples", "length", "bos", "field")
    measurement.only_text("evaluate")
    measurement.some()
    checkpoint = open_checkpoint(locate_model(str(model)))
    other = None if against is None else open_checkpoint(locate_model(str(against)))
    with contextlib.closing(MemoryBudget()) as budget, products(tf32=compute.tf32 == "always"):
        streamed = StreamedModel(checkpoint, compute.device, compute.dtype, budget)
        (text,) = measurement.texts
        text = USUAL_TEXT if text is None else text
        check_field(measurement.field, [text])
        windows = read_heldout(streamed, text, measurement)
        dense = None if other is None else StreamedModel(other, compute.device, compute.dtype, budget)
        if dense is not None:
            _check_same_tokens(streamed, dense, windows, text, measurement, f"{model} and {against}")
        if isinstance(text, str):  # so that models with other tokens compare
            windows = with_bytes(windows, streamed.tokenizer)
        if compute.budget is not None:
            # In addition to a block's weights the same number again for its activations.
            budget.left = max(0, compute.budget - resident() - 2 * streamed.block_size)
        operations = passes(streamed, windows.tokens.numel(), head=True)
        operations *= 1 if dense is None else 2
        progress.estimate(operations / products_per_second(streamed.device))
        reference = None if dense is None else Reference.of(dense, windows, _Measuring(progress))
        return streamed.perplexity(windows, _Measuring(progress), to=reference)


def _check_same_tokens(
    model: StreamedModel, other: StreamedModel, windows: Windows, text: Text, measurement: Measurement, names: str
) -> None:
    """UsageError, with the ``names`` of both, unless they have the same tokens, also of the text in ``windows``."""
    sizes = [each.config.vocab_size for each in (model, other)]
    hint = "their bits a byte compare: measure each alone"
    if sizes[0] != sizes[1]:
        raise UsageError(f"{names} have different tokens ({sizes[0]:,} and {sizes[1]:,}); {hint}")
    if (model.pairs is None) != (other.pairs is None):
        raise UsageError(f"{names} do not predict the same: one of them is an encoder with a decoder")
    if isinstance(text, str | os.PathLike):
        length = measurement.length or windows.tokens.shape[1]
        theirs = read_heldout(other, text, replace(measurement, length=length)).tokens
        if not torch.equal(theirs, windows.tokens):
            raise UsageError(f"{names} have different tokens for this text; {hint}")


class _Measuring(Progress):
    """Tells ``progress``, which knows no run, the steps of measuring."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._done, self._steps = progress, 0, 1

    def stage(self, block: int, name: str, steps: int) -> None:
        self._done, self._steps = 0, steps

    def step(self) -> None:
        self._done += 1
        self._progress.status("measuring", self._done, self._steps)


def evaluate_both(
    model: Path, before: Path, measurement: Measurement, compute: Compute, known: dict[str, Perplexity]
) -> tuple[Perplexity, Perplexity]:
    """The perplexities of a model and of the one ``before``, on the same text also where it has fewer tokens now.

    ``known`` has what was measured of the one before, by the text's name or, of windows that go as far as those of the
    model with fewer tokens, by their fingerprint; and gets it.
    """
    (text,) = measurement.texts
    assert isinstance(text, str)
    with contextlib.closing(MemoryBudget()) as budget, products(tf32=compute.tf32 == "always"):
        models = [
            StreamedModel(open_checkpoint(locate_model(str(each))), compute.device, compute.dtype, budget)
            for each in (model, before)
        ]
        after, dense = models
        if after.config.vocab_size == dense.config.vocab_size:
            if text not in known:
                known[text] = evaluate(before, measurement, compute=compute)
            return evaluate(model, measurement, compute=compute), known[text]
        windows = read_heldout(dense, text, measurement)
        bos = None if windows.bos is None else find_bos(after.tokenizer)
        first, second = same_text(windows, dense.tokenizer, after.tokenizer, bos, after.positions)
        if (key := first.fingerprint()) not in known:
            known[key] = dense.perplexity(first)
        return after.perplexity(second), known[key]
