"""What it costs that a model stays in its format: the embedded one in FP8, and in numbers and groups of MXFP4.

    python benchmarks/kept_format.py

No family that niwaki ships a model of comes in MXFP4, so there the rounding of --quantize is replaced by that of the
format, as it is and without its sweeps. Perplexity on demo-held; 6 runs, some minutes on one thread.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import niwaki
from niwaki import Calibration, Measurement
from niwaki.checkpoints.reading import SINGLE_NAME
from niwaki.layer.floats import E2M1, E4M3, Floats, TiledFloats
from niwaki.layer.problem import LayerProblem, Solution
from niwaki.layer.rounding import onto_floats
from niwaki.models.locate import locate_model

HELD = Measurement("demo-held", samples=100, length=256)
FP8 = TiledFloats(E4M3, (128, 128), torch.float32)
MXFP4 = TiledFloats(E2M1, (1, 32), None)


class _Rounded(Floats):
    """Numbers to which weights are rounded one by one."""

    is_coarse = False


def in_fp8(source: Path, out: Path) -> Path:
    """``source`` with its matrices in FP8, the largest weight of each block at the highest number."""
    shutil.copytree(source, out)
    stored: dict[str, Tensor] = {}
    for key, value in load_file(source / SINGLE_NAME).items():
        stored[key] = value
        if "_proj" in key:
            W, (down, across) = value.float(), FP8.tiles((value.shape[0], value.shape[1]))
            blocks = [[part.abs().max() for part in rows.split(128, 1)] for rows in W.split(128)]
            scales = torch.tensor(blocks).view(down, across) / E4M3.highest
            stored[key] = (W / FP8.factors(scales, W.shape)).to(torch.float8_e4m3fn)
            stored[f"{key}_scale_inv"] = scales
    save_file(stored, out / SINGLE_NAME, {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return out


def pruned(model: Path, out: Path, numbers: TiledFloats | None = None, **options: Any) -> str:
    """The perplexity of ``model`` at 50 %; in ``numbers``, in place of whole ones, if they are given."""

    def rounded(problem: LayerProblem, solution: Solution, *_: Any) -> tuple[Solution, Tensor]:
        assert numbers
        rows, columns = problem.W.shape
        return onto_floats(problem, solution, numbers, torch.zeros(numbers.tiles((rows, columns))))

    options |= {"calibration": Calibration("demo", samples=64, length=256), "measurement": HELD}
    if numbers is None:
        return niwaki.prune(model, out, 0.5, effort="fast", **options).perplexity["after"].figure
    with patch("niwaki.models.weight_format.onto_grid", rounded), patch("niwaki.models.weight_format.verify_grid"):
        return niwaki.prune(model, out, 0.5, effort="fast", quantize="int4:32", **options).perplexity["after"].figure


def main() -> None:
    """The command."""
    with tempfile.TemporaryDirectory() as name:
        place, demo = Path(name), locate_model("demo")
        dense = in_fp8(demo, place / "fp8")
        print("FP8, without the format", pruned(dense, place / "usual"))
        print("FP8, --keep-format", pruned(dense, place / "kept", keep_format=True))
        after = niwaki.evaluate(in_fp8(place / "usual", place / "afterwards"), HELD)
        print("FP8, nearest", after.figure)
        print("MXFP4, without the format", pruned(demo, place / "plain"))
        print("MXFP4, --keep-format", pruned(demo, place / "swept", MXFP4))
        print("MXFP4, nearest", pruned(demo, place / "nearest", dataclasses.replace(MXFP4, numbers=_Rounded(2, 1, 8))))


if __name__ == "__main__":
    main()
