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


def texts_of(model: StreamedModel, windows: Windows) -> tuple[list[Inputs], bool]:
    """What a model makes vectors or scores of: the sentences in the text of ``windows``; and whether in pairs.

    They are what the model's tokenizer makes of each alone, at most as long as a window. A reranker, which is an
    encoder with a single score, reads a question and an answer: of each sentence with the next one it reads both. Where
    the model has no tokenizer, or the text has fewer sentences than windows, it is the windows themselves.
    """
    in_pairs = model.has_scores and model.sees_ahead and model.model.config.num_labels == 1
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
    #: The dense model, the texts of the windows, whether these are in pairs, and what the model makes of them.
    _known: tuple[StreamedModel, list[Inputs], bool, Tensor | list[Tensor]] | None = None

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
        model = StreamedModel(Checkpoint(path), device, dtype)
        if self._known is None:
            dense = StreamedModel(Checkpoint(self.dense), device, dtype)
            texts, in_pairs = texts_of(dense, self.windows)
            self._known = dense, texts, in_pairs, _made(dense, texts)
        dense, texts, in_pairs, known = self._known
        own = in_tokens_of(dense, [each["input_ids"] for each in texts], model)
        # Where there are other tokens nothing tells which of a pair's two texts each is of.
        same = [not in_pairs or len(ids) == len(each["input_ids"]) for each, ids in zip(texts, own, strict=True)]
        made = _made(model, [{**each, "input_ids": ids} for each, ids in compress(zip(texts, own, strict=True), same)])
        if isinstance(known, Tensor) and isinstance(made, Tensor):
            return similarity(known, made, pooling_of(model), self.windows.source)
        return agreement([*compress(known, same)], [*made], in_pairs, self.windows.source)


def _made(model: StreamedModel, texts: list[Inputs]) -> Tensor | list[Tensor]:
    """What ``model`` makes of ``texts``: the scores of each, or a matrix of their vectors."""
    return (
        scores_of(model, texts) if model.has_scores else sentence_vectors(model, [each["input_ids"] for each in texts])
    )
