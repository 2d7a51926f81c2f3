"""Perplexity against transformers' own loss, and what ``inspect`` counts."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CalibrationError, CheckpointError, NumericalError
from niwaki.evaluation.evaluate import evaluate
from niwaki.evaluation.inspect import inspect
from niwaki.models.streamed import StreamedModel
from niwaki.options import Measurement
from niwaki.records.perplexity import Perplexity
from niwaki.records.progress import Progress
from niwaki.windows import Windows
from support.models import (
    EMBEDDED,
    edit_json,
    message,
    random_model,
    random_tokens,
    reference,
    save_model,
    save_model_with_few_tokens,
    save_model_with_tokenizer,
    weight,
)


def test_perplexity_of_losses() -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.0, 5.0]])
    found = Perplexity.of(losses, "text")
    assert found.value == pytest.approx(math.exp(2.5))
    # Of the windows' means, 2 and 3: standard deviation sqrt(1/2), over sqrt(2) windows, is 1/2.
    assert found.standard_error == pytest.approx(0.5 * math.exp(2.5))
    assert (found.tokens, found.context, found.windows, found.text) == (6, 4, 2, "text")
    assert str(found) == "12.18 ± 6.09 (6 tokens of text, context 4)"
    how = "2 non-overlapping windows of 4 tokens, the first token of each given and 3 predicted; exp of the mean loss"
    assert found.protocol == f"text; {how}"
    assert Perplexity.of(losses, "text", "from there; all windows").protocol == f"from there; all windows; {how}"


def test_perplexities_beyond_all_measure() -> None:
    """Finite, because JSON has no infinity; a loss of 800 nats is no language model's."""
    assert 1e300 < Perplexity.of(torch.full((2, 3), 800.0), "x").value < math.inf
    assert Perplexity.of(torch.full((2, 3), 80.0), "x").value == pytest.approx(math.exp(80))


