"""An encoder with a decoder, a block at a time, is what transformers computes with the whole model."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.healing.objective import Logits, find_logits
from niwaki.models.crossing import find_crossing
from niwaki.models.hidden_states import MemoryBudget
from niwaki.models.interface import Interface, find_interface
from niwaki.models.pairs import NOTHING, count_tokens, padded, parted, predicting, rows_of
from niwaki.models.sensitivity import sensitivities
from niwaki.windows import Windows
from support.pairs import KINDS, logits_of, pairs_of, reference_of, rows, save_pair_model
from support.streams import assert_clean, stream_of

COUNT = 6


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair_model(tmp_path_factory.mktemp("pairs") / kind, kind)


@pytest.fixture(scope="module")
def whole(directory: Path, kind: str) -> PreTrainedModel:
    return reference_of(directory, kind)


def losses_of(model: PreTrainedModel, kind: str, pair: tuple[list[int], list[int]]) -> Tensor:
    with torch.no_grad():
        return nn.functional.cross_entropy(logits_of(model, kind, pair), torch.tensor(pair[1][1:]), reduction="none")


@pytest.mark.parametrize("room", [None, 0])
def test_losses_are_those_of_the_whole_model(
    directory: Path, whole: PreTrainedModel, kind: str, room: int | None
) -> None:
    model = stream_of(directory)
    with contextlib.closing(MemoryBudget(room)) as model.budget:  # with 0 all states are in a file: sizes change there
        states = model.embed(rows(kind, COUNT))
        if kind != "marian":  # positions are computed, and not in its files
            assert_clean(model)
        for block in model.stream():
            block.advance(states)
        found = model.losses(states)
    for row, pair in zip(found, pairs_of(kind, COUNT), strict=True):
        expected = losses_of(whole, kind, pair)
        torch.testing.assert_close(row[: len(expected)], expected, rtol=1e-4, atol=1e-5)
        assert not row[len(expected) :].any()


def test_perplexity_is_that_of_all_tokens_of_targets(directory: Path, whole: PreTrainedModel, kind: str) -> None:
    measured = stream_of(directory).perplexity(Windows(rows(kind, COUNT), "pairs"))
    losses = [losses_of(whole, kind, pair) for pair in pairs_of(kind, COUNT)]
    assert measured.tokens == sum(map(len, losses))
    assert measured.counts == tuple(map(len, losses))
    assert measured.nats == pytest.approx(float(torch.cat(losses).double().mean()), rel=1e-5)
    assert measured.losses == pytest.approx([float(each.mean()) for each in losses], rel=1e-4)


def test_both_lists_of_blocks_and_the_cross_attention_are_pruned(directory: Path, kind: str) -> None:
    model = stream_of(directory)
    depth = 2 if kind == "switch_transformers" else 3
    assert len(model.blocks) == 2 * depth
    assert model.starts == (0, depth)
    names = {matrix.name.rpartition(".")[0] for matrix in model.matrices(depth)}
    assert names & {"layer.1.EncDecAttention", "encoder_attn"}
    assert not {matrix.name.rpartition(".")[0] for matrix in model.matrices(0)} & names & {"encoder_attn"}
    keys = [matrix.key for matrix in model.matrices()]
    assert len({*keys}) == len(keys)
    assert all("encoder" in key or "decoder" in key for key in keys)
    assert model.notes == []
    assert not model.sees_ahead


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_gram_matrices_are_those_of_all_inputs_of_each_matrix(kind: str, tmp_path: Path) -> None:
    directory = save_pair_model(tmp_path / kind, kind)
    model, whole = stream_of(directory), reference_of(directory, kind)
    seen = defaultdict[str, list[Tensor]](list)

    def keep(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[name].append(inputs[0].flatten(0, -2).double())

    for name, module in whole.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(partial(keep, name))
    with torch.no_grad():
        for pair in pairs_of(kind, COUNT):
            logits_of(whole, kind, pair)
    states = model.embed(rows(kind, COUNT))
    for block in model.stream():
        for gram in block.input_grams(states):
            for name in gram.names:
                X = torch.cat(seen[f"{model.places[block.index]}{name}"])
                assert gram.tokens == len(X)
                torch.testing.assert_close(gram.H.double(), X.T @ X / len(X), rtol=1e-4, atol=1e-5)
        block.advance(states)


@pytest.mark.parametrize("kind", ["t5", "bart", "marian"])
def test_sensitivities_are_those_of_automatic_differentiation(kind: str, tmp_path: Path) -> None:
    # Through the crossing: the loss depends on encoder blocks by what all decoder blocks attend to.
    directory = save_pair_model(tmp_path / kind, kind)
    model, whole = stream_of(directory), reference_of(directory, kind)
    text = rows(kind, COUNT)
    draws = torch.rand(COUNT, text.shape[1], generator=torch.Generator().manual_seed(0))
    found = sensitivities(model, text)
    sums, count = defaultdict[str, Any](int), 0

    def keep(name: str, _module: nn.Module, _inputs: object, out: Tensor) -> None:
        def add(gradient: Tensor) -> None:
            sums[name] += gradient.flatten(0, -2).double().square().sum(0)

        out.register_hook(add)

    for name, module in whole.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(partial(keep, name))
    for pair, drawn in zip(pairs_of(kind, COUNT), draws, strict=True):
        logits = logits_of(whole, kind, pair)
        p = logits.detach().softmax(1)
        total = p.cumsum(1)
        labels = torch.searchsorted(total, drawn[: len(p), None] * total[:, -1:], right=True).clamp(max=63)
        (-logits.log_softmax(1).gather(1, labels).sum()).backward()
        count += len(p)
    for index, block in enumerate(found):
        for name, value in block.items():
            expected = sums[f"{model.places[index]}{name}"] / count
            torch.testing.assert_close(value.double(), expected, rtol=1e-3, atol=1e-9)


def test_states_of_targets_are_those_of_the_decoder(directory: Path, whole: PreTrainedModel, kind: str) -> None:
    model = stream_of(directory)
    logits = find_logits(model)
    assert isinstance(logits, Logits)
    model.load()
    found = model.target_states(rows(kind, COUNT))
    expected = [logits_of(whole, kind, pair).detach() for pair in pairs_of(kind, COUNT)]
    head = logits.of(model.model, torch.float32)
    torch.testing.assert_close(head._products(found), torch.cat(expected), rtol=1e-3, atol=1e-4)


def test_memory_is_that_of_one_block(tmp_path: Path) -> None:
    model = stream_of(save_pair_model(tmp_path / "t5", "t5"))
    states = model.embed(rows("t5", COUNT))
    for block in model.stream():
        loaded = [name for name, value in model.model.named_parameters() if not value.is_meta]
        assert all(name.startswith(model.places[block.index]) for name in loaded)
        assert loaded
        block.advance(states)
    assert_clean(model)


def test_rows_are_pairs() -> None:
    text = rows_of([([5, 6, 7], [1, 8]), ([5], [1, 8, 9, 10])])
    assert text.tolist() == [[5, 6, 7, NOTHING, 1, 8], [5, NOTHING, 1, 8, 9, 10]]
    assert [[part.tolist() for part in parted(row)] for row in text] == [[[5, 6, 7], [1, 8]], [[5], [1, 8, 9, 10]]]
    assert predicting(text).int().tolist() == [[0, 0, 0, 0, 1, 0], [0, 0, 1, 1, 1, 0]]
    longer = padded(text, 9)
    assert longer.shape == (2, 9)
    assert count_tokens(longer) == count_tokens(text) == 10
    assert [parted(row)[1].tolist() for row in longer] == [[1, 8], [1, 8, 9, 10]]


@pytest.mark.parametrize(
    "row",
    [
        *([5, 6, 7], [NOTHING, 1, 5], [5, NOTHING, 1], [5, 6, NOTHING], [5, NOTHING, NOTHING, 1, 5]),
        [5, NOTHING, 1, 5, NOTHING, 6],
    ],
)
def test_what_is_no_pair_is_refused(row: list[int], tmp_path: Path) -> None:
    model = stream_of(save_pair_model(tmp_path / "t5", "t5"))
    with pytest.raises(UsageError, match="pairs"):
        model.check(torch.tensor([row]))


def test_tokens_and_lengths_of_both_parts_are_checked(tmp_path: Path) -> None:
    model = stream_of(save_pair_model(tmp_path / "bart", "bart"))
    for pair in (([64], [1, 5]), ([5], [1, 64]), ([5] * 65, [1, 5]), ([5], [1] * 66)):
        with pytest.raises(UsageError, match="64"):
            model.check(rows_of([pair]))
    model.check(rows_of([([5] * 64, [1] * 65)]))  # the last token of a target does not go in


class Looped(nn.Module):
    """Runs its blocks twice, or changes what one hands to the next."""

    def __init__(self, times: int, step: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.times, self.step = times, step

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        hidden = self.embedding(input_ids)
        for _ in range(self.times):
            for layer in self.layers:
                hidden = layer(hidden) + self.step
        assert isinstance(hidden, Tensor)
        return hidden


def test_models_that_do_more_than_run_each_block_once_are_refused() -> None:
    def found(times: int, step: float) -> Interface:
        model = Looped(times, step)
        return find_interface(model, [*model.layers], torch.device("cpu"), 64)

    with torch.no_grad():
        assert found(1, 0.0).answers == 0
        with pytest.raises(UnsupportedModelError, match=r"more than once \(0, 1\)"):
            found(2, 0.0)
        with pytest.raises(UnsupportedModelError, match="block 1"):
            found(1, 0.5)


class Both(nn.Module):
    """An encoder and a decoder of a linear layer each, with something between the two."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), Attending()])
        self.norm, self.between = nn.LayerNorm(8), between

    def forward(self) -> Tensor:
        encoded = self.norm(self.blocks[0](torch.ones(1, 5, 8)))
        result: Tensor = self.blocks[1](torch.ones(1, 3, 8), *self.between(encoded))
        return result


