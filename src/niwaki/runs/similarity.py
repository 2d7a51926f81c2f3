"""What is measured of models that make vectors or scores of texts, and predict no words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.models.interface import Inputs
from niwaki.models.sentence_vectors import agreement, pooling_of, scores_of, sentence_vectors, similarity
from niwaki.models.streamed import StreamedModel
from niwaki.records.vectors import Agreement, Similarity
from niwaki.texts.sentences import in_tokens_of, sentences_of, texts_of
from niwaki.texts.texts import Texts
from niwaki.windows import Windows

#: With fewer sentences a cosine says little.
FEW_SENTENCES = 100


@dataclass
class Sentences:
    """What all stages of a run measure sentence vectors or scores on: text that none of them has seen.

    Attributes:
        windows: That text; None where the model predicts words, or nothing is measured.
        dense: Where the dense model is.
    """

    windows: Windows | None = None
    dense: Path = Path()
    _seen: int = -1  # windows that the stage which reads on furthest has
    _vectors: tuple[list[Tensor], Tensor] | None = None  # of sentences, by the dense model
    _scores: tuple[list[Inputs], bool, list[Tensor]] | None = None  # of texts, maybe in pairs, likewise

    def apart(self, model: StreamedModel, texts: Texts) -> Texts:
        """``texts`` of a stage on ``model``; without those to measure perplexity on where it predicts no words."""
        if model.has_head:
            return texts
        if texts.only and len(texts.samples) > self._seen:
            self.windows, self._seen = texts.only, len(texts.samples)
        return replace(texts, heldout={})

    def measured(self, path: Path, device: str, dtype: str) -> Similarity | Agreement:
        """How near the vectors or scores of the model in ``path`` are to those of the dense one."""
        assert self.windows
        dense, model = (StreamedModel(Checkpoint(each), device, dtype) for each in (self.dense, path))
        text = self.windows.source
        if self._vectors is None and self._scores is None:
            if dense.has_scores:
                texts, in_pairs = texts_of(dense, self.windows)
                self._scores = texts, in_pairs, scores_of(dense, texts)
            else:
                sentences = sentences_of(dense, self.windows)
                self._vectors = sentences, sentence_vectors(dense, sentences)
        if self._scores:
            texts, in_pairs, scores = self._scores
            own = in_tokens_of(dense, [each["input_ids"] for each in texts], model)
            # Where there are other tokens nothing tells which of a pair's two texts each is of.
            same = [not in_pairs or len(ids) == len(each["input_ids"]) for each, ids in zip(texts, own, strict=True)]
            texts = [{**each, "input_ids": ids} for each, ids in compress(zip(texts, own, strict=True), same)]
            return agreement([*compress(scores, same)], scores_of(model, texts), in_pairs, text)
        assert self._vectors
        sentences, vectors = self._vectors
        found = sentence_vectors(model, in_tokens_of(dense, sentences, model))
        return similarity(vectors, found, pooling_of(model), text)
