"""What the dense model says of each token of a text, computed once and kept on disk."""

import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.files import output_errors, reserve
from niwaki.healing.objective import LOGITS, Head, States
from niwaki.healing.translation import Translation
from niwaki.layer.linalg import is_finite
from niwaki.models.hidden_states import pieces
from niwaki.models.pairs import NOTHING, predicting
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress

_HINT = "what the dense model says of the text is kept there; give fewer --tokens"


class Lessons:
    """What ``head`` keeps for each token of ``tokens`` (windows, length) int64, in files of ``directory``.

    They are those of an earlier run, if there are any, else there is space for them: OutputError where there is not.

    Attributes:
        asked: The tokens as the dense model reads them.
        tokens: The same text as the pruned model reads it, by a ``translation`` where it has other tokens.
        parts: Of :meth:`.Head.targets`, each (windows, length, ...).
    """

    def __init__(
        self, directory: Path, tokens: Tensor, head: Head | States, translation: Translation | None = None
    ) -> None:
        self._directory, self.asked, self.translation = directory, tokens, translation
        self.translated = translation.windows(tokens) if translation else None
        self.tokens = tokens = self.translated.tokens if self.translated else tokens
        count, length = tokens.shape
        self._predicting: Tensor | None = None  # of pairs, how many tokens of each are predicted
        if bool((tokens == NOTHING).any()):
            self._predicting = predicting(tokens).sum(1)
            length = int(self._predicting.max())
        parts = {name: (dtype, (count, length, *shape)) for name, (dtype, shape) in head.kept.items()}
        parts["sums"] = (np.int64, (count,))  # of each window, a checksum; 0 where it is not there
        sizes = {directory / name: math.prod(shape) * np.dtype(kind).itemsize for name, (kind, shape) in parts.items()}
        with output_errors(directory, _HINT):
            directory.mkdir(exist_ok=True)
            if any(not path.is_file() or path.stat().st_size != size for path, size in sizes.items()):
                for path, size in sizes.items():
                    with path.open("wb") as file:
                        reserve(file, size)
            self._files = [
                np.memmap(directory / name, dtype, "r+", shape=shape) for name, (dtype, shape) in parts.items()
            ]
        *self.parts, self._sums = map(torch.from_numpy, self._files)

    @property
    def size(self) -> int:
        """How many bytes a window takes at most."""
        return sum(part[0].nbytes for part in self.parts)

    def of(self, windows: Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """Tokens (windows, length) of some ``windows``, by their numbers, and each part for these tokens.

        Pairs stay on the CPU, and the parts are for what predicts their targets.
        """
        if self._predicting is None:
            tokens, parts = self.tokens[windows].to(device), [part[windows].flatten(0, 1) for part in self.parts]
        else:
            tokens, counts = self.tokens[windows], self._predicting[windows].unsqueeze(1)
            parts = [part[windows][torch.arange(part.shape[1]) < counts] for part in self.parts]
        on_device = (part.to(device) for part in parts)
        return tokens, *(p.float() if p.is_floating_point() else p for p in on_device)

    def read(self, windows: slice, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The dense model's ``hidden`` states and tokens, in the places of ``tokens``; and what these begin with."""
        if not self.translated:
            return hidden, tokens, torch.zeros_like(tokens)
        at, beginnings = (part[windows].to(tokens.device) for part in self.translated[1:])
        rows = torch.arange(len(at), device=at.device).unsqueeze(1)
        return hidden[rows.to(hidden.device), at.to(hidden.device)], tokens[rows, at], beginnings

    def has(self, windows: range) -> bool:
        """Whether all of these are there, and as they were written."""
        return all(int(self._sums[window]) == self._sum(window) for window in windows)

    def keep(self, windows: range) -> None:
        """Says that these are there, once they are on disk."""
        with output_errors(self._directory, _HINT):
            for file in self._files:
                file.flush()
        for window in windows:
            self._sums[window] = self._sum(window)

    def _sum(self, window: int) -> int:
        total = 0
        for file in self._files[:-1]:
            total = zlib.crc32(file[window].data, total)
        return total or 1


@torch.no_grad()
def teach(model: StreamedModel, head: Head | States, lessons: Lessons, windows: range, progress: Progress) -> None:
    """Writes into ``lessons`` what the dense ``model`` says of some ``windows``; ``head`` is the pruned model's.

    The models may differ in all but the vocabulary, or in that too where ``lessons`` have a translation. One block is
    in memory at a time; hidden states may take the model's budget. NumericalError where the model's predictions are not
    finite.
    """
    with model.budget.lent() as budget:
        states = model.embed(lessons.asked[windows.start : windows.stop], budget=budget)
        for block in model.stream():
            progress.status("asking the dense model, block", block.index + 1, len(model.blocks))
            block.advance(states)
        first, rows = windows.start, max(1, LOGITS // max(model.config.vocab_size, head.answers))
        with model.head() if model.has_head else model.last_states() as logits:
            for i, batch in enumerate(states.tokens):
                these = slice(first, first + len(batch))
                first += len(batch)
                kept = (part[these, : batch.shape[1]] for part in lessons.parts)
                for hidden, tokens, beginnings, *parts in pieces(
                    rows, *lessons.read(these, states.hidden[i], batch), *kept
                ):
                    said = logits(hidden, tokens).flatten(0, 1)
                    if not is_finite(said):
                        raise NumericalError("the dense model's outputs are NaN or infinite; try dtype float32")
                    if lessons.translation:
                        said = lessons.translation.predictions(said, beginnings.flatten())
                    for part, target in zip(parts, head.targets(said), strict=True):
                        part.copy_(target.view(part.shape))
