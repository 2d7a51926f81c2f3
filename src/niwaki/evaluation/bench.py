"""How fast a model writes and how much memory it takes, dense and packed: ``niwaki bench``."""

import contextlib
import inspect
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from niwaki.arguments import checked
from niwaki.checkpoints.reading import ORIGIN
from niwaki.choices import BRIEFLY, LONG, SPINS
from niwaki.errors import UnsupportedModelError, UsageError, WorkerError
from niwaki.evaluation import llama_cpp
from niwaki.models.device import find_device, peak_memory
from niwaki.models.locate import check_continues, locate_model
from niwaki.models.structure import read_config
from niwaki.options import Compute, check_count
from niwaki.packed import kernels
from niwaki.packed.decoding import CACHES, one_by_one
from niwaki.packed.format import INDEX, open_checkpoint
from niwaki.packed.load import load
from niwaki.packed.pack import check_packable, pack, unpack
from niwaki.records.progress import Progress
from niwaki.records.record import versions
from niwaki.records.speed import Speed, SpeedRecord
from niwaki.runs.stage import current_session


@checked
def bench(
    model: str | Path,
    *,
    prompt_tokens: int = 128,
    tokens: int = 32,
    repeats: int = 3,
    compute: Compute | str = Compute(),
    progress: Progress | None = None,
) -> SpeedRecord:
    """Measures the speed and memory of a model in its dense and packed forms, each in a process of its own.

    The dense form runs in transformers. If no matrix would be smaller packed, as in a model that is not pruned, only
    the dense form is measured. A GGUF file runs in llama.cpp, if llama-cpp-python is installed and no dtype is given.
    After a prompt of random tokens, ``tokens`` are generated ``repeats`` times; the medians count. A form that does not
    exist is made in a temporary directory, which takes as much space as its files.

    Args:
        model: A directory or hub id, dense or packed.
        prompt_tokens: Tokens in the prompt.
        tokens: Tokens to generate after it, at least 2.
        repeats: Repetitions, after one to warm up.
        compute: The device, and a dtype as for :func:`niwaki.load`; ``tf32`` and ``max_memory`` are not used.
        progress: Receives the progress of the measurement.

    Returns:
        The speed, memory and size on disk of each form.

    Raises:
        UsageError: a number is out of range.
        NiwakiError: see :mod:`niwaki.errors`.
    """
    for name, count, least in (("prompt_tokens", prompt_tokens, 1), ("tokens", tokens, 2), ("repeats", repeats, 1)):
        check_count(name, count, least)
    compute, progress = Compute.of(compute), progress or Progress()
    compute.only("bench", "device", "dtype")
    numbers = (prompt_tokens, tokens, repeats)
    with _forms(model, prompt_tokens, tokens, compute, progress) as forms:
        speeds = []
        for name, directory in forms.items():
            progress.status(f"measuring the {name} model")
            speeds.append(measured(directory, *numbers, compute))
    found = llama_cpp.device() if "GGUF" in forms else find_device("auto").type
    device = compute.device if compute.device != "auto" else found
    threads, command = torch.get_num_threads(), current_session().command
    return SpeedRecord(str(model), *numbers, device, threads, kernels.describe(), command, speeds, versions())


def check_positions(longest: float, prompt: int, tokens: int) -> None:
    """UsageError where a prompt and an answer are longer than the positions of a model."""
    if prompt + tokens > longest:
        raise UsageError(f"{prompt} + {tokens} tokens are more than the {longest} positions of the model")


def positions_of(config: PreTrainedConfig) -> float:
    """The most tokens that a model takes."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


@contextlib.contextmanager
def _forms(
    model: str | Path, prompt: int, tokens: int, compute: Compute, progress: Progress
) -> Iterator[dict[str, Path]]:
    """The model's directory by form: "dense", and "packed" if it can be; the file of one that llama.cpp runs."""
    if file := llama_cpp.runnable(model, compute):
        check_positions(llama_cpp.positions_of(file), prompt, tokens)
        yield {"GGUF": file}
        return
    name, path = str(model), locate_model(str(model))
    check_continues(open_checkpoint(path), "bench")
    check_positions(positions_of(read_config(path)), prompt, tokens)
    if (path / ORIGIN).exists():
        own = "weights of a GGUF file are measured as transformers and niwaki hold them"
        progress.note(f"{own}; {llama_cpp.absence()}")
    packed, is_alone = (path / INDEX).exists(), False
    if not packed:
        progress.status("looking for zeros")
        try:
            check_packable(path, name)
        except (UsageError, UnsupportedModelError) as error:
            progress.note(f"only the dense model is measured: {error}")
            is_alone = True
    if is_alone:
        yield {"dense": path}
        return
    with tempfile.TemporaryDirectory(prefix="niwaki-bench-") as scratch:
        other = Path(scratch) / path.name
        progress.status("unpacking" if packed else "packing")
        (unpack if packed else pack)(path, other)
        yield {"dense": other, "packed": path} if packed else {"dense": path, "packed": other}


