"""A model's matrices in NVFP4 or MXFP4 as compressed-tensors rounds them: the scale of the largest weight, the nearest.

    python benchmarks/nearest_fp4.py MODEL OUT nvfp4

What ``niwaki quantize MODEL OUT nvfp4`` is compared with, by ``niwaki eval OUT --against MODEL``. OUT is a copy of
MODEL, with these numbers in its own dtype.
"""

import shutil
from pathlib import Path
from typing import Annotated, Any

import common
from compressed_tensors import compressors
from compressed_tensors.quantization import QuantizationScheme, quant_scheme, utils
from safetensors.torch import load_file, save_file
from typer import Argument

from niwaki.checkpoints.reading import SINGLE_NAME, Checkpoint
from niwaki.models.streamed import StreamedModel


def nearest(
    model: Annotated[Path, Argument(help="A directory with one file of weights.")],
    out: Annotated[Path, Argument(help="New.")],
    grid: Annotated[str, Argument(help="nvfp4 or mxfp4.")] = "nvfp4",
) -> None:
    """Rounds each matrix by itself."""
    found: Any = compressors
    weights_in = getattr(quant_scheme, f"{grid.upper()}A16")["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights_in)
    compressor = getattr(found, f"{grid.upper()}PackedCompressor")
    shutil.copytree(model, out)
    weights = load_file(out / SINGLE_NAME)
    for matrix in StreamedModel(Checkpoint(model), "cpu").matrices():
        W = weights[matrix.key].float()
        groups, shared = W.unflatten(1, (-1, weights_in.group_size)), {}
        if grid == "nvfp4":
            shared = {"weight_global_scale": utils.generate_gparam(W.min(), W.max()).reshape(1)}
        scales, _ = utils.calculate_qparams(
            groups.amin(2), groups.amax(2), weights_in, global_scale=shared.get("weight_global_scale")
        )
        stored = compressor.compress({"weight": W, "weight_scale": scales, **shared}, scheme)
        restored = compressor.decompress(stored, scheme)["weight"]
        weights[matrix.key] = restored.to(weights[matrix.key].dtype).contiguous()
    save_file(weights, out / SINGLE_NAME, {"format": "pt"})


if __name__ == "__main__":
    common.main(nearest, about=__doc__)
