"""What is measured of models that make vectors of texts, and predict no words."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.models.sentence_vectors import pooling_of, sentence_vectors, similarity
from niwaki.models.streamed import StreamedModel
from niwaki.records.vectors import Similarity
from niwaki.texts.sentences import sentences_of
from niwaki.texts.texts import Texts
from niwaki.windows import Windows

#: With fewer sentences a cosine says little.
FEW_SENTENCES = 100


@dataclass
class Sentences:
    """What all stages of a run measure sentence vectors on: text that none of them has seen.

    Attributes:
        windows: That text; None where the model predicts words, or nothing is measured.
        dense: Where the dense model is.
    """

    windows: Windows | None = None
    dense: Path = Path()
    _seen: int = -1  # windows that the stage which reads on furthest has
    _tokens: list[Tensor] = field(default_factory=list)
    _vectors: Tensor | None = None  # of the dense model

    def apart(self, model: StreamedModel, texts: Texts) -> Texts:
        """``texts`` of a stage on ``model``; without those to measure perplexity on where it predicts no words."""
        if model.has_head:
            return texts
        if texts.only and len(texts.samples) > self._seen:
            self.windows, self._seen = texts.only, len(texts.samples)
        return replace(texts, heldout={})

    def measured(self, path: Path, device: str, dtype: str) -> Similarity:
        """How near the vectors of the model in ``path`` are to those of the dense one."""
        assert self.windows
        if self._vectors is None:
            dense = StreamedModel(Checkpoint(self.dense), device, dtype)
            self._tokens = sentences_of(dense, self.windows)
            self._vectors = sentence_vectors(dense, self._tokens)
        model = StreamedModel(Checkpoint(path), device, dtype)
        vectors = sentence_vectors(model, self._tokens)
        return similarity(self._vectors, vectors, pooling_of(model), self.windows.source)
