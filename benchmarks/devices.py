"""The same runs on the CPU and on another device: how far results differ, and what each takes.

    python benchmarks/devices.py --device cuda --record devices.json

The model that ships with niwaki is pruned by several methods, shrunk and healed, in float32. Devices add in another
order, so some weights change places with others that count as much; perplexities are to agree. Then products of the
device with packed weights and, on a GPU, with 2:4 weights in half precision are compared with dense ones in float32 on
the CPU. The exit status is 1 if a perplexity differs by more than 2 % or logits by more than 3 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from safetensors.torch import load_file
from torch import Tensor

import niwaki
from niwaki import Calibration, Compute, Measurement, Record
from niwaki.models.locate import locate_model
from niwaki.models.tokens import load_tokenizer
from niwaki.texts.reading import read_windows

#: How far they may be apart, relative.
PERPLEXITIES, LOGITS = 0.02, 0.03
RUNS = ("wanda", "continuation", "admm-grad", "int8", "balanced", "heal", "shrink")


def run(name: str, directory: Path, device: str, arguments: argparse.Namespace) -> Record:
    """One of ``RUNS``, into ``directory`` / ``name``."""
    out, calibration = directory / name, Calibration("demo", samples=arguments.samples, length=arguments.length)
    usual: dict[str, Any] = {"measurement": Measurement("demo-held", samples=16), "compute": Compute(device, "float32")}
    prune: Callable[..., Record] = partial(niwaki.prune, "demo", out, calibration=calibration, **usual)
    match name:
        case "admm-grad":
            return prune("2:4", solver="admm-grad")
        case "int8":
            return prune(0.5, solver="sparsegpt", quantize="int8")
        case "balanced":  # without text of the model's own, for which devices draw other numbers
            return prune(0.5, effort="balanced:synthetic=0")
        case "heal":
            texts = Calibration("demo", length=arguments.length)
            return niwaki.heal(directory / "wanda", out, "demo", tokens=arguments.tokens, calibration=texts, **usual)
        case "shrink":
            return niwaki.shrink("demo", out, neurons=0.25, calibration=calibration, **usual)
        case _:
            return prune(0.5, solver=name)


def weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a model."""
    return {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}


def compared(name: str, cpu: Path, other: Path, records: tuple[Record, Record]) -> dict[str, Any]:
    """Perplexities, times, and how far weights agree."""
    first, second = (weights(path / name) for path in (cpu, other))
    matrices = [(first[key].float(), second[key].float()) for key in first if first[key].ndim == 2]
    agree = sum(int(((a == 0) == (b == 0)).sum()) for a, b in matrices)
    ours, theirs = (record.perplexity["after"].value for record in records)
    return {
        "name": name,
        "perplexity": [ours, theirs],
        "difference": abs(theirs / ours - 1),
        "zeros_agree": agree / sum(a.numel() for a, _ in matrices),
        "mean_error": [record.mean_error for record in records],
        "seconds": [record.seconds["total"] for record in records],
    }


@torch.inference_mode()
def products(directory: Path, device: str) -> Iterator[dict[str, Any]]:
    """Logits after a prompt, and after one more token, of packed and of 2:4 models."""
    tokens = read_windows("demo-held", load_tokenizer(locate_model("demo")), 65, 1).tokens
    for name in ("wanda", "int8", "admm-grad"):
        if not (directory / name).exists():
            continue
        niwaki.pack(directory / name, directory / f"{name}-packed")
        forms = [(f"{name}-packed", dtype, False) for dtype in ("float32", "bfloat16")]
        if device != "cpu" and name == "admm-grad":
            forms.append((name, "float16", True))
        right = niwaki.load(directory / name, "cpu", "float32")(tokens).logits[0, -2:].double()
        for form, dtype, two_four in forms:
            model = niwaki.load(directory / form, device, dtype, two_four=two_four)
            prompt = model(tokens[:, :-1].to(device), use_cache=True)
            token = model(tokens[:, -1:].to(device), past_key_values=prompt.past_key_values)
            found = torch.stack([prompt.logits[0, -1], token.logits[0, -1]]).cpu().double()
            error = float((found - right).norm() / right.norm())
            yield {"name": form + " as 2:4" * two_four, "dtype": dtype, "difference": error}


def main() -> int:
    """Runs, prints, writes JSON; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="heal needs wanda before it")
    parser.add_argument("--samples", type=int, default=32, help="windows to calibrate on")
    parser.add_argument("--length", type=int, default=128, help="tokens in a window")
    parser.add_argument("--tokens", default="50k", help="to heal on")
    parser.add_argument("--record", type=Path, help="write JSON there")
    arguments = parser.parse_args()
    models: list[dict[str, Any]] = []
    logits: list[dict[str, Any]] = []

    def save() -> None:
        common.save(arguments.record, device=arguments.device, models=models, logits=logits)

    with tempfile.TemporaryDirectory() as scratch:
        cpu, other = Path(scratch, "cpu"), Path(scratch, "other")
        for name in arguments.runs:
            records = run(name, cpu, "cpu", arguments), run(name, other, arguments.device, arguments)
            models.append(found := compared(name, cpu, other, records))
            print(
                "{name}: perplexity {perplexity[0]:.3f} and {perplexity[1]:.3f}, {zeros_agree:.3%} of zeros agree, "
                "{seconds[0]:.1f} and {seconds[1]:.1f} s".format(**found),
                flush=True,
            )
            save()
        for found in products(other, arguments.device):
            logits.append(found)
            print("{name}, {dtype}: logits differ by {difference:.1e}".format(**found), flush=True)
            save()
    limits = [(found, PERPLEXITIES) for found in models] + [(found, LOGITS) for found in logits]
    far = [found["name"] for found, limit in limits if not found["difference"] <= limit]  # NaN is, too
    print(f"too far apart: {', '.join(far)}" if far else "the devices agree")
    return int(bool(far))


if __name__ == "__main__":
    sys.exit(main())
