"""What blocks receive besides hidden states: embeddings of their own, and keys and values of earlier blocks."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from niwaki import prune, shrink
from niwaki.checkpoints.reading import Checkpoint
from niwaki.effort import EFFORTS, Effort, make_effort
from niwaki.errors import UnsupportedModelError
from niwaki.models import streamed
from niwaki.models.hidden_states import ADDED, BlockArguments, Handed, MemoryBudget, same, samples_first, streams_first
from niwaki.models.streamed import StreamedModel
from niwaki.options import Compute
from niwaki.records.record import Record
from support.covering import some
from support.models import (
    decoder_blocks,
    edited,
    is_pruned,
    message,
    random_model,
    random_tokens,
    reference,
    save_model,
)
from support.runs import StopAt, files, listing, raw, tensors, zeros
from support.streams import error_by_places, stream_of, whole_losses

SAMPLES, LENGTH = 5, 20
#: With three streams, embeddings for each block and shared keys and values; with all but streams.
CASES = ("gemma3n_text", "gemma4_text")
TOKENS = random_tokens(SAMPLES, LENGTH)
#: Without what takes long: text that the model writes.
_BALANCED = make_effort(f"balanced:synthetic=0:epochs=1:batch={2 * LENGTH}")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples each, so that the last of five is smaller."""
    monkeypatch.setattr(streamed, "TOKENS_PER_BATCH", 2 * LENGTH + 1)


def run(model: Path, out: Path, effort: Effort = _BALANCED, **changes: Any) -> Record:
    options: dict[str, Any] = {"calibration": TOKENS, "measurement": random_tokens(3, LENGTH, seed=1), **changes}
    return prune(model, out, 0.5, effort=effort, compute=options.pop("compute", Compute("cpu")), **options)


@torch.no_grad()
def last_outputs(directory: Path, tokens: Tensor) -> Tensor:
    """Of the last block, from the whole model."""
    whole = reference(directory)
    seen: list[Tensor] = []
    decoder_blocks(whole)[-1].register_forward_hook(lambda *arguments: seen.append(arguments[2]))
    whole(tokens)
    return seen[0].double()


def test_the_models_have_what_this_is_about() -> None:
    """Losses depend on embeddings of their own and on shared keys, or the other tests would prove nothing."""
    for case in CASES:
        model = random_model(case)
        before = model(TOKENS).logits
        for name in ("model.embed_tokens_per_layer", "model.layers.1.self_attn.k_proj"):
            with torch.no_grad():
                weight: Any = model.get_submodule(name).weight
                kept = weight.clone()
                weight[:, 0] += 1
                assert (model(TOKENS).logits - before).norm() > 1e-3 * before.norm(), name
                weight.copy_(kept)
        assert [hasattr(layer.self_attn, "k_proj") for layer in model.model.layers] == [True, True, False, False]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("effort", [EFFORTS["fast"], _BALANCED], ids=["fast", "balanced"])
@pytest.mark.slow
def test_pruned_models_are_what_transformers_makes_of_them(tmp_path: Path, case: str, effort: Effort) -> None:
    model, out = save_model(tmp_path / "model", case), tmp_path / "out"
    # Files have keys and values of the last blocks too, which nothing reads.
    with edited(model) as values:
        values |= {f"model.layers.3.self_attn.{name}.weight": torch.randn(16, 32) for name in ("k_proj", "v_proj")}
    record = run(model, out, effort)
    before, after = tensors(model), tensors(out)
    changed = {key for key, value in before.items() if raw(after[key]) != raw(value)}
    unread = ("model.layers.3.self_attn.k_", "model.layers.3.self_attn.v_")
    assert changed == {key for key in before if is_pruned(case, key) and not key.startswith(unread)}
    assert before.keys() == after.keys()
    assert sum(zeros(after[key]) for key in changed) == sum(before[key].numel() for key in changed) // 2
    heldout = random_tokens(3, LENGTH, seed=1)
    for when, directory in (("before", model), ("after", out)):
        losses = whole_losses(reference(directory), heldout)
        assert record.perplexity[when].value == pytest.approx(float(losses.mean().exp()), rel=1e-4)
    if record.fits:  # the last one ends where the whole models' last blocks differ by that, on what it holds out
        pruned, dense = (last_outputs(directory, TOKENS[:2]) for directory in (out, model))
        assert record.fits[-1].after == pytest.approx(error_by_places(pruned, dense), rel=1e-4)
        assert any(fit.after < fit.before for fit in record.fits)


