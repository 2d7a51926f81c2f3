"""GGUF files in llama.cpp itself, by the package llama-cpp-python: the text that it writes, and how fast."""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from niwaki.checkpoints.gguf_header import checked_header
from niwaki.checkpoints.local import find_local
from niwaki.errors import CheckpointError, UsageError, first_line, raised_as
from niwaki.models.device import peak_memory
from niwaki.models.tokens import room_for_prompt
from niwaki.options import Compute
from niwaki.records.speed import Speed

#: Positions that a chat template may take.
_OF_TEMPLATE = 1024
#: How many seeds llama.cpp has.
_SEEDS = 2**32 - 1


def runnable(model: str | Path, compute: Compute) -> Path | None:
    """The GGUF file that ``model`` is, if llama.cpp is here to run it; None of others, and with a dtype, which is ours.

    CheckpointError where the file is damaged, which llama.cpp is not to find out. UsageError for a GPU that it does not
    compute on.
    """
    file = find_local(str(model))
    if file is None or file.is_dir() or compute.dtype != "auto":
        return None
    try:
        package()
    except UsageError:
        return None
    positions_of(file)  # which checks it
    if compute.device not in ("auto", "cpu") and device() == "cpu":
        raise UsageError("this llama-cpp-python was built without a GPU; leave the device out, or install another one")
    return file


def package() -> Any:
    """The package llama-cpp-python; UsageError where it is not there, or finds no library."""
    try:
        return importlib.import_module("llama_cpp")
    except Exception as error:  # it raises several kinds
        is_absent = isinstance(error, ImportError) and error.name == "llama_cpp"
        how = "pip install llama-cpp-python" if is_absent else f"llama-cpp-python fails: {first_line(error)}"
        raise UsageError(f"the speed of llama.cpp is measured by its package; {how}") from error


def absence() -> str:
    """Why a GGUF file that is not :func:`runnable` is run by niwaki."""
    try:
        package()
    except UsageError as error:
        return str(error)
    return "without a dtype it is measured in llama.cpp"


def device() -> str:
    """Where llama.cpp computes unless it is asked for the CPU."""
    return "cuda" if package().llama_supports_gpu_offload() else "cpu"


def positions_of(file: Path) -> float:
    """The most tokens that the model in a file takes; CheckpointError where the file is damaged.

    Of a large vocabulary a header takes half a second, so that it is read once while the file stays as it is.
    """
    stat = file.stat()
    return _positions(file, stat.st_ino, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=8)
def _positions(file: Path, *_: int) -> float:
    fields = checked_header(file)[0].fields
    return fields.get(f"{fields.get('general.architecture')}.context_length") or math.inf


def write(
    file: Path, prompt: str, raw: bool, device: str, say: Callable[[str], None] | None, echo: bool, **how: float
) -> str:
    """What llama.cpp writes, as :func:`niwaki.generate`; ``how`` are ``max_tokens``, ``temperature`` and ``seed``."""
    tokens, longest = int(how["max_tokens"]), positions_of(file)
    room_for_prompt(0, tokens, longest)  # which refuses what leaves none, before the file is loaded
    model = _opened(file, int(min(longest, len(prompt.encode()) + tokens + _OF_TEMPLATE)), device)
    # Nothing but what is asked for; the largest seed of 32 bits draws another one.
    how |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "seed": int(how["seed"]) % _SEEDS}
    is_message = "tokenizer.chat_template" in model.metadata and not raw
    given: str | list[int] = prompt
    if not is_message:
        ids = model.tokenize(prompt.encode(), add_bos=True, special=True)
        if len(ids) > (room := room_for_prompt(len(ids), tokens, longest)):
            given = ids[-int(room) :]
    before, made = iter([prompt] if echo and not is_message else []), list[str]()
    for piece in filter(None, _pieces(file, model, given, is_message, {**how, "stream": True})):
        made.append(piece)
        if say:
            say(next(before, "") + piece)
    return "".join(made)


def _pieces(file: Path, model: Any, prompt: str | list[int], is_message: bool, how: dict[str, Any]) -> Iterator[str]:
    with _errors(file):
        if is_message:
            for piece in model.create_chat_completion([{"role": "user", "content": prompt}], **how):
                yield piece["choices"][0]["delta"].get("content", "")
        else:
            for piece in model.create_completion(prompt, **how):
                yield piece["choices"][0]["text"]


def measure(file: Path, prompt: int, tokens: int, repeats: int, device: str) -> Speed:
    """The speed of llama.cpp in this process, as :func:`.bench.measure`."""
    began = time.perf_counter()
    model = _opened(file, prompt + tokens, device)
    loaded = time.perf_counter() - began
    with _errors(file):
        given = torch.randint(model.n_vocab(), (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
        first, rest = [], []
        for _ in range(repeats + 1):  # once to warm up
            model.reset()
            began = time.perf_counter()
            model.eval(given)
            token = model.sample(temp=0.0)
            middle = time.perf_counter()
            for _ in range(tokens - 1):
                model.eval([token])
                token = model.sample(temp=0.0)
            first.append(middle - began)
            rest.append((time.perf_counter() - middle) / (tokens - 1))
    size, peak = file.stat().st_size, peak_memory(torch.device("cpu"))["resident"]
    return Speed.of(("gguf", "llama.cpp"), (size, size, peak), loaded, first, rest)


def _opened(file: Path, positions: int, device: str) -> Any:
    threads = torch.get_num_threads()
    how = {"n_threads": threads, "n_threads_batch": threads, "n_gpu_layers": 0 if device == "cpu" else -1}
    with _errors(file):
        return package().Llama(str(file), n_ctx=positions, verbose=False, **how)


def _errors(file: Path) -> AbstractContextManager[None]:
    return raised_as(CheckpointError, f"llama.cpp does not run {file}")
