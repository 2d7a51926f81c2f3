"""Zeros of a pruned model stay zeros, whatever trains it."""

from __future__ import annotations

import gc
import json
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import niwaki
from niwaki.errors import CheckpointError, OutputError, UsageError
from support.forks import Running
from support.models import message, random_model

OPTIMIZERS: dict[str, Any] = {
    "AdamW": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Muon": {"weight_decay": 0.1},  # which makes all of a matrix's singular values alike
    "Adafactor": {},
    "Adagrad": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
}


def pruned_layers(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 5)).to(dtype)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            weight = layer.get_parameter("weight")
            weight.mul_(torch.rand(weight.shape) > 0.6)
    return model


def data(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    drawing = torch.Generator().manual_seed(seed)
    return torch.randn(16, 12, generator=drawing, dtype=dtype), torch.randn(16, 5, generator=drawing, dtype=dtype)


def zeros(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() == 0 for name, value in model.named_parameters() if value.ndim > 1}


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
    x, y = data(seed, dtype)
    (model(x) - y).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_optimizers(name: str, dtype: torch.dtype) -> None:
    model = pruned_layers(dtype)
    before, first = zeros(model), model[0].get_parameter("weight").detach().clone()
    kept = niwaki.keep_zeros(model)
    trained = [value for value in model.parameters() if value.ndim == 2 or name != "Muon"]
    optimizer = getattr(torch.optim, name)(trained, lr=0.01, **OPTIMIZERS[name])
    for seed in range(4):
        step(model, optimizer, seed, dtype)
        optimizer.zero_grad()
    kept.check()
    for at, value in zeros(model).items():
        assert torch.equal(value, before[at])
        assert not bool(model.get_parameter(at).detach()[value].signbit().any())
    assert bool((model[0].get_parameter("weight") != first)[~before["0.weight"]].float().mean() > 0.6)
    assert kept.zeros == sum(int(each.sum()) for each in before.values())


class Few(nn.Module):
    """The same layers, of which only the weights that are not zero are parameters."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.weights, self.biases, self.masks = nn.ParameterList(), nn.ParameterList(), list[Tensor]()
        for layer in (model[0], model[2]):
            weight = layer.get_parameter("weight").detach()
            self.masks.append(weight != 0)
            self.weights.append(weight[weight != 0].clone())
            self.biases.append(layer.get_parameter("bias").detach().clone())

    def whole(self, i: int) -> Tensor:
        return torch.zeros(self.masks[i].shape, dtype=torch.float64).masked_scatter(self.masks[i], self.weights[i])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.whole(0).T + self.biases[0])
        made: Tensor = hidden @ self.whole(1).T + self.biases[1]
        return made


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_as_if_there_were_no_other_weights(name: str) -> None:
    """With decay, momentum, gradients of several batches and their norm clipped, in float64."""
    model = pruned_layers()
    few, kept = Few(model), niwaki.keep_zeros(model)
    optimizers = [getattr(torch.optim, name)(each.parameters(), lr=0.02, **OPTIMIZERS[name]) for each in (model, few)]
    for batch in range(6):
        norms = []
        for each, optimizer in zip((model, few), optimizers, strict=True):
            for part in range(2):
                x, y = data(2 * batch + part)
                (each(x) - y).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(each.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-12)
    for i, layer in enumerate((model[0], model[2])):
        found = layer.get_parameter("weight").detach()
        torch.testing.assert_close(found, few.whole(i).detach(), rtol=1e-10, atol=1e-12)
    kept.check()


def test_what_is_kept() -> None:
    """Vectors, matrices that are all zero and those with next to none are trained whole; frozen ones are known."""
    sizes = {"pruned": 8, "dense": 64, "adapter": 8, "frozen": 8}
    model = nn.ModuleDict({name: nn.Linear(size, size) for name, size in sizes.items()})
    with torch.no_grad():
        model["pruned"].get_parameter("weight")[:, ::2] = 0
        model["frozen"].get_parameter("weight")[:, ::2] = 0
        model["dense"].get_parameter("weight")[0, 0] = 0
        model["adapter"].get_parameter("weight").zero_()
        for each in model.values():
            each.get_parameter("bias").zero_()
    model["frozen"].requires_grad_(False)
    kept = niwaki.keep_zeros(model)
    assert (kept.zeros, kept.sparsity) == (64, 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)
    outputs = model["adapter"](x) + model["frozen"](model["pruned"](x)) + model["dense"](torch.randn(4, 64)).sum()
    outputs.sum().backward()
    optimizer.step()
    assert int((model["pruned"].get_parameter("weight") == 0).sum()) == 32
    assert int((model["dense"].get_parameter("weight") == 0).sum()) == 0
    assert bool((model["adapter"].get_parameter("weight") != 0).any())
    assert bool((model["pruned"].get_parameter("bias") != 0).any())
    kept.check()


def test_what_is_not_finite_there() -> None:
    """A gradient of a zero that is NaN harms nothing."""
    model = pruned_layers()
    niwaki.keep_zeros(model)
    weight = model[0].get_parameter("weight")
    (weight * torch.where(weight == 0, torch.nan, 1.0).detach()).sum().backward()
    assert weight.grad is not None
    assert bool(weight.grad.isfinite().all())


def test_removed_and_forgotten() -> None:
    """It can be ended, and does not keep a model in memory."""
    model = pruned_layers()
    with niwaki.keep_zeros(model) as kept:
        reference = weakref.ref(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    text = message(kept.check, OutputError)
    assert f"of {kept.zeros:,} zeros of the model are nonzero now, most of them in 0.weight" in text
    model = pruned_layers()
    niwaki.keep_zeros(model)
    reference = weakref.ref(model)
    del model, kept
    gc.collect()
    assert reference() is None
    optimizer.step()


def test_saved(tmp_path: Path) -> None:
    model = random_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        for value in filter(lambda value: value.ndim > 1, model.parameters()):
            value.mul_(torch.rand(value.shape) > 0.5)
    model.config.pruning_config = {"sparsity": 0.5}
    kept = niwaki.keep_zeros(model)
    model.save_pretrained(tmp_path)
    kept.check_saved(tmp_path)
    assert "pruning_config" in json.loads((tmp_path / "config.json").read_text())
    with torch.no_grad():
        model.get_parameter("lm_head.weight")[0] = 1
    model.save_pretrained(tmp_path)
    assert "says no longer that it is pruned" in message(lambda: kept.check_saved(tmp_path), OutputError)
    assert "pruning_config" not in json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "adapter").mkdir()
    said = message(lambda: kept.check_saved(tmp_path / "adapter"), CheckpointError)
    assert "give a directory that save_pretrained" in said
    (tmp_path / "adapter" / "adapter_model.safetensors").touch()
    kept.check_saved(tmp_path / "adapter")
    with torch.no_grad():  # as many as before, in other places
        model.get_parameter("lm_head.weight")[:2] = 1
        model.get_parameter("model.layers.0.mlp.up_proj.weight").zero_()
    model.save_pretrained(tmp_path)
    assert "has lost" in message(lambda: kept.check_saved(tmp_path), OutputError)


def test_frozen_and_trained_later() -> None:
    """Its zeros are kept, and its gradients masked, whoever has the result."""
    model = pruned_layers()
    before = zeros(model)
    model.requires_grad_(False)
    niwaki.keep_zeros(model)
    gc.collect()
    assert not any(value.requires_grad for value in model.parameters())
    model.requires_grad_(True)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for name, there in before.items():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        assert not bool(gradient[there].any())
    assert all(torch.equal(value, before[name]) for name, value in zeros(model).items())


def test_refused() -> None:
    wrong: Any
    for wrong in ("pruned", None, {}):
        assert "any module of torch" in message(lambda wrong=wrong: niwaki.keep_zeros(wrong), UsageError)  # type: ignore[misc]
    assert "no zeros to keep" in message(lambda: niwaki.keep_zeros(nn.Linear(4, 4)), UsageError)
    model = pruned_layers()
    niwaki.keep_zeros(model)
    model[0].weight = nn.Parameter(model[0].get_parameter("weight").detach().clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "call keep_zeros after what changes them" in message(optimizer.step, UsageError)


def test_compiled() -> None:
    model = pruned_layers(torch.float32)
    before = zeros(model)
    compiled = torch.compile(model, backend="aot_eager")
    niwaki.keep_zeros(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for seed in range(2):
        step(compiled, optimizer, seed, torch.float32)
    assert all(torch.equal(value, before[name]) for name, value in zeros(model).items())


def train(shards: bool) -> str:
    """In one of several processes: what came of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 5))
    first = model[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.weight.mul_(torch.rand(9, 12) > 0.6)
        first.weight[:5] = 0  # all of what one process has
    before = first.weight.detach() == 0
    trained: Any = (
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        if shards
        else nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    )
    kept = niwaki.keep_zeros(trained)
    assert kept.zeros == int(before.sum())
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1, weight_decay=0.1)
    for batch in range(3):
        drawing = torch.Generator().manual_seed(10 * batch + dist.get_rank())
        trained(torch.randn(4, 12, generator=drawing)).square().sum().backward()
        norm: Any = nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    kept.check()
    value: Any = first.weight.detach()
    value, norm = (each.full_tensor() if isinstance(each, DTensor) else each for each in (value, norm))
    assert torch.equal(value == 0, before)
    return f"norm {float(norm):.5f} sum {float(value.sum()):.5f}\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no forks")
def test_processes(tmp_path: Path) -> None:
    """With DDP and FSDP 2 the same, in two processes."""

    def work(rank: int) -> None:
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        sys.stdout.write(train(shards=False) + train(shards=True))
        dist.destroy_process_group()

    for running in [Running(partial(work, rank)) for rank in range(2)]:
        ended = running.ended()
        assert ended.code == 0, ended.err
        one, other = ended.out.splitlines()
        assert one == other
