"""Models that make vectors of texts: measured by these, against transformers, and healed towards the dense model's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import niwaki
from niwaki import Compute, Heal, Measurement, Prune, Shrink
from niwaki.errors import UnsupportedModelError
from niwaki.models.sentence_vectors import agreement, pooling_of, scores_of, sentence_vectors, similarity
from niwaki.models.streamed import StreamedModel
from niwaki.runs.similarity import texts_of
from niwaki.runs.stage import Stage
from niwaki.windows import Windows
from support.covering import some
from support.healing import TOKENS
from support.models import add_tokenizer, begin_texts, edit_json, message, save_random
from support.runs import StopAt, files, raw, tensors, zeros
from support.streams import stream_of

CPU = Compute("cpu", "float32")
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
SENTENCES = [torch.arange(5, 5 + length) for length in (9, 4, 9, 12, 4)]
TEXT = "".join(
    f"The old man went to the river {i} times. He did not see the boat {i}! Where was it? " for i in range(60)
)


#: Encoders as their configurations are, but for sizes.
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "xlm-roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "mpnet": {"pad_token_id": 1, "relative_attention_num_buckets": 32},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8, "classifier_pooling": "mean"}
    | dict.fromkeys(("cls_token_id", "bos_token_id"), 0)
    | dict.fromkeys(("sep_token_id", "eos_token_id"), 1)
    | {"pad_token_id": 2},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    | {"position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True, "type_vocab_size": 0},
}
#: Decoders whose files may have no head.
DECODERS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 8, "num_key_value_heads": 2, "use_bidirectional_attention": True}
    | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}
QUICK: dict[str, Any] = {"calibration": TOKENS, "measurement": Measurement(TOKENS[:4]), "compute": CPU}


def save_kind(path: Path, kind: str, auto: Any, **others: Any) -> Path:
    """A tiny model of one of these kinds, with the embedded model's tokenizer."""
    sizes = {**SIZES, "vocab_size": 4096, "max_position_embeddings": 66, **{**ENCODERS, **DECODERS}[kind], **others}
    return add_tokenizer(save_random(path, AutoConfig.for_model(kind, **sizes), auto))


def save_encoder(path: Path, **others: Any) -> Path:
    """A tiny one without a head, with the embedded model's tokenizer."""
    config = AutoConfig.for_model("bert", vocab_size=4096, max_position_embeddings=64, **SIZES, **others)
    return add_tokenizer(save_random(path, config, AutoModel))


