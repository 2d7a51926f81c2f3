"""Seconds per block of a large model by stage, next to what plain products of those sizes cost, and peak memory.

python scripts/random_checkpoint.py big --like llama-2-7b
python benchmarks/large.py big --samples 32 --max-memory 4GiB --solvers wanda,sparsegpt,admm-grad,continuation
python benchmarks/large.py big --device cuda --samples 128       # on a machine with a GPU
python benchmarks/large.py two-blocks --solvers continuation@balanced --of 32
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from common import Cell, Device, Length, Model, Record, Samples, names
from torch import Tensor
from typer import Option

from niwaki.checkpoints.reading import Checkpoint
from niwaki.layer.linalg import products
from niwaki.texts.sources import read_text

#: That go through a block at a time.
TOKENS = 4096
STAGES = ("plan", "read", "capture", "solve", "advance", "fit", "write")


def large(
    model: Model,
    solvers: common.Solvers = "wanda,sparsegpt,admm-grad,continuation",
    samples: Samples = 32,
    length: Length = 2048,
    blocks: Annotated[int, Option(help="How many are pruned.")] = 2,
    of: Annotated[int | None, Option(help="Blocks of the whole model; by default those of MODEL.")] = None,
    device: Device = "cpu",
    dtype: Annotated[str, Option(help="As in niwaki prune.")] = "auto",
    max_memory: Annotated[str, Option(help="Likewise.")] = "",
    record: Record = None,
) -> None:
    """Seconds per block of a large model by stage, next to what plain products of those sizes cost, and peak memory.

    Each solver, at the effort after "@" or else fast, prunes the first blocks in a process of its own. A capture pass
    is a forward pass and the Gram matrices; the floors are the floating-point operations of each stage over the rate of
    plain products of the same shapes, measured in the same run; other efforts do more than these count. The last line
    of each solver predicts the time for the whole model. The text is the embedded model's, repeated as needed.
    """
    shape = Checkpoint(model).config
    usual = "float32" if device == "cpu" else "bfloat16"
    speed = _rates(shape, device, getattr(torch, usual if dtype == "auto" else dtype))
    print(", ".join(f"{name} {value / 1e9:,.0f} GFLOP/s" for name, value in speed.items()), "in plain products")
    needed = _operations(shape, samples * length, length)
    there = shape["num_hidden_layers"]
    results = []
    options = ["--samples", samples, "--length", length, "--device", device, "--dtype", dtype]
    options += ["--max-memory", max_memory] if max_memory else []
    for solver in names(solvers):
        made = _pruned(model, solver, blocks, samples * length, [*map(str, options)])
        spent = {name: value / blocks for name, value in made["seconds"].items()}
        spent["advance"] *= blocks / max(1, blocks - 1)  # the last of the blocks is not run again for its outputs
        floors = {
            "capture": needed["forward"] / speed["forward"] + needed["gram"] / speed["gram"],
            "advance": needed["forward"] / speed["forward"],
            "solve": made["flops"] / blocks / speed["solve"],
        }
        block = math.fsum(spent[name] for name in STAGES if name in spent)
        # Blocks that are not pruned are copied in the end, which "write" has too.
        whole = (of or there) * (block - spent["write"] + made["seconds"]["write"] / there)
        _show(solver, block, spent, floors, made["peak_memory"])
        print(f"  {of or there} blocks: {whole:,.0f} s", flush=True)
        peak = made["peak_memory"]
        results.append({"solver": solver, "block": spent, "floors": floors, "whole": whole, "record": peak})
        sizes = {"samples": samples, "length": length, "blocks": of or there}
        common.save(record, rates=speed, **sizes, results=results)


def _pruned(model: Path, solver: str, blocks: int, tokens: int, options: list[str]) -> Any:
    """The record of niwaki prune, as a process of its own."""
    name, _, effort = solver.partition("@")
    with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
        calibration, out = Path(scratch, "text.txt"), Path(scratch, "out")
        # The embedded model's text has some 100,000 tokens, or fewer in other vocabularies.
        calibration.write_text("".join(read_text("demo").pieces) * math.ceil(tokens / 50_000), encoding="utf-8")
        command = [sys.executable, "-m", "niwaki", "prune", str(model), str(out), "--solver", name]
        command += ["--effort", effort or "fast", "--sparsity", "0.6", "--blocks", f"0:{blocks}"]
        command += ["--calibration", str(calibration), "--text-samples", "0", *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads((out / "niwaki.json").read_text())


def _rates(shape: Cell, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Floating-point operations in a second of plain products: of a forward pass, a Gram matrix, a solver."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]

    def rate(A: Tensor, B: Tensor) -> float:
        C = A @ B

        def product() -> None:
            torch.matmul(A, B, out=C)
            if device != "cpu":
                torch.cuda.synchronize()

        product()
        return 2.0 * A.shape[0] * A.shape[1] * B.shape[1] / min(common.seconds(product) for _ in range(3))

    X = torch.randn(TOKENS, hidden, device=device)
    with products(tf32=False):  # the library that the run asks, too
        return {
            "forward": rate(X.to(dtype), torch.randn(inner, hidden, device=device).to(dtype).T),
            "gram": rate(X.T, X),
            "solve": rate(X[:hidden], torch.randn(hidden, hidden, device=device)),
        }


def _operations(shape: Cell, tokens: int, length: int) -> dict[str, float]:
    """Floating-point operations of a block of the LLaMA family: a forward pass and all Gram matrices."""
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    keys = hidden * shape["num_key_value_heads"] // heads
    weights = 2 * hidden**2 + 2 * hidden * keys + 3 * hidden * inner
    return {
        "forward": tokens * (2.0 * weights + 4.0 * length * hidden),
        "gram": 2.0 * tokens * (3 * hidden**2 + inner**2),
    }


def _show(solver: str, block: float, spent: dict[str, float], floors: dict[str, float], memory: dict[str, int]) -> None:
    peak = ", ".join(f"{size / 2**30:.2f} GiB {where}" for where, size in memory.items())
    print(f"{solver}: {block:.2f} s a block, peak memory {peak}")
    for name in STAGES:
        if name in spent:
            line = f"  {name:8s} {spent[name]:8.2f} s"
            if name in floors:
                line += f"   {floors[name]:8.2f} s in plain products: {spent[name] / floors[name]:.2f}"
            print(line)


if __name__ == "__main__":
    common.main(large, about=__doc__)
