"""Compressing by fewer tokens: what that is foreseen to cost, where it is chosen, and what is said of it."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import niwaki
from niwaki import Calibration, Compute, Measurement, NiwakiError
from niwaki.checkpoints.reading import Checkpoint
from niwaki.compression.compress import plan_compression
from niwaki.compression.foresight import Foresight, LookingAtTokens, TokenCosts, foresee
from niwaki.compression.ways import Composition, DenseWays, PackedWays
from niwaki.errors import CalibrationError, UsageError
from niwaki.evaluation.evaluate import evaluate_both
from niwaki.layer.grid import Grid
from niwaki.models.hidden_states import MemoryBudget
from niwaki.models.streamed import StreamedModel
from niwaki.pruning.mixed_bits import COARSE
from niwaki.records.perplexity import Perplexity
from niwaki.records.progress import Progress
from niwaki.shrinking.tokens import ModelTokens, Size
from niwaki.texts.texts import Texts
from niwaki.windows import Windows
from support.models import add_tokenizer, edit_json, random_model, random_tokens

CPU = Compute("cpu", "float32")
ROWS = 4096
WORDS = "the cat sat on a mat while seven quiet children watched snow fall over old harbour walls"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for headers not to count for much, with the embedded model's tokenizer."""
    path = tmp_path_factory.mktemp("tokens") / "model"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": ROWS}
    random_model("llama", dtype=torch.bfloat16, tie_word_embeddings=True, **sizes).save_pretrained(path)
    return add_tokenizer(path)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """Some words in no order."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    words = WORDS.split()
    order = torch.randint(len(words), (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    file.write_text(" ".join(words[number] for number in order))
    return Calibration(str(file), samples=16, length=32)


@pytest.mark.parametrize(
    ("texts", "count", "tokens", "held"),
    [
        (1, 16, 4096, [0, 15]),
        (3, 128, 16384, [0, 1, 2, 123, 124, 125]),
        (3, 128, 8192, [0, 1, 2]),
        (3, 128, 1024, [0, 1, 2]),
        (5, 4, 8192, [0, 1]),
    ],
)
def test_what_is_measured_on_is_of_all_texts(
    texts: int, count: int, tokens: int, held: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of several texts take turns, as many of each as can be."""
    seen = []

    def counted(_: object, __: Calibration, tokens: Tensor) -> None:
        seen.extend(tokens[:, 0].tolist())
        raise CalibrationError("enough")

    monkeypatch.setattr("niwaki.compression.foresight.count_tokens", counted)
    monkeypatch.setattr("niwaki.compression.foresight.ModelTokens", lambda _: SimpleNamespace(rows=ROWS))
    windows = Windows(torch.arange(count).unsqueeze(1).expand(-1, 2048), "numbers")
    calibration = Calibration(tuple(f"{i}.txt" for i in range(texts)))
    model: Any = SimpleNamespace(check_head=lambda: None)
    with pytest.raises(CalibrationError, match="enough"):
        LookingAtTokens.of(model, calibration, windows, replace(COARSE, tokens=tokens))
    assert seen == held


def _nats(path: Path, tokens: Tensor, spans: Tensor) -> float:
    """What the model there needs for the predicted tokens of windows, in float64, by transformers alone."""
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    total = 0.0
    for window, (first, end) in zip(tokens, spans.tolist(), strict=True):
        with torch.inference_mode():
            logits = whole(window[None, :end]).logits[0].double().log_softmax(-1)
        total -= sum(logits[i - 1, window[i]].item() for i in range(first, end))
    return total


def test_what_a_removed_token_costs(model: Path, tmp_path: Path) -> None:
    """It is what the model that is written without them loses, on windows that they are not chosen by."""
    streamed = StreamedModel(Checkpoint(model), "cpu", "float32")
    text = Calibration("demo", samples=64, length=64)
    windows = Texts.read(streamed, text, Measurement(samples=0)).windows
    looking = LookingAtTokens.of(streamed, text, windows)
    assert isinstance(looking, LookingAtTokens)
    states = looking.changed(MemoryBudget())
    for block in streamed.stream():
        for each in states:
            block.advance(each)
    looking.see(*states)
    found = looking.found()
    assert (found.rows, found.weights) == (ROWS, 128)
    sizes = [size for size, *_ in found.sizes]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 3072

    # The same tokens, as the stage removes them where it measures on the same windows.
    before, after = looking._pair
    assert before.spans is not None
    assert after.spans is not None
    small = tmp_path / "small"
    weight = Checkpoint(model).read("model.embed_tokens.weight")
    whole = AutoModelForCausalLM.from_pretrained(model)
    whole.resize_token_embeddings(len(looking._new))
    whole.model.embed_tokens.weight.data = weight[looking._kept]
    whole.save_pretrained(small)
    lost = _nats(small, after.tokens, after.spans) - _nats(model, before.tokens, before.spans)
    predicted = (
        token
        for window, (first, end) in zip(before.tokens, before.spans.tolist(), strict=True)
        for token in window[first:end].tolist()
    )
    gone = sum(token not in looking._new for token in predicted)
    assert looking._removed == gone > 20
    # What it costs counts as much as how many are gone of all windows that were not counted, of which these are some.
    (*_, (_, own, other)) = found.sizes
    assert other >= own > 0
    cost = max(3, (lost + 6 * 8) / (gone + 8))
    assert own == pytest.approx(cost * gone / before.tokens.numel(), rel=0.2)
    assert looking._lost == pytest.approx(lost, rel=1e-4)


