"""Vectors of sentences, as models for search and classification make them, one block in memory at a time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from niwaki.checkpoints.pipelines import pipeline
from niwaki.errors import NumericalError
from niwaki.models.streamed import TOKENS_PER_BATCH, StreamedModel
from niwaki.records.vectors import Similarity

#: By the name of its setting in the files of sentence-transformers, how vectors of tokens become one.
_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}
#: Pairs of sentences whose similarities are ranked.
_PAIRS = 1_000


def pooling_of(model: StreamedModel) -> str:
    """How the model's vectors of tokens become that of a sentence: as sentence-transformers' files beside it say.

    Where there are none, or they say something else, it is their mean, and of a model whose tokens do not see those
    after them the last one.
    """
    usual = "mean" if model.sees_ahead else "lasttoken"
    path = model.checkpoint.path
    try:
        folder = next(folder for kind, folder in pipeline(path) if kind.endswith("Pooling"))
        settings = json.loads((path / Path(folder).name / "config.json").read_text(encoding="utf-8"))
        return next((name for setting, name in _POOLINGS.items() if settings.get(setting) is True), usual)
    except (OSError, ValueError, TypeError, AttributeError, StopIteration, RecursionError):
        # There are none, or nobody's.
        return usual


@torch.no_grad()
def sentence_vectors(model: StreamedModel, sentences: Sequence[Tensor]) -> Tensor:
    """(sentences, width) float32 of length 1, for the tokens (length,) int64 of each; see :func:`pooling_of`.

    Sentences of the same length run together, so that none is padded. NumericalError where vectors are not finite.
    """
    by_length = defaultdict[int, list[int]](list)
    for number, tokens in enumerate(sentences):
        by_length[len(tokens)].append(number)
    batches = [
        some.tolist()
        for length, numbers in sorted(by_length.items())
        for some in torch.tensor(numbers).split(max(1, TOKENS_PER_BATCH // length))
    ]
    states = model.embed([{"input_ids": torch.stack([sentences[i] for i in numbers])} for numbers in batches])
    for block in model.stream():
        block.advance(states)
    pooling, vectors = pooling_of(model), torch.empty(len(sentences), model.config.hidden_size)
    with model.last_states() as last:
        for numbers, hidden, tokens in zip(batches, states.hidden, states.tokens, strict=True):
            vectors[numbers] = _pooled(last(hidden, tokens).float(), pooling).cpu()
    if not bool(vectors.isfinite().all()):
        raise NumericalError("the model's outputs are NaN or infinite on this text; try dtype float32")
    return torch.nn.functional.normalize(vectors)


def _pooled(states: Tensor, pooling: str) -> Tensor:
    """(sentences, width) of the ``states`` (sentences, length, width) of their tokens."""
    match pooling:
        case "cls":
            return states[:, 0]
        case "lasttoken":
            return states[:, -1]
        case "max":
            return states.amax(1)
    return states.mean(1)


def similarity(dense: Tensor, vectors: Tensor, pooling: str, text: str) -> Similarity:
    """How near ``vectors`` (sentences, width) are to those of the ``dense`` model, both of length 1.

    Pairs of sentences are drawn with a fixed seed; of fewer sentences than give so many all pairs are taken.
    """
    cosines = (dense.double() * vectors.double()).sum(1)
    count = len(cosines)
    pairs = torch.combinations(torch.arange(count))
    if len(pairs) > _PAIRS:
        pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))[:_PAIRS]]
    ranks = [_ranks((each[pairs[:, 0]].double() * each[pairs[:, 1]].double()).sum(1)) for each in (dense, vectors)]
    correlation = torch.corrcoef(torch.stack(ranks))[0, 1] if len(pairs) > 1 else torch.tensor(1.0)
    error = cosines.std() / count**0.5 if count > 1 else torch.tensor(0.0)
    return Similarity(
        *(float(cosines.mean()), float(error), float(cosines.min()), float(correlation.nan_to_num(0.0))),
        *(count, max(1, len(pairs)), pooling, text),
    )


def _ranks(values: Tensor) -> Tensor:
    """The place of each of ``values`` (count,) in their order; of equal ones the mean of their places."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    places: Tensor = ends - (counts - 1) / 2
    return places[inverse]
