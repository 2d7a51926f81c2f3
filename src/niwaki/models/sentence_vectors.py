"""Vectors and scores of texts, as models for search and classification make them, one block in memory at a time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from niwaki.checkpoints.reading import pipeline
from niwaki.errors import NumericalError
from niwaki.models.interface import Inputs
from niwaki.models.streamed import TOKENS_PER_BATCH, StreamedModel
from niwaki.records.perplexity import Agreement, Similarity

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
        newer = settings.get("pooling_mode")  # files have either
        return next((name for key, name in _POOLINGS.items() if settings.get(key) is True or newer == name), usual)
    except (OSError, ValueError, TypeError, AttributeError, StopIteration, RecursionError):
        # There are none, or nobody's.
        return usual


@torch.no_grad()
def sentence_vectors(model: StreamedModel, sentences: Sequence[Tensor]) -> Tensor:
    """(sentences, width) float32 of length 1, for the tokens (length,) int64 of each; see :func:`pooling_of`.

    NumericalError where vectors are not finite.
    """
    pooling, vectors = pooling_of(model), torch.empty(len(sentences), model.config.hidden_size)
    batches = _run(model, [{"input_ids": tokens} for tokens in sentences])
    with model.last_states() as last:
        for numbers, hidden, tokens in batches:
            vectors[numbers] = _pooled(last(hidden, tokens).float(), pooling).cpu()
    return torch.nn.functional.normalize(_finite(vectors))


@torch.no_grad()
def scores_of(model: StreamedModel, texts: Sequence[Inputs]) -> list[Tensor]:
    """(1, labels) float32 of each of the texts, or (length, labels) where each token has scores.

    NumericalError where scores are not finite.
    """
    found: dict[int, Tensor] = {}
    batches = _run(model, texts)
    with model.scores() as score:
        for numbers, hidden, tokens in batches:
            for row, number in enumerate(numbers):  # one by one: some classifiers take no more without padding
                scores = score(hidden[row : row + 1], tokens[row : row + 1])
                found[number] = _finite(scores.reshape(-1, scores.shape[-1]).float().cpu())
    return [found[number] for number in range(len(texts))]


def _run(model: StreamedModel, texts: Sequence[Inputs]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """(their numbers, states after the last block, tokens) of texts of the same length, so that none is padded."""
    by_length = defaultdict[int, list[int]](list)
    for number, text in enumerate(texts):
        by_length[len(text["input_ids"])].append(number)
    batches = [
        some.tolist()
        for length, numbers in sorted(by_length.items())
        for some in torch.tensor(numbers).split(max(1, TOKENS_PER_BATCH // length))
    ]
    states = model.embed(
        [{name: torch.stack([texts[i][name] for i in numbers]) for name in texts[numbers[0]]} for numbers in batches]
    )
    for block in model.stream():
        block.advance(states)
    return zip(batches, states.hidden, states.tokens, strict=True)


def _finite(values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise NumericalError("the model's outputs are NaN or infinite on this text; try dtype float32")
    return values


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


def agreement(dense: Sequence[Tensor], scores: Sequence[Tensor], in_pairs: bool, text: str) -> Agreement:
    """How near ``scores`` of texts, each (1 or tokens, labels), are to those of the ``dense`` model."""
    labels, both = scores[0].shape[1], list(zip(dense, scores, strict=True))
    same = torch.stack([(one.argmax(1) == other.argmax(1)).double().mean() for one, other in both])
    columns = [torch.cat([each.double() for each in all_]).T for all_ in (dense, scores)]
    ranks = [torch.stack([_ranks(one), _ranks(other)]) for one, other in zip(*columns, strict=True)]
    correlations = [float(torch.corrcoef(each)[0, 1].nan_to_num(0.0)) if each.shape[1] > 1 else 1.0 for each in ranks]
    error = float(same.std()) / len(both) ** 0.5 if len(both) > 1 else 0.0
    share, error_of_share = (float(same.mean()), error) if labels > 1 else (None, None)
    counts = labels, len(both), sum(map(len, scores))
    return Agreement(share, error_of_share, sum(correlations) / labels, *counts, in_pairs, text)


def _ranks(values: Tensor) -> Tensor:
    """The place of each of ``values`` (count,) in their order; of equal ones the mean of their places."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    places: Tensor = ends - (counts - 1) / 2
    return places[inverse]
