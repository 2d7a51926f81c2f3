"""What becomes a semi-structured tensor on a GPU. That torch's products with them are right is not tested here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import niwaki
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.packed import two_four as semi_structured
from niwaki.packed.linear import SparseLinear
from support.models import decoder_blocks, message, random_model, random_tokens, reference

HALF = torch.float16
#: Of block 0; block 1 has none.
SPARSE = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")


def without_two_of_four(weight: Tensor) -> Tensor:
    """The largest two of every four."""
    fours = weight.unflatten(1, (-1, 4))
    kept = fours.abs() >= fours.abs().sort(2).values[:, :, 2:3]
    found: Tensor = (fours * kept).flatten(1)
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a few 2:4 matrices, and one with as many zeros elsewhere."""
    model = random_model("llama", dtype=HALF)
    block = decoder_blocks(model)[0]
    with torch.no_grad():
        for name in SPARSE:
            weight = block.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            weight.copy_(without_two_of_four(weight))
        other = block.get_submodule("mlp.gate_proj").weight
        assert isinstance(other, Tensor)
        other[:, :16] = 0
    path = tmp_path_factory.mktemp("models") / "dense"
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def packed(dense: Path) -> Path:
    path = dense.parent / "packed"
    niwaki.pack(dense, path)
    return path


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What torch is given to convert, as if there were a GPU. Its answer is the same tensor."""
    found: list[Tensor] = []

    def convert(weight: Tensor) -> Tensor:
        found.append(weight)
        return weight

    monkeypatch.setattr(semi_structured, "check", lambda *_: None)
    monkeypatch.setattr(semi_structured, "to_sparse_semi_structured", convert)
    return found


def test_the_pattern() -> None:
    def is_two_four(*rows: list[float]) -> bool:
        return semi_structured.is_two_four(torch.tensor(rows))

    assert is_two_four([1, 0, 0, 2, 0, 3, 0, 0], [0, 0, 0, 0, 1, 1, 0, -0.0])
    assert not is_two_four([1, 0, 0, 2, 0, 3, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0])
    assert not is_two_four([0, 0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0])  # as many zeros, elsewhere
    assert is_two_four([0, 0, 1, 1, 1, 1, 0, 0])  # four in a row, in two groups
    assert not is_two_four([1, 0, 0, 0, 1, 0])  # no whole groups


@pytest.mark.parametrize("directory", ["dense", "packed"])
@torch.no_grad()
def test_linear_layers_with_the_pattern_are_converted(
    directory: str, converted: list[Tensor], request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(directory)
    model = niwaki.load(path, "cpu", "float16", two_four=True)
    right = reference(request.getfixturevalue("dense"), HALF)
    block = decoder_blocks(model)[0]
    for name, given in zip(SPARSE, converted, strict=True):
        assert given.dtype == HALF
        assert given.is_contiguous()
        assert torch.equal(given, decoder_blocks(right)[0].get_submodule(name).weight)  # type: ignore[arg-type]
        layer = block.get_submodule(name)
        assert layer.weight.data_ptr() == given.data_ptr()  # type: ignore[operator]
    assert not any(isinstance(module, SparseLinear) for module in model.modules())
    tokens = random_tokens(2, 9)
    assert torch.equal(model(tokens).logits, right(tokens).logits)


def test_a_cpu_has_none(dense: Path, packed: Path) -> None:
    for path in (dense, packed):
        said = message(lambda path=path: niwaki.load(path, "cpu", two_four=True))  # type: ignore[misc]
        assert said == "2:4 products need a GPU with CUDA, and the model is on cpu; leave two_four out"


def test_only_half_precision() -> None:
    device = torch.device("cuda", 0)
    said = message(lambda: semi_structured.check(device, torch.float32))
    assert said == "2:4 products are in half precision, and this would be float32; give dtype='float16'"
    semi_structured.check(device, torch.float16)
    semi_structured.check(device, torch.bfloat16)


def test_it_is_checked_what_would_be_computed_in(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def check(*given: object) -> None:
        seen.append(given)
        raise UsageError("seen")

    monkeypatch.setattr(semi_structured, "check", check)
    assert message(lambda: niwaki.load(dense, "cpu", two_four=True)) == "seen"
    assert message(lambda: niwaki.load(dense, "cpu", "bfloat16", two_four=True)) == "seen"
    device = torch.device("cpu")
    assert seen == [(device, torch.float32), (device, torch.bfloat16)]


@pytest.mark.parametrize("case", ["mixtral", "gpt2", "gpt_oss"])
def test_what_is_no_linear_layer_stays(case: str, tmp_path: Path, converted: list[Tensor]) -> None:
    """Experts, and layers that have their weights the other way around."""
    model = random_model(case, dtype=HALF)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.view(-1, 4)[:, 2:] = 0
    model.save_pretrained(tmp_path)
    if case == "gpt2":
        message(lambda: niwaki.load(tmp_path, "cpu", "float16", two_four=True))
        return
    loaded = niwaki.load(tmp_path, "cpu", "float16", two_four=True)
    projections = 4 * len(decoder_blocks(loaded))
    assert len(converted) == projections
    places = {weight.data_ptr() for weight in converted}
    weights = [parameter for parameter in loaded.parameters() if parameter.data_ptr() in places]
    assert len(weights) == projections
    assert not any(weight.requires_grad for weight in weights)


def test_a_model_without_the_pattern(tmp_path: Path, converted: list[Tensor]) -> None:
    random_model("llama", dtype=HALF).save_pretrained(tmp_path)
    said = message(lambda: niwaki.load(tmp_path, "cpu", "float16", two_four=True))
    assert said.endswith("has two zeros in every four weights; prune to the pattern 2:4, or leave two_four out")
    assert not converted


def test_what_torch_refuses(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semi_structured, "check", lambda *_: None)
    # Really given to torch, which has these tensors on GPUs only.
    said = message(lambda: niwaki.load(dense, "cpu", "float16", two_four=True), UnsupportedModelError)
    assert said.startswith("torch cannot make a 2:4 tensor of self_attn.q_proj of block 0, 32 x 32 (Error ")
    assert said.endswith("leave two_four out")