class Attending(nn.Module):
    def forward(self, hidden: Tensor, encoded: Tensor, *_: Tensor) -> Tensor:
        return hidden + encoded.mean(1, keepdim=True)


def test_what_is_between_encoder_and_decoder_is_followed_or_refused() -> None:
    with torch.no_grad():
        model = Both(lambda encoded: (encoded,))
        crossing = find_crossing(model, [*model.blocks], 1)
        assert [type(each) for each in crossing.tail] == [nn.LayerNorm]
        hidden = torch.randn(1, 5, 8)
        torch.testing.assert_close(crossing.encode(hidden), model.norm(hidden))
        cut = Both(lambda encoded: (encoded[:, :4],))  # of an encoder that pads its inputs
        assert find_crossing(cut, [*cut.blocks], 1).places == crossing.places
        for between in (lambda encoded: (2 * encoded,), lambda encoded: (encoded, encoded.mean(1))):
            model = Both(between)
            with pytest.raises(UnsupportedModelError, match="encoder"):
                find_crossing(model, [*model.blocks], 1)


def test_a_stream_is_an_encoder_with_a_decoder_only_where_it_is(tmp_path: Path) -> None:
    model = stream_of(save_pair_model(tmp_path / "whisper", "whisper"))
    assert model.pairs
    assert model.pairs.sources == "sound"
    assert model.positions == 40
    assert [each.reason for each in model.left_dense] == ["before the encoder's blocks"] * 2
    model.check_coverage()
