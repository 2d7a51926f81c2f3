"""Seconds per block of a large model by stage, next to what plain products of those sizes cost, and peak memory.

    python scripts/random_checkpoint.py big --like llama-2-7b
    python benchmarks/block_time.py big --samples 32 --memory 4GiB --solvers wanda sparsegpt admm-grad continuation
    python benchmarks/block_time.py big --device cuda --samples 128       # on a machine with a GPU
    python benchmarks/block_time.py two-blocks --solvers continuation@balanced --of 32

Each solver, at the effort after "@" or else fast, prunes the first --blocks blocks in a process of its own. A capture
pass is a forward pass and the Gram matrices; the floors are the floating-point operations of each stage over the rate
of plain products of the same shapes, measured in the same run; other efforts do more than these count. The last line of
each solver predicts the time for the whole model, of --of blocks. The text is the embedded model's, repeated as needed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.layer.products import products
from niwaki.texts.sources import read_text

TOKENS = 4096  # that go through a block at a time


def rates(shape: dict[str, Any], device: str, dtype: torch.dtype) -> dict[str, float]:
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


def operations(shape: dict[str, Any], tokens: int, length: int) -> dict[str, float]:
    """Floating-point operations of a block of the LLaMA family: a forward pass and all Gram matrices."""
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    keys = hidden * shape["num_key_value_heads"] // heads
    weights = 2 * hidden**2 + 2 * hidden * keys + 3 * hidden * inner
    return {
        "forward": tokens * (2.0 * weights + 4.0 * length * hidden),
        "gram": 2.0 * tokens * (3 * hidden**2 + inner**2),
    }


def text(tokens: int) -> str:
    """At least so many: the embedded model's text, some 100,000 tokens or fewer in other vocabularies, repeated."""
    return "".join(read_text("demo").pieces) * math.ceil(tokens / 50_000)


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--solvers", nargs="*", default=["wanda", "sparsegpt", "admm-grad", "continuation"])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--of", type=int, help="blocks of the whole model; by default those of MODEL")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--memory", help="for niwaki prune")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    shape = Checkpoint(arguments.model).config
    usual = "float32" if arguments.device == "cpu" else "bfloat16"
    dtype = getattr(torch, usual if arguments.dtype == "auto" else arguments.dtype)
    speed = rates(shape, arguments.device, dtype)
    print(", ".join(f"{name} {value / 1e9:,.0f} GFLOP/s" for name, value in speed.items()), "in plain products")
    needed = operations(shape, arguments.samples * arguments.length, arguments.length)
    results = []
    for solver in arguments.solvers:
        with tempfile.TemporaryDirectory(dir=arguments.model.parent) as scratch:
            name, _, effort = solver.partition("@")
            calibration = Path(scratch, "text.txt")
            calibration.write_text(text(arguments.samples * arguments.length), encoding="utf-8")
            command = [sys.executable, "-m", "niwaki", "prune", arguments.model, f"{scratch}/out"]
            command += ["--solver", name, "--effort", effort or "fast"]
            command += ["--sparsity", 0.6, "--blocks", f"0:{arguments.blocks}"]
            command += ["--calibration", calibration, "--samples", arguments.samples, "--length", arguments.length]
            command += ["--text-samples", 0, "--device", arguments.device, "--dtype", arguments.dtype]
            command += ["--max-memory", arguments.memory] if arguments.memory else []
            subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)
            record = json.loads(Path(f"{scratch}/out/niwaki.json").read_text())
        spent = {name: value / arguments.blocks for name, value in record["seconds"].items()}
        # The last of the blocks is not run again for its outputs.
        spent["advance"] *= arguments.blocks / max(1, arguments.blocks - 1)
        floors = {
            "capture": needed["forward"] / speed["forward"] + needed["gram"] / speed["gram"],
            "advance": needed["forward"] / speed["forward"],
            "solve": record["flops"] / arguments.blocks / speed["solve"],
        }
        stages = [stage for stage in ("plan", "read", "capture", "solve", "advance", "fit", "write") if stage in spent]
        block = math.fsum(spent[name] for name in stages)
        print(
            f"{solver}: {block:.2f} s a block, peak memory "
            + ", ".join(f"{size / 2**30:.2f} GiB {where}" for where, size in record["peak_memory"].items())
        )
        for name in stages:
            line = f"  {name:8s} {spent[name]:8.2f} s"
            if name in floors:
                line += f"   {floors[name]:8.2f} s in plain products: {spent[name] / floors[name]:.2f}"
            print(line)
        # Blocks that are not pruned are copied in the end, which "write" has too.
        there = shape["num_hidden_layers"]
        blocks = arguments.of or there
        whole = blocks * (block - spent["write"] + record["seconds"]["write"] / there)
        print(f"  {blocks} blocks: {whole:,.0f} s", flush=True)
        peak = record["peak_memory"]
        results.append({"solver": solver, "block": spent, "floors": floors, "whole": whole, "record": peak})
        sizes = {"samples": arguments.samples, "length": arguments.length, "blocks": blocks}
        common.save(arguments.record, rates=speed, **sizes, results=results)


if __name__ == "__main__":
    main()