@pytest.mark.slow
def test_evaluate_is_transformers_loss(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{n} men went to mow, went to mow a meadow;" for n in range(300)))
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED, model_max_length=10**9)
    ids = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
    windows = torch.tensor(ids[: len(ids) // 100 * 100]).view(-1, 100)
    whole = reference(EMBEDDED)
    losses = torch.stack([whole(row[None], labels=row[None]).loss for row in windows]).double()
    steps: list[tuple[int, int]] = []

    class Steps(Progress):
        def status(self, what: str, done: int = 0, count: int = 0) -> None:
            steps.append((done, count))

    found = evaluate(EMBEDDED, Measurement(str(text), length=100), progress=Steps())
    value, error = losses.mean().exp(), losses.std() / math.sqrt(len(losses))
    assert found.value == pytest.approx(value.item(), rel=1e-4)
    assert found.standard_error == pytest.approx((value * error).item(), rel=1e-3)
    assert (found.tokens, found.context, found.windows) == (99 * len(windows), 100, len(windows))
    assert found.text == str(text)
    assert found.origin.endswith(f"; all windows, {len(ids) % 100} tokens after them left out")
    assert steps == [(n, len(steps)) for n in range(1, len(steps) + 1)]
    assert len(steps) > 6
    first = evaluate(str(EMBEDDED), Measurement(str(text), length=100, samples=3))
    assert first.value == pytest.approx(losses[:3].mean().exp().item(), rel=1e-4)
    # It is a trained model: far better than chance among 4,096 tokens.
    assert found.value < 400


@pytest.mark.slow
def test_the_embedded_model_is_the_default_of_demo() -> None:
    found = evaluate("demo", Measurement("demo-held", samples=4))
    assert found.context == 256  # all that it has positions for
    assert 20 < found.value < 80


@pytest.mark.parametrize("case", ["llama tied", "qwen2 window", "mistral window"])
def test_perplexity_of_tokens(tmp_path: Path, case: str) -> None:
    path = save_model(tmp_path / "model", case, dtype=torch.bfloat16, shards=True)
    tokens = random_tokens(7, 30)
    found = StreamedModel(Checkpoint(path), "cpu").perplexity(Windows(tokens, "given"))
    assert found.value == pytest.approx(reference(path)(tokens, labels=tokens).loss.exp().item(), rel=1e-4)


def test_how_far_a_model_is_from_another(tmp_path: Path) -> None:
    """By transformers in float64: the mean, its error by windows, the 99th of 100 tokens, and equal first choices."""
    paths = [save_model(tmp_path / str(seed), "llama tied", seed=seed) for seed in (0, 1)]
    tokens = random_tokens(5, 21)
    found = evaluate(paths[0], Windows(tokens, "given"), against=paths[1])
    q, p = (reference(path)(tokens).logits[:, :-1].double().log_softmax(-1) for path in paths)
    each = (p.exp() * (p - q)).sum(-1)
    means = each.mean(dim=1)
    measured = found.divergence
    assert measured
    assert measured.tokens == each.numel() == 100
    assert measured.mean == pytest.approx(each.mean().item(), rel=1e-4)
    assert measured.standard_error == pytest.approx(means.std().item() / math.sqrt(5), rel=1e-3)
    assert [measured.high, measured.largest] == pytest.approx(each.flatten().sort().values[-2:].tolist(), rel=1e-4)
    assert measured.same_first == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert found.value == pytest.approx(evaluate(paths[0], Windows(tokens, "given")).value, rel=1e-6)
    same = evaluate(paths[0], Windows(tokens, "given"), against=paths[0]).divergence
    assert same
    assert [same.mean, same.same_first] == pytest.approx([0, 1], abs=1e-6)


def test_models_with_other_tokens_are_not_compared(tmp_path: Path) -> None:
    one, other = save_model_with_tokenizer(tmp_path / "one"), save_model_with_few_tokens(tmp_path / "other")
    text = Measurement("demo-held", length=16, samples=4)
    assert "have different tokens (4,096 and 512)" in message(lambda: evaluate(one, text, against=other))
    shutil.copytree(one, tmp_path / "third")
    edit_json(tmp_path / "third" / "tokenizer.json", normalizer={"type": "Lowercase"})
    assert "different tokens for this text; their bits a byte compare" in message(
        lambda: evaluate(one, text, against=tmp_path / "third")
    )


def test_what_goes_wrong(tmp_path: Path) -> None:
    path = save_model_with_tokenizer(tmp_path / "model")
    for wrong, said in (
        (Measurement("demo", length=129), "129 is more than the model's 128"),
        (Measurement("demo", length=16, samples=0), "samples must be 1 or more; got 0"),
        (Measurement(["demo", "demo-held"]), "one text at a time; got 2"),
    ):
        assert said in message(lambda wrong=wrong: evaluate(path, wrong))  # type: ignore[misc]
    (tmp_path / "short.txt").write_text("a b c")
    with pytest.raises(CalibrationError, match=r"it has \d+, \d+ are missing"):
        evaluate(path, str(tmp_path / "short.txt"))
    (path / "tokenizer.json").unlink()
    assert "no tokenizer" in message(lambda: evaluate(path, Measurement("demo", length=16)), CalibrationError)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in message(lambda: evaluate(tmp_path / "empty", "demo"), CheckpointError)


def test_infinite_activations_are_an_error(tmp_path: Path) -> None:
    path = save_model_with_tokenizer(tmp_path / "model")
    dense = reference(path)
    weight(dense, "model.layers.1.mlp.up_proj").mul_(1e20)
    weight(dense, "model.layers.1.mlp.down_proj").mul_(1e38)
    dense.save_pretrained(path)
    assert not torch.isfinite(dense(random_tokens(1, 16)).logits).any()
    with pytest.raises(NumericalError):
        evaluate(path, Measurement("demo", length=16, samples=4))


def test_survey(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    dense = reference(path, torch.bfloat16)
    q, down = (weight(dense, f"model.layers.1.{name}") for name in ("self_attn.q_proj", "mlp.down_proj"))
    q[:, 1::2] = 0.0  # 2:4, and 4:8
    q[5, 0] = -0.0  # is a zero too
    down[0] = 0.0
    down[1, :47] = 0.0
    dense.save_pretrained(path)
    found = {item.matrix.key: item for item in inspect(path)}
    assert len(found) == 14
    assert all(item.dtype == "BF16" for item in found.values())
    first = found["model.layers.0.mlp.up_proj.weight"]
    assert (first.zeros, first.row_zeros, first.sparsity) == (0, (0, 0), 0.0)
    assert first.fitting == {"1:4": 0.0, "2:4": 0.0, "4:8": 0.0}
    sparse = found["model.layers.1.self_attn.q_proj.weight"]
    assert sparse.matrix.shape == (64, 32)
    assert (sparse.zeros, sparse.row_zeros) == (64 * 16 + 1, (16, 17))
    assert sparse.fitting == {"1:4": pytest.approx(1 / 512), "2:4": 1.0, "4:8": 1.0}
    rows = found["model.layers.1.mlp.down_proj.weight"]
    assert (rows.zeros, rows.row_zeros) == (48 + 47, (0, 48))
    assert rows.sparsity == 95 / (32 * 48)
    assert rows.fitting["1:4"] == pytest.approx(24 / 384)


def test_survey_where_m_does_not_divide(tmp_path: Path) -> None:
    random_model("llama", intermediate_size=36).save_pretrained(tmp_path / "model")
    fitting = [m.fitting for m in inspect(tmp_path / "model") if m.matrix.name == "mlp.down_proj"]
    assert len(fitting) == 2
    assert fitting[0]["2:4"] == 0.0
    assert math.isnan(fitting[0]["4:8"])