@pytest.mark.parametrize("case", some(CASES, 1))
@pytest.mark.slow
def test_interrupted_runs_and_little_memory_give_the_same(tmp_path: Path, case: str) -> None:
    model, wanted = save_model(tmp_path / "model", case), tmp_path / "wanted"
    run(model, wanted)
    stopped, small = tmp_path / "stopped", tmp_path / "small"
    with pytest.raises(KeyboardInterrupt):
        run(model, stopped, progress=StopAt(24))  # in the third block, which uses keys of the first
    run(model, stopped)
    run(model, small, compute=Compute("cpu", max_memory=1))  # all in a file
    for out in (stopped, small):
        assert files(out).keys() == files(wanted).keys()
        assert (out / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("samples", [2, 5])  # in one batch, in several
@pytest.mark.slow
def test_pieces_of_batches(tmp_path: Path, case: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample has its own embeddings, keys and values, although there was one pass for all pieces of a size."""
    if samples == 2:
        monkeypatch.setattr(streamed, "TOKENS_PER_BATCH", SAMPLES * LENGTH)
    model = stream_of(save_model(tmp_path / "model", case))
    states = model.embed(TOKENS[:samples], LENGTH)
    parts = states.minibatches(LENGTH)
    assert len(parts) == samples
    for block in model.stream():
        with torch.no_grad():
            found = [block.forward(states.hidden.samples(*part), states, *part) for part in parts]
        block.advance(states)
        torch.testing.assert_close(torch.cat(found), torch.cat(list(states.hidden)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_what_depends_on_tokens_is_found(tmp_path: Path, case: str) -> None:
    model = stream_of(save_model(tmp_path / "model", case))
    model.embed(TOKENS)
    (places,) = set(model.interface.per_token)
    assert places == {(0, 1) if case == "gemma3n_text" else (0, 0)}
    assert model.interface.streams == ((3,) if case == "gemma3n_text" else ())
    assert not any(stream_of(save_model(tmp_path / "other", "qwen2 window")).interface.per_token)


@pytest.mark.parametrize("case", CASES)
def test_embeddings_of_each_block_count_as_hidden_states(tmp_path: Path, case: str) -> None:
    """They are within the budget, each is kept once, and so are keys and values."""
    directory = save_model(tmp_path / "model", case)
    streams, heads = (3, (8, 8)) if case == "gemma3n_text" else (1, (8, 16))
    tokens = 4 * SAMPLES * LENGTH
    with contextlib.closing(MemoryBudget(0)) as budget:
        model = StreamedModel(Checkpoint(directory), "cpu", "float32", budget)
        states = model.embed(TOKENS)
        assert budget.spilled == tokens * (32 * streams + 4 * 8)
        for block in model.stream():
            block.advance(states)
        assert budget.spilled == tokens * (32 * streams + 4 * 8 + 2 * 2 * sum(heads))


@pytest.mark.slow
def test_removing_blocks_is_refused(tmp_path: Path) -> None:
    """The table of embeddings has a part for each block."""
    for case in (*CASES, "gemma3n_text unshared", "gemma4_text unshared"):
        model = save_model(tmp_path / case, case)
        before = listing(tmp_path)
        fewer = partial(shrink, model, tmp_path / "out", blocks=1, calibration=TOKENS, measurement=None)
        said = message(fewer, UnsupportedModelError)
        assert "cannot become smaller like this" in said
        assert listing(tmp_path) == before


# In detail


def test_streams_and_samples() -> None:
    hidden = torch.arange(4 * 3 * 2 * 5.0).view(4, 3, 2, 5)
    stored = samples_first(hidden, 1)
    assert stored.shape == (3, 2, 4, 5)
    assert stored.is_contiguous()
    assert torch.equal(stored[1, 0, 2], hidden[2, 1, 0])
    assert torch.equal(streams_first(stored, 1), hidden)
    assert samples_first(hidden, 0) is streams_first(hidden, 0) is hidden


def test_arguments_of_several_batches() -> None:
    arguments = BlockArguments(MemoryBudget())
    texts, shared = [torch.randn(2, 3), torch.randn(2, 3), torch.randn(1, 3)], torch.randn(3)
    for text in texts:
        for block in (0, 1):
            arguments.record(block, len(text), ((text,), {"x": [shared.clone()]}), {(0, 0)}, keep=True)
        arguments.end_batch()
    arguments.record(0, 1, ((torch.randn(1, 3),), {"x": [shared]}), {(0, 0)}, keep=False)
    for block in (0, 1):
        for i, text in enumerate(texts):
            for rows in (slice(None), slice(0, 1)):
                call = arguments.call(block, len(text), i, rows, Handed())
                assert same(call, ((text[rows],), {"x": [shared]}))
    assert not arguments.has(1, 3, 0)
    with pytest.raises(UnsupportedModelError, match="block 1 receives something about the tokens"):
        arguments.record(1, 2, ((texts[0],), {"x": [shared + 1]}), {(0, 0)}, keep=True)
    with pytest.raises(UnsupportedModelError, match="block 1 receives something about the tokens"):
        arguments.record(1, 2, ((texts[0],), {"x": [shared]}), set(), keep=True)


def test_batches_with_their_own_arguments() -> None:
    """Which can be of any shape, and come with what the model adds to outputs; what blocks share is kept once."""
    with contextlib.closing(MemoryBudget(0)) as budget:
        arguments = BlockArguments(budget)
        turns, masks, added = torch.randn(3, 1, 4), [torch.ones(1, 1, 4, 4), None], torch.randn(1, 4, 8)
        for mask in masks:
            for block in (0, 1):
                arguments.record_own(block, ((turns, torch.tensor(3)), {"mask": mask, "handed": Handed()}))
            if mask is None:
                arguments.keep(0, ADDED, added)
            arguments.end_batch()
        assert budget.spilled == 2 * turns.nbytes + 16 * 4 + added.nbytes
        handed = Handed({"full": (turns,)})
        for i, mask in enumerate(masks):
            for rows in (slice(None), slice(0, 1)):
                args, named = arguments.call(1, 1, i, rows, handed)
                assert same((args, named["mask"]), ((turns, torch.tensor(3)), mask))
                assert named["handed"] is handed
        assert [arguments.has(*place) for place in ((1, 1, 0), (1, 1, 2), (2, 1, 0))] == [True, False, False]
        kept = [(block, i) for block in (0, 1) for i in (0, 1) if arguments.kept(block, i, ADDED) is not None]
        assert kept == [(0, 1)]
        assert same(arguments.kept(0, 1, ADDED), added)


def test_what_blocks_hand_on() -> None:
    arguments = BlockArguments(MemoryBudget())
    values = [torch.randn(2, 3), torch.randn(2, 3)]
    for i, value in enumerate(values):
        handed = arguments.handed(1, i)
        assert not handed
        handed["full"] = (value, value + 1)
        arguments.hand_on(1, i, handed)
    for block in (0, 1):  # before a block is done, it does not receive what it made itself
        assert not arguments.handed(block, 0)
    handed = arguments.handed(2, 1, slice(1, 2))
    assert same(dict(handed), {"full": (values[1][1:], values[1][1:] + 1)})
    with pytest.raises(UnsupportedModelError, match="blocks hand on 'full' more than once"):
        handed["full"] = (values[0], values[0])
    again = Handed({"full": (values[1], values[0])})
    arguments.hand_on(1, 0, again)
    assert same(dict(arguments.handed(3, 0)), dict(again))
