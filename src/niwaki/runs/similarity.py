"""What is measured of models that make vectors or scores of texts, and predict no words."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

from torch import Tensor, tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CalibrationError, panics_as_errors, raised_as
from niwaki.models.interface import Inputs
from niwaki.models.sentence_vectors import agreement, pooling_of, scores_of, sentence_vectors, similarity
from niwaki.models.streamed import StreamedModel
from niwaki.records.perplexity import Agreement, Similarity
from niwaki.texts.texts import Texts
from niwaki.windows import Windows

# Sentences of a text, for models that make vectors or scores of them.

#: Where one ends: at a full stop before a space, one of Chinese or Japanese, or the end of a line.
_END = re.compile("(?<=[.!?\u2026])\\s+|(?<=[\u3002\uff01\uff1f])\\s*|\n+")
#: Sentences at most, and tokens that each has at least, with those that the tokenizer adds.
_MOST, _SHORTEST = 1_000, 8
#: What a model reads of a pair: its tokens, and of which of the two each one is.
_OF_PAIRS = ("input_ids", "token_type_ids")


def in_tokens_of(model: StreamedModel, sentences: list[Tensor], other: StreamedModel) -> list[Tensor]:
    """``sentences``, which are tokens of ``model``, as those of the ``other``, where it has fewer."""
    if model.config.vocab_size == other.config.vocab_size:
        return sentences
    own, its = model.tokenizer, other.tokenizer
    numbers, special = its.get_vocab(), {*own.all_special_ids}
    made = []
    for ids in (each.tolist() for each in sentences):
        if {*(names := own.convert_ids_to_tokens(ids))} <= numbers.keys():
            made.append(tensor([numbers[name] for name in names]))
            continue
        text, limit = str(own.decode(ids, skip_special_tokens=True)), other.positions
        added = not special.isdisjoint(ids)
        made.append(
            tensor(its(text, add_special_tokens=added, truncation=limit is not None, max_length=limit)["input_ids"])
        )
    return made


def sentences_of(model: StreamedModel, windows: Windows) -> list[Tensor]:
    """Tokens (length,) int64 of each sentence in the text of ``windows``, as the model's tokenizer gives them alone.

    They are at most as long as a window. Where the model has no tokenizer, or the text has fewer sentences than
    windows, it is the windows themselves.
    """
    return [each["input_ids"] for each in _of(model, windows, False)[0]]


def texts_of(model: StreamedModel, windows: Windows) -> tuple[list[Inputs], bool]:
    """What a classifier scores: the same sentences, or each with the next one, for a reranker; and whether in pairs.

    An encoder with a single score is a reranker: it reads a question and an answer.
    """
    return _of(model, windows, model.sees_ahead and model.model.config.num_labels == 1)


def _of(model: StreamedModel, windows: Windows, in_pairs: bool) -> tuple[list[Inputs], bool]:
    with contextlib.suppress(CalibrationError):  # a model may come without one
        tokenizer, longest = model.tokenizer, windows.tokens.shape[1]
        text = str(tokenizer.decode(windows.tokens.flatten().tolist(), skip_special_tokens=True))
        parts = list(dict.fromkeys(each.strip() for each in _END.split(text)))[:_MOST]
        if len(parts) > in_pairs:
            given = (parts[:-1], parts[1:]) if in_pairs else (parts,)
            most = min(longest * (1 + in_pairs), model.positions or 2 * longest)
            with raised_as(CalibrationError, "the model's tokenizer fails on this text"), panics_as_errors():
                made = tokenizer(*given, truncation=True, max_length=most)
            read = [name for name in _OF_PAIRS[: 1 + in_pairs] if name in made]
            rows = zip(*(made[name] for name in read), strict=True)
            found = [dict(zip(read, map(tensor, row), strict=True)) for row in rows]
            found = [each for each in found if len(each["input_ids"]) >= min(_SHORTEST, longest)]
            if len(found) > len(windows.tokens):
                return [*found], in_pairs
    return [{"input_ids": each} for each in windows.tokens], False


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