def measured(directory: Path, *asked: Any) -> Speed:
    """:func:`measure` in a process that has done nothing else, whose threads wait as those of ``niwaki generate``.

    It is not one of multiprocessing's, which would run the caller's script again.
    """
    with tempfile.TemporaryDirectory(prefix="niwaki-bench-") as scratch:
        file = Path(scratch) / "answer"  # not standard output, on which libraries may print
        command = [sys.executable, "-P", "-m", __name__, str(file)]
        # Of a group of its own it does not hear Ctrl-C, of which it would say much; this process does, and ends it.
        started = subprocess.Popen(command, stdin=subprocess.PIPE, env=_environment(), process_group=0)  # noqa: S603
        with started as process:
            try:
                process.communicate(pickle.dumps((directory, *asked)))
            finally:
                process.kill()
        if process.returncode:
            how = f"ended with status {process.returncode}; is there enough memory?"
            raise WorkerError(f"the process that measured {directory} {how}")
        answer: Speed | Exception = pickle.loads(file.read_bytes())  # noqa: S301  # niwaki's own
    if isinstance(answer, Exception):
        raise answer
    return answer


def _environment() -> dict[str, str]:
    """The environment of a process that finds what this one finds; its threads wait long, unless the user chose."""
    spins = os.environ.get(SPINS, BRIEFLY)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), SPINS: LONG if spins == BRIEFLY else spins}


@torch.inference_mode()
def measure(directory: Path, prompt: int, tokens: int, repeats: int, compute: Compute) -> Speed:
    """The speed of the model in this process."""
    if directory.is_file():
        return llama_cpp.measure(directory, prompt, tokens, repeats, compute.device)
    packed = (directory / INDEX).exists()
    began = time.perf_counter()
    model: Any = load(directory, compute.device, compute.dtype)
    loaded = _now(model) - began
    config = model.config.get_text_config()
    given = torch.randint(config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0)).to(model.device)
    names = inspect.signature(model.forward).parameters
    cache = next((name for name in CACHES if name in names), CACHES[-1])
    first, rest = [], []
    for _ in range(repeats + 1):  # once to warm up
        began = _now(model)
        out = model(input_ids=given, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(dim=-1)
        middle = _now(model)
        kernels.time_in_products(counts=True)
        for _ in range(tokens - 1):
            out = model(input_ids=token, **{cache: getattr(out, cache)}, use_cache=True)
            token = out.logits[:, -1:].argmax(dim=-1)
        first.append(middle - began)
        rest.append((_now(model) - middle) / (tokens - 1))
        products = kernels.time_in_products(counts=False) / (tokens - 1) / rest[-1] / torch.get_num_threads()
    peaks = peak_memory(model.device)
    parts = {id(value): value.nbytes for value in [*model.parameters(), *model.buffers()]}
    form = "packed" if packed else "dense", str(model.dtype).removeprefix("torch.")
    disk = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    sizes = disk, sum(parts.values()), peaks.get("device", peaks["resident"])
    speed, read = Speed.of(form, sizes, loaded, first, rest), _read_for_a_token(model)
    return replace(speed, one_by_one=one_by_one(model), read=read, products=min(1.0, products))


def _read_for_a_token(model: Any) -> int:
    """Bytes of all weights but those of token embeddings that are not the head too; 0 for mixtures of experts."""
    if any("experts" in name for name, _ in model.named_modules()):
        return 0
    tensors = {value.data_ptr(): value.nbytes for value in [*model.parameters(), *model.buffers()]}
    embeddings, head = (
        {value.data_ptr() for value in [*end.parameters(), *end.buffers()]} if end else set()
        for end in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    return sum(size for place, size in tensors.items() if place not in embeddings - head)


def _now(model: Any) -> float:
    """The time, when all that the model was to compute is computed."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


if __name__ == "__main__":
    try:
        answer: Speed | Exception = measure(*pickle.load(sys.stdin.buffer))  # noqa: S301  # niwaki's own
    except Exception as error:
        answer = error
    Path(sys.argv[1]).write_bytes(pickle.dumps(answer))