def test_between_the_numbers_that_are_known() -> None:
    costs = TokenCosts(1000, 64, ((750, 0.1, 0.2), (500, 0.3, 0.9)))
    assert costs.of(1000) == (0.0, 0.0)
    assert costs.of(875) == pytest.approx((0.05, 0.1))
    assert costs.of(500) == pytest.approx((0.3, 0.9))
    assert costs.of(499) is None
    assert costs.removed(750) == 250 * 64


def _with(monkeypatch: pytest.MonkeyPatch, *sizes: tuple[int, float, float]) -> None:
    """Plans foresee that fewer tokens cost this, whatever the model is."""

    def seen(*given: Any) -> Any:
        return replace(foresee(*given), tokens=TokenCosts(ROWS, 128, sizes))

    monkeypatch.setattr("niwaki.compression.compress.foresee", seen)


@pytest.mark.parametrize(("runtime", "size"), [("niwaki", 0.3), ("llama.cpp", 0.6)])
def test_fewer_tokens_where_they_cost_least(
    model: Path, text: Calibration, runtime: Any, size: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then other weights have more bits; the size is kept; and what was foreseen is of the tokens there were."""
    if runtime == "llama.cpp":
        pytest.importorskip("gguf")
    given: dict[str, Any] = {"runtime": runtime, "calibration": text, "compute": CPU}
    _with(monkeypatch)
    plain = plan_compression(model, size, **given)
    assert plain.way.stages[0].name != "vocabulary"
    _with(monkeypatch, (3072, 1e-9, 1e-9), (2048, 1e-9, 9.0))
    plan = plan_compression(model, size, **given)
    assert plan.way.stages[0] == niwaki.ShrinkVocabulary(3072)
    assert plan.way.words.startswith("3,072 of 4,096 tokens, ")
    assert plan.way.nats is not None
    assert plain.way.nats is None or plan.way.nats < plain.way.nats
    assert "on other kinds of text" in str(plan)
    record = niwaki.compress(model, tmp_path / "out", size, **given)
    assert record.notes[-1].startswith("foreseen to lose about ")
    assert record.notes[-1].endswith(" nats a token")
    kinds = "*.gguf" if runtime == "llama.cpp" else "packed-*.safetensors"
    made = sum(file.stat().st_size for file in (tmp_path / "out").glob(kinds))
    assert 0.8 * plan.way.size <= made <= plan.way.size <= plan.asked
    if runtime == "niwaki":
        assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 3072
    _with(monkeypatch, (3072, 9.0, 9.0))
    if runtime == "niwaki":
        assert plan_compression(model, size, **given).way == plain.way


def test_fewer_tokens_for_transformers(
    model: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As few as bring it there, or with less of the rest removed; the result is no larger than what was asked for."""
    _with(monkeypatch, (3072, 1e-9, 1e-9), (2048, 9.0, 9.0))
    plan = plan_compression(model, parameters=0.9, calibration=text)
    (stage,) = plan.way.stages
    assert isinstance(stage, niwaki.ShrinkVocabulary)
    assert int(stage.size) % 64 == 0
    record = niwaki.compress(model, tmp_path / "out", parameters=0.9, calibration=text, compute=CPU)
    assert record.structure
    parameters = record.structure.parameters
    assert 0.87 < parameters["after"] / parameters["before"] <= 0.9
    plan = plan_compression(model, parameters=0.8, calibration=text)
    assert [stage.name for stage in plan.way.stages] == ["vocabulary", "shrink"]
    assert "3,072 of 4,096 tokens, 0.95 of the parameters that this leaves" in plan.way.words
    assert plan.others[0].words == "0.8 of the parameters"


def _without_foresight(least: int) -> DenseWays:
    """Those of a model of 1000 parameters of which nothing could be found out."""
    sizes: dict[str, Any] = {"count": 1000, "before": 2000, "of_neurons": 500, "of_tokens": 200, "least": least}
    return DenseWays(**sizes, heal=(), foresight=Foresight(TokenCosts()))


def test_a_ladder_of_smaller_models_without_foresight() -> None:
    ways = _without_foresight(300).ladder()
    assert [way.size for way in ways] == sorted((way.size for way in ways), reverse=True)
    assert all(way.nats is None and way.tokens is None for way in ways)
    assert min(way.size for way in ways) == 800  # at least 300 of 1,000 parameters stay, and 400 at the end of a ladder
    with pytest.raises(UsageError, match="960 of 1,000 parameters cannot be reached by removing parts: at least 990"):
        _without_foresight(990).ladder()


def test_no_plan_names_what_cannot_be_removed(tmp_path: Path) -> None:
    """Half of two blocks, most heads and most neurons of a model that is mostly embeddings; and fewer tokens too."""
    random_model("llama", vocab_size=ROWS, num_hidden_layers=2, intermediate_size=64).save_pretrained(
        tmp_path / "model"
    )
    small = Checkpoint(add_tokenizer(tmp_path / "model"))
    ways = replace(DenseWays.of(StreamedModel(small, "cpu"), ()), foresight=Foresight(TokenCosts()))
    share = ways.least / ways.count
    assert 0.5 < share < 1
    with pytest.raises(UsageError, match=f"at least {ways.least:,} are left; give"):
        ways.to(share - 0.05)
    (tmp_path / "text.txt").write_text("a word " * 200)  # too little to choose tokens by
    text = Calibration(str(tmp_path / "text.txt"), samples=4, length=32)
    with pytest.raises(UsageError, match="are left, and fewer tokens were not considered: choosing them takes 2,048"):
        plan_compression(small.path, parameters=share - 0.05, calibration=text)
    plan = plan_compression(small.path, parameters=share + 0.01, calibration=text)
    assert [stage.name for stage in plan.way.stages] == ["shrink"]
    niwaki.run(small.path, tmp_path / "out", plan.way.stages, calibration=text, measurement=None)
    plan = plan_compression(small.path, parameters=share - 0.05, calibration=Calibration("demo", samples=16, length=32))
    assert plan.way.stages[0].name == "vocabulary"
    assert plan.others == ()


def test_rows_that_the_tokenizer_does_not_have(tmp_path: Path) -> None:
    """They cost nothing, and a number of tokens between these two is none to ask for."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 3 * ROWS // 2}
    random_model("llama", tie_word_embeddings=True, **sizes).save_pretrained(tmp_path)
    streamed = StreamedModel(Checkpoint(add_tokenizer(tmp_path)), "cpu", "float32")
    windows = Texts.read(streamed, Calibration("demo", samples=16, length=32), Measurement(samples=0)).windows
    looking = LookingAtTokens.of(streamed, Calibration("demo"), windows)
    assert isinstance(looking, LookingAtTokens)
    costs = looking.found()
    assert costs.unused == ROWS // 2
    assert costs.sizes[0][0] == 3840
    assert costs.of(ROWS) == (0.0, 0.0)
    assert costs.of(ROWS + 1) is None
    ways = replace(_without_foresight(0), count=10**6, before=2 * 10**6, foresight=Foresight(costs))
    assert ways.to(0.99)[0].tokens == ROWS - 64


def test_a_ladder_goes_on_with_fewer_tokens(model: Path, text: Calibration) -> None:
    checkpoint = Checkpoint(model)
    sight = foresee(checkpoint, Grid(8, 64, 8.0), [f"int{bits}:64" for bits in (8, 6, 5, 4)], text, CPU, Progress())
    parts = Composition.of(StreamedModel(checkpoint, "cpu"), "niwaki")
    costs = TokenCosts(ROWS, 128, ((1024, 0.1, 0.1),))
    ways = PackedWays(parts=parts, runtime="niwaki", heal=(), foresight=replace(sight, tokens=costs))
    ladder = ways.ladder()
    assert ladder[-1].tokens == 1024
    assert ladder[-1].size < 0.9 * ways.smallest.size
    assert [way.size for way in ladder] == sorted((way.size for way in ladder), reverse=True)


def test_losses_of_models_with_other_tokens() -> None:
    """In nats for each token of the first: those of the text, by its windows."""
    common: dict[str, Any] = {"standard_error": None, "windows": 2, "text": "t", "bytes": (40, 60)}
    before = Perplexity(math.exp(2.0), tokens=20, context=11, losses=(1.8, 2.2), counts=(10, 10), **common)
    after = Perplexity(math.exp(1.9), tokens=25, context=14, losses=(1.7, 2.05), counts=(12, 13), **common)
    lost = after.lost_from(before)
    assert lost.unit == "nats a token"
    assert lost.nats == pytest.approx((25 * 1.9 - 20 * 2.0) / 20)
    assert lost.standard_error
    alike = replace(after, counts=(10, 10), tokens=20)
    assert alike.lost_from(before) == alike.above(before)


def test_both_models_on_the_same_text(model: Path, text: Calibration, tmp_path: Path) -> None:
    measurement = Measurement("demo", samples=6, length=32)
    small = tmp_path / "small"
    niwaki.shrink(model, small, vocabulary=1024, calibration=text, measurement=None, compute=CPU)
    after, before = evaluate_both(small, model, measurement, CPU, {})
    assert after.bytes == before.bytes
    assert after.counts != before.counts
    record = niwaki.shrink(
        model, tmp_path / "again", vocabulary=1024, calibration=text, measurement=measurement, compute=CPU
    )
    assert after.value == pytest.approx(record.perplexity["after"].value)
    assert before.value == pytest.approx(record.perplexity["before"].value)
    known = dict[str, Perplexity]()
    same, whole = evaluate_both(model, model, measurement, CPU, known)
    assert same == whole == known["demo"] == niwaki.evaluate(model, measurement, compute=CPU)


def test_tokens_that_cannot_be_removed(model: Path, tmp_path: Path) -> None:
    """No way has fewer then: of a text that is too short to choose by, and of files that are not known or wrong."""
    few = random_tokens(1, 32)

    def refused(model: Path, windows: niwaki.Windows, why: str, text: Calibration | None = None) -> None:
        streamed = StreamedModel(Checkpoint(model), "cpu", "float32")
        with pytest.raises(NiwakiError, match=why):
            LookingAtTokens.of(streamed, text or Calibration(windows.tokens), windows)

    refused(model, niwaki.Windows(few, "tokens"), "^the text has one window$")
    tokens = niwaki.Windows(few.repeat(40, 1), "tokens")
    refused(model, tokens, "takes 2,048 tokens of text beside 640 that they are measured on, and there are 640$")
    other = shutil.copytree(model, tmp_path / "other")
    text = Calibration("demo", samples=16, length=32)
    streamed = StreamedModel(Checkpoint(other), "cpu", "float32")
    windows = Texts.read(streamed, text, Measurement(samples=0)).windows
    assert isinstance(LookingAtTokens.of(streamed, text, windows), LookingAtTokens)
    named = other / "generation_config.json"
    before = named.read_bytes()
    edit_json(named, pad_token_id=ROWS)
    refused(other, windows, "names the token 4,096", text)
    named.write_bytes(before)
    content = json.loads((other / "tokenizer.json").read_text())
    edit_json(other / "tokenizer.json", model=content["model"] | {"dropout": 0.5})
    refused(other, windows, "dropout", text)
    (other / "tokenizer.json").write_text("{}")
    many = niwaki.Windows(random_tokens(700, 32, vocabulary=ROWS), "tokens")
    refused(other, many, "not a tokenizer that can be read")


def test_tokens_that_a_file_beside_the_tokenizer_names(model: Path, tmp_path: Path) -> None:
    """They stay, also such as tokenizer.json has as text or not at all."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    added = {"4000": {"content": "<new>", "special": True}}
    edit_json(tmp_path / "tokenizer_config.json", added_tokens_decoder=added)
    tokens = ModelTokens(StreamedModel(Checkpoint(tmp_path), "cpu", "float32"))
    new = tokens.choose(torch.full((ROWS,), 1 / ROWS), Size(1024))
    assert 4000 in new
    assert tokens.tokenizer(new)


@pytest.mark.slow
def test_a_loss_with_fewer_tokens(
    model: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is in nats for each token that there was, on all texts; other text loses more."""
    _with(monkeypatch, (1024, 1e-9, 1e-9))
    same, other = tmp_path / "same.txt", tmp_path / "other.txt"
    same.write_text(f"{WORDS} " * 40)
    other.write_text("Philosophers disagreed vehemently about metaphysical consequences. " * 40)
    given: dict[str, Any] = {"calibration": text, "compute": CPU}
    record = niwaki.compress(model, tmp_path / "out", loss=0.2, also=[str(same)], **given)
    assert record.structure
    assert record.structure.vocabulary == {"before": ROWS, "after": 1024}
    assert record.notes[-1].startswith("the smallest within the bound is 1,024 of 4,096 tokens, ")
    assert f"nats a token on {same}" in record.notes[-1]
    assert "bits a byte" not in record.notes[-1]
    measurement = Measurement(str(other), samples=4, length=32)
    after, before = evaluate_both(tmp_path / "out", model, measurement, CPU, {})
    assert after.lost_from(before).nats > 0.5