def set_pooling(model: Path, mode: str) -> None:
    """The files of sentence-transformers."""
    modules = [{"idx": 0, "path": "", "type": "a.Transformer"}, {"idx": 1, "path": "1_Pooling", "type": "a.Pooling"}]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling").mkdir(exist_ok=True)
    (model / "1_Pooling" / "config.json").write_text(json.dumps({mode: True, "pooling_mode_mean_tokens": False}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("vectors") / "model")


@torch.no_grad()
def compare_vectors(model: Path, pool: Any) -> None:
    """With those of transformers' model."""
    whole = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    rows = [pool(whole(tokens.unsqueeze(0)).last_hidden_state[0]) for tokens in SENTENCES]
    expected = torch.nn.functional.normalize(torch.stack(rows))
    torch.testing.assert_close(sentence_vectors(stream_of(model), SENTENCES), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def compare_scores(model: Path, auto: Any, texts: Sequence[Mapping[str, Tensor]]) -> None:
    whole = auto.from_pretrained(model, dtype=torch.float32).eval()
    expected = [whole(**{name: value[None] for name, value in each.items()}).logits for each in texts]
    torch.testing.assert_close(scores_of(stream_of(model), texts), expected, rtol=1e-4, atol=1e-5)


def changed(model: Path, out: Path) -> set[str]:
    """The tensors that are not the same."""
    before, after = tensors(model), tensors(out)
    return {key for key in before if raw(before[key]) != raw(after[key])}


@pytest.mark.parametrize(
    ("mode", "name", "pool"),
    [
        ("pooling_mode_mean_tokens_", "mean", lambda states: states.mean(0)),
        ("pooling_mode_cls_token", "cls", lambda states: states[0]),
        ("pooling_mode_max_tokens", "max", lambda states: states.amax(0)),
        ("pooling_mode_lasttoken", "lasttoken", lambda states: states[-1]),
    ],
)
def test_vectors_are_those_of_transformers(tmp_path: Path, mode: str, name: str, pool: Any) -> None:
    model = save_encoder(tmp_path / "model")
    set_pooling(model, mode)
    assert pooling_of(stream_of(model)) == name
    compare_vectors(model, pool)


@pytest.mark.parametrize("text", ["{", "[]", "[3]", '[{"type": "a.Pooling", "path": "nowhere"}]', '{"a": 1}'])
def test_files_that_say_nothing(tmp_path: Path, text: str) -> None:
    model = save_encoder(tmp_path / "model")
    (model / "modules.json").write_text(text)
    assert pooling_of(stream_of(model)) == "mean"


def test_similarities_by_hand() -> None:
    dense = torch.nn.functional.normalize(torch.randn(7, 5, generator=torch.Generator().manual_seed(0)))
    same = similarity(dense, dense, "mean", "a text")
    assert (same.cosine, same.rank_correlation) == pytest.approx((1, 1))
    other = torch.nn.functional.normalize(dense + 0.3 * torch.randn(7, 5, generator=torch.Generator().manual_seed(1)))
    found = similarity(dense, other, "mean", "a text")
    cosines = [float(torch.dot(a.double(), b.double())) for a, b in zip(dense, other, strict=True)]
    assert found.cosine == pytest.approx(sum(cosines) / 7)
    assert found.lowest == pytest.approx(min(cosines))
    pairs = [(i, j) for i in range(7) for j in range(i)]
    one, two = ([float(v[i].double() @ v[j].double()) for i, j in pairs] for v in (dense, other))
    ranks = [[sorted(values).index(value) for value in values] for values in (one, two)]
    squares = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    assert found.rank_correlation == pytest.approx(1 - 6 * squares / (21 * (21**2 - 1)))  # without ties
    assert (found.sentences, found.pairs) == (7, 21)


def test_one_sentence_has_no_pairs() -> None:
    vector = torch.ones(1, 4) / 2
    found = similarity(vector, vector, "mean", "a text")
    assert found.cosine == pytest.approx(1)
    assert (found.standard_error, found.rank_correlation) == (0, 1)


def sentences_of(stream: StreamedModel, windows: Windows) -> list[Tensor]:
    return [each["input_ids"] for each in texts_of(stream, windows)[0]]


def test_sentences_of_a_text(model: Path) -> None:
    stream = stream_of(model)
    ids = torch.tensor(stream.tokenizer(TEXT)["input_ids"][:640]).view(20, 32)
    found = sentences_of(stream, Windows(ids, "a text"))
    words = [str(stream.tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in found]
    whole = {f"The old man went to the river {i} times." for i in range(60)}
    assert set(words[:-1]) <= whole | {f"He did not see the boat {i}!" for i in range(60)}
    assert len(set(words)) == len(words) > 20
    assert all(8 <= len(tokens) <= 32 for tokens in found)
    few = Windows(torch.randint(300, 4000, (4, 32), generator=torch.Generator().manual_seed(0)), "no text")
    assert torch.equal(torch.stack(sentences_of(stream, few)), few.tokens)


def test_pruned_models_are_measured_by_their_vectors(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    calibration = niwaki.Calibration(str(text), samples=8, length=32)
    record = niwaki.prune(model, tmp_path / "out", 0.5, calibration=calibration, compute=CPU)
    assert (record.perplexity, record.sparsity, record.effort["allocation"]) == ({}, 0.5, "error")
    (note,) = (note for note in record.notes if "predicts no words" in note)
    assert "the effort is" in note
    after = tensors(tmp_path / "out")
    matrices = [each for each in changed(model, tmp_path / "out") if after[each].ndim > 1]
    assert sum(zeros(after[key]) for key in matrices) == sum(each.size for each in stream_of(model).matrices()) // 2
    found = record.vectors["after"]
    dense, pruned = (stream_of(path) for path in (model, tmp_path / "out"))
    sentences = sentences_of(dense, Windows(_after(dense, text), "a text"))
    again = similarity(sentence_vectors(dense, sentences), sentence_vectors(pruned, sentences), "mean", found.text)
    assert again == found
    assert 0 < found.cosine < 0.999
    assert f"cosine {found.cosine:.4f}" in (tmp_path / "out" / "README.md").read_text()
    assert niwaki.Record.load(tmp_path / "out" / "niwaki.json").vectors == record.vectors
    healed = niwaki.prune(model, tmp_path / "healed", 0.5, effort="heal:epochs=0", **QUICK).healing
    assert healed
    assert healed.of_states


def _after(stream: Any, text: Path) -> Tensor:
    """The 16 windows after the first 8."""
    return torch.tensor(stream.tokenizer(text.read_text(), add_special_tokens=False)["input_ids"])[: 24 * 32].view(
        24, 32
    )[8:]


@pytest.mark.slow
@pytest.mark.parametrize("method", some(["full", "norms", "lora"], 2))
def test_healing_brings_vectors_nearer(model: Path, tmp_path: Path, method: Any) -> None:
    niwaki.prune(model, tmp_path / "pruned", 0.6, effort="fast", calibration=TOKENS, compute=CPU)
    effort: dict[str, Any] = {"tokens": 4000, "rate": 0.01, "batch": 64, "own_text": 0.0}
    record = niwaki.heal(tmp_path / "pruned", tmp_path / "healed", model, method=method, **effort, **QUICK)
    assert record.healing
    assert record.healing.of_states
    assert record.healing.points[record.healing.best].error < 0.95 * record.healing.points[0].error
    assert "distance of states" in str(record.healing)
    assert record.vectors["after"].cosine > record.vectors["pruned"].cosine
    before, after = tensors(tmp_path / "pruned"), tensors(tmp_path / "healed")
    assert all(zeros(before[key]) == zeros(after[key]) for key in before if before[key].ndim == 2)


@pytest.mark.slow
def test_one_run_resumes(model: Path, tmp_path: Path) -> None:
    """Prune and heal in one run, stopped in the first stage: the same bytes, measured on the same sentences."""
    stages: list[Stage] = [Prune(0.5, effort="fast"), Heal(tokens=400, rate=0.01, batch=64, own_text=0.0)]
    whole = niwaki.run(model, tmp_path / "whole", stages, **QUICK)
    with pytest.raises(KeyboardInterrupt):
        niwaki.run(model, tmp_path / "parts", stages, **QUICK, progress=StopAt(8))
    parts = niwaki.run(model, tmp_path / "parts", stages, **QUICK)
    assert files(tmp_path / "whole") == files(tmp_path / "parts")
    assert whole.vectors == parts.vectors


@pytest.mark.slow
def test_a_smaller_one(model: Path, tmp_path: Path) -> None:
    record = niwaki.run(model, tmp_path / "out", [Shrink(blocks=1, effort="fast")], **QUICK)
    assert record.structure
    assert 0 < record.vectors["after"].cosine < 1


def test_what_needs_predictions_is_refused(model: Path, tmp_path: Path) -> None:
    out, healed = tmp_path / "out", tmp_path / "healed"
    niwaki.prune(model, out, 0.5, effort="fast", calibration=TOKENS, measurement=None, compute=CPU)
    for command in (
        lambda: niwaki.evaluate(out, Measurement(TOKENS)),
        lambda: niwaki.heal(out, healed, model, method="blocks", calibration=TOKENS),
    ):
        assert "has no head, and makes no predictions" in message(command, UnsupportedModelError)


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_that_fill_in_words_make_vectors(tmp_path: Path, kind: str) -> None:
    """Their head stays as it is, and the vectors are those of transformers' model without it."""
    model, out = save_kind(tmp_path / "model", kind, AutoModelForMaskedLM), tmp_path / "out"
    compare_vectors(model, lambda states: states.mean(0))
    record = niwaki.prune(model, out, 0.5, effort="fast", **QUICK)
    assert (record.sparsity, record.perplexity) == (0.5, {})
    assert 0.8 < record.vectors["after"].cosine < 1
    (note,) = (note for note in record.notes if "stay in the files as they are" in note)
    assert "not of its vectors or scores" in note
    assert not any("perplexity says" in note for note in record.notes)
    assert changed(model, out) == {matrix.key for matrix in stream_of(model).matrices()}


@pytest.mark.parametrize("kind", ["xlm-roberta", "mpnet"])
def test_positions_begin_behind_those_of_padding(tmp_path: Path, kind: str) -> None:
    """As RoBERTa's 512 of 514: windows are no longer, without --length too."""
    compare_vectors(model := save_kind(tmp_path / "model", kind, AutoModel), lambda states: states.mean(0))
    stream = stream_of(model)
    assert stream.positions == stream.window_length(None) == 64
    assert sentence_vectors(stream, [torch.arange(5, 69)]).shape == (1, 32)
    with pytest.raises(UnsupportedModelError):
        sentence_vectors(stream, [torch.arange(5, 70)])


@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS])
def test_classifiers_are_measured_by_their_scores(tmp_path: Path, kind: str) -> None:
    auto = AutoModelForSequenceClassification
    model, out = save_kind(tmp_path / "model", kind, auto, num_labels=3), tmp_path / "out"
    dense = stream_of(model)
    assert (dense.has_head, dense.has_scores) == (False, True)
    compare_scores(model, auto, [{"input_ids": tokens} for tokens in SENTENCES])
    record = niwaki.prune(model, out, 0.5, effort="fast", **QUICK)
    scores = record.scores["after"]
    assert (record.sparsity, record.perplexity, record.vectors) == (0.5, {}, {})
    texts = [{"input_ids": tokens} for tokens in TOKENS[:4]]
    again = agreement(scores_of(dense, texts), scores_of(stream_of(out), texts), False, scores.text)
    assert again == scores
    assert "same label as the dense model's for" in (out / "README.md").read_text()
    assert niwaki.Record.load(out / "niwaki.json").scores == record.scores
    assert changed(model, out) == {matrix.key for matrix in dense.matrices()}


def test_scores_of_tokens_and_of_pairs(tmp_path: Path) -> None:
    """Each token's label, as one of names is; and a reranker's order, of questions with answers."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    given: dict[str, Any] = {"calibration": niwaki.Calibration(str(text), samples=8, length=32), "compute": CPU}
    names = save_kind(tmp_path / "names", "distilbert", AutoModelForTokenClassification, num_labels=5)
    scores = niwaki.prune(names, tmp_path / "fewer", 0.5, **given).scores["after"]
    assert scores.agreement is not None
    assert 0.2 < scores.agreement < 1
    assert scores.scored > scores.sentences
    auto = AutoModelForSequenceClassification
    model = begin_texts(save_kind(tmp_path / "reranker", "bert", auto, num_labels=1), "<s> $A </s>")
    process = json.loads((model / "tokenizer.json").read_text())["post_processor"]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {"id": "</s>", "type_id": 1}}]
    edit_json(model / "tokenizer.json", post_processor={**process, "pair": process["single"] + second})
    edit_json(model / "tokenizer_config.json", model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    dense = stream_of(model)
    texts, in_pairs = texts_of(dense, Windows(_after(dense, text), "a text"))
    assert in_pairs
    compare_scores(model, auto, texts)
    scores = niwaki.prune(model, tmp_path / "out", 0.5, **given).scores["after"]
    assert (scores.agreement, scores.in_pairs, scores.sentences) == (None, True, len(texts))
    assert 0 < scores.rank_correlation < 1
    assert str(scores).startswith("rank correlation of scores 0.")


def test_agreement_by_hand() -> None:
    dense = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0]]), torch.tensor([[0.0, 4.0]])]
    other = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0]]), torch.tensor([[0.0, 4.0]])]
    found = agreement(dense, other, False, "a text")
    assert found.agreement == pytest.approx(2 / 3)
    assert found.rank_correlation == pytest.approx((1 - 0.5) / 2)  # 1, and of 2, 1, 4 with 2, 5, 4: -0.5
    assert (found.labels, found.sentences, found.scored) == (2, 3, 3)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("named", ["the model without a head", "one with it, and pooling"])
def test_decoders_whose_files_have_no_head(tmp_path: Path, kind: str, named: str) -> None:
    """As embedding models are: one predicate for all commands, and no perplexity of a head that is made up."""
    model, out = save_kind(tmp_path / "model", kind, AutoModel), tmp_path / "out"
    if named != "the model without a head":
        set_pooling(model, "pooling_mode_lasttoken")
        edit_json(model / "config.json", architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]])
    dense = stream_of(model)
    assert (dense.has_head, dense.sees_ahead) == (False, kind == "gemma3_text")
    assert pooling_of(dense) == ("lasttoken" if named != "the model without a head" or kind == "qwen3" else "mean")
    record = niwaki.prune(model, out, 0.5, **QUICK)
    assert (record.perplexity, record.effort["allocation"]) == ({}, "error")
    assert 0 < record.vectors["after"].cosine < 1
    assert not stream_of(out).has_head
    healed = niwaki.heal(out, tmp_path / "healed", model, tokens=400, own_text=0.0, **QUICK)
    assert healed.healing
    assert healed.healing.of_states
    assert healed.perplexity == {}
    for command in (
        lambda: niwaki.evaluate(model, QUICK["measurement"]),
        lambda: niwaki.compare(model, solvers="wanda", patterns=0.5, calibration=niwaki.Calibration("demo", 2, 32)),
        lambda: niwaki.compress(model, tmp_path / "small", 0.4, calibration=TOKENS),
        lambda: niwaki.plan_compression(model, 0.4, calibration=TOKENS),
        lambda: niwaki.generate(model, "The"),
        lambda: niwaki.bench(model),
    ):
        assert "has no head, and makes no predictions" in message(command, UnsupportedModelError)


def test_a_decoder_with_a_head_beside_pooling_predicts(tmp_path: Path) -> None:
    model = save_kind(tmp_path / "model", "qwen3", AutoModelForCausalLM, tie_word_embeddings=False)
    set_pooling(model, "pooling_mode_lasttoken")
    assert stream_of(model).has_head


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "vit"}, "reads no tokens of a text"),
        ({"model_type": "t5", "architectures": ["T5ForSequenceClassification"]}, "is a T5ForSequenceClassification"),
        ({"model_type": "t5", "architectures": ["T5EncoderModel"]}, "is a T5EncoderModel"),
        ({"model_type": "mamba", "architectures": ["MambaForSequenceClassification"]}, "which config.json names"),
    ],
)
def test_what_is_neither_says_what_it_is(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    model = save_encoder(tmp_path / "model")
    (model / "config.json").write_text(json.dumps(config))
    assert said in message(lambda: stream_of(model), UnsupportedModelError)
