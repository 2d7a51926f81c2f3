"""What a GPU does with pruned matrices: times of products, whether results agree, and the kernel's instructions.

python benchmarks/gpu.py decode --record gpu.json                     # needs a GPU with CUDA
python benchmarks/gpu.py decode --sizes 4096x4096 --sparsities 0.5 --batches 1,2 --dtype bfloat16
python benchmarks/gpu.py devices --device cuda --record devices.json
python benchmarks/gpu.py instructions --record benchmarks/results/gpu_instructions.json    # needs no GPU
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from common import Cell, Device, Length, Rounds, Samples, Sizes, Sparsities, fractions, integers, names
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear
from typer import Exit, Option

import niwaki
from niwaki import Calibration, Compute, Measurement, Record
from niwaki.models.locate import locate_model
from niwaki.models.tokens import load_tokenizer
from niwaki.packed.decoding import CACHES
from niwaki.packed.matrix import pack
from niwaki.texts.texts import read_windows

#: How far two devices may be apart, relative.
PERPLEXITIES, LOGITS = 0.02, 0.03
RUNS = ("wanda", "continuation", "admm-grad", "int8", "balanced", "heal", "shrink")
ALL_RUNS = ",".join(RUNS)
SPARSE = ("packed", "2:4")
#: To a turn of the kernel's loop, for each lane.
POSITIONS = 64


class Clock:
    """Times of single runs on the GPU, with nothing of what they read in its caches."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        size = torch.cuda.get_device_properties(0).L2_cache_size
        self._filler = torch.empty(max(4 * size, 1 << 29), dtype=torch.uint8, device="cuda")

    def seconds(self, run: Callable[[], Tensor]) -> float:
        """The median, without what Python and torch need to launch it."""
        for _ in range(10):  # compiles, and lets the clock rate rise
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.rounds)]
        for before, after in marks:
            self._filler.zero_()
            before.record()
            graph.replay()
            after.record()
        torch.cuda.synchronize()
        return statistics.median(float(before.elapsed_time(after)) for before, after in marks) / 1e3

    def launched(self, run: Callable[[], Tensor]) -> float:
        """Seconds of one of many runs from Python, one after the other: what is felt where tokens are generated."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(self.rounds):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / self.rounds

    def bandwidth(self) -> float:
        """Bytes a second, read and written, of copying a large tensor."""
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))


def _pruned(rows: int, columns: int, sparsity: float, dtype: torch.dtype) -> Tensor:
    """Random weights, each 0 with that probability; on the CPU."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(rows, columns, generator=generator)
    return W.masked_fill_(torch.rand(rows, columns, generator=generator) < sparsity, 0).to(dtype)


def _kinds(
    kinds: list[str], rows: int, columns: int, sparsities: list[float], dtype: torch.dtype
) -> Iterator[tuple[str, float, int, Callable[[Tensor], Tensor], Tensor]]:
    """(name, sparsity, its bytes, product, the dense matrix) of each kind, one after the other."""
    from niwaki.packed.gpu import multiply

    W = _pruned(rows, columns, 0, dtype).cuda()
    yield "dense", 0.0, W.nbytes, lambda x: linear(x, W), W
    for sparsity in sparsities if "packed" in kinds else []:
        zeros = _pruned(rows, columns, sparsity, dtype)
        packed = pack(zeros).to(torch.device("cuda", 0))
        yield "packed", sparsity, packed.nbytes, partial(multiply, packed), zeros.cuda()
    if "2:4" not in kinds:
        return
    # The first and the last of every four.
    fours = (W.unflatten(1, (-1, 4)) * torch.tensor([1, 0, 0, 1], device=W.device, dtype=W.dtype)).flatten(1)
    sparse = torch.sparse.to_sparse_semi_structured(fours)
    size = fours.nbytes // 2 + fours.numel() // 8 * 2  # half of the values, and 2 bits of place for each of these
    yield "2:4", 0.5, size, lambda x: linear(x, sparse), fours


def decode(
    sizes: Sizes = "4096x11008,11008x4096,8192x28672",
    sparsities: Sparsities = "0.5,0.7,0.8",
    batches: Annotated[str, Option(help="Numbers of vectors.")] = "1,4,16",
    kinds: Annotated[str, Option(help="Beside dense matrices.")] = ",".join(SPARSE),
    dtype: Annotated[Literal["float16", "bfloat16"], Option(help="Of weights and vectors.")] = "float16",
    rounds: Rounds = 101,
    record: common.Record = None,
) -> None:
    """Products of a few vectors with pruned matrices on a GPU: dense, packed, and 2:4.

    Times are medians between CUDA events around one product, replayed from a CUDA graph, with the second-level cache
    emptied before each; "launched" is one of many from Python, with what Python and torch need for it. "dense" is
    F.linear. GB/s counts the bytes that a product has to read and write once, and the share is that of the rate of
    copying a large tensor, measured in the same run. 2:4 is a matrix of its own at 50 % zeros; torch pads few vectors
    to 8 for it.
    """
    if not torch.cuda.is_available():
        sys.exit("decode needs a GPU with CUDA, and torch finds none here")
    compared, clock, kind_of_number = common.chosen(kinds, SPARSE), Clock(rounds), getattr(torch, dtype)
    bandwidth, gpu = clock.bandwidth(), torch.cuda.get_device_name()
    print(f"{gpu}, copies at {bandwidth / 1e9:,.0f} GB/s, {dtype}\n")
    heads = f"{'':>14} {'zeros':>6} {'vectors':>8} {'us':>8} {'launched':>9} {'GB/s':>7} {'share':>6}"
    print(f"{heads} {'dense/this':>11} {'error':>8}")
    results = []
    for size in names(sizes):
        rows, columns = common.shape_of(size)
        dense: dict[int, float] = {}
        print(f"{rows} x {columns}")
        for kind, sparsity, moved, product, W in _kinds(compared, rows, columns, fractions(sparsities), kind_of_number):
            for batch in integers(batches):
                x = torch.randn(batch, columns, device="cuda").to(kind_of_number)
                right = x.double() @ W.double().T
                error = float((product(x).double() - right).norm() / right.norm())
                took, launched = clock.seconds(partial(product, x)), clock.launched(partial(product, x))
                if kind == "dense":
                    dense[batch] = took
                rate = (moved + x.nbytes + batch * rows * x.itemsize) / took
                print(
                    f"{kind:>14} {sparsity:6.0%} {batch:8} {1e6 * took:8.1f} {1e6 * launched:9.1f} "
                    f"{rate / 1e9:7.0f} {rate / bandwidth:6.0%} {dense[batch] / took:11.2f} {error:8.1e}",
                    flush=True,
                )
                case = {"shape": size, "kind": kind, "sparsity": sparsity, "batch": batch}
                case |= {"seconds": took, "launched": launched}
                case |= {"bytes": moved, "bytes_per_second": rate, "share": rate / bandwidth}
                results.append(case | {"dense_over_this": dense[batch] / took, "error": error})
    common.save(record, gpu=gpu, bandwidth=bandwidth, dtype=dtype, results=results)


def devices(
    device: Device = "cuda",
    runs: Annotated[str, Option(help="heal needs wanda before it.")] = ALL_RUNS,
    samples: Samples = 32,
    length: Length = 128,
    tokens: Annotated[str, Option(help="To heal on.")] = "50k",
    record: common.Record = None,
) -> None:
    """The same runs on the CPU and on another device: how far results differ, and what each takes.

    The model that ships with niwaki is pruned by several methods, shrunk and healed, in float32. Devices add in another
    order, so some weights change places with others that count as much; perplexities are to agree. Then products of the
    device with packed weights and, on a GPU, with 2:4 weights in half precision are compared with dense ones in float32
    on the CPU. The exit status is 1 if a perplexity differs by more than 2 % or logits by more than 3 %.
    """
    models: list[Cell] = []
    logits: list[Cell] = []
    calibration = Calibration("demo", samples=samples, length=length)
    with tempfile.TemporaryDirectory() as scratch:
        cpu, other = Path(scratch, "cpu"), Path(scratch, "other")
        for name in common.chosen(runs, RUNS):
            records = [_run(name, folder, at, calibration, tokens) for folder, at in ((cpu, "cpu"), (other, device))]
            models.append(found := _compared(name, cpu, other, records))
            print(
                "{name}: perplexity {perplexity[0]:.3f} and {perplexity[1]:.3f}, {zeros_agree:.3%} of zeros agree, "
                "{seconds[0]:.1f} and {seconds[1]:.1f} s".format(**found),
                flush=True,
            )
            common.save(record, device=device, models=models, logits=logits)
        for found in _logits(other, device):
            logits.append(found)
            print("{name}, {dtype}: logits differ by {difference:.1e}".format(**found), flush=True)
            common.save(record, device=device, models=models, logits=logits)
    limits = [(found, PERPLEXITIES) for found in models] + [(found, LOGITS) for found in logits]
    far = [found["name"] for found, limit in limits if not found["difference"] <= limit]  # NaN is, too
    print(f"too far apart: {', '.join(far)}" if far else "the devices agree")
    raise Exit(int(bool(far)))


def _run(name: str, directory: Path, device: str, calibration: Calibration, tokens: str) -> Record:
    """One of ``RUNS``, into ``directory`` / ``name``."""
    out = directory / name
    usual: dict[str, Any] = {"measurement": Measurement("demo-held", samples=16), "compute": Compute(device, "float32")}
    prune: Callable[..., Record] = partial(niwaki.prune, "demo", out, calibration=calibration, **usual)
    match name:
        case "admm-grad":
            return prune("2:4", solver="admm-grad")
        case "int8":
            return prune(0.5, solver="sparsegpt", quantize="int8")
        case "balanced":  # without text of the model's own, for which devices draw other numbers; so is shrink
            return prune(0.5, effort="balanced:synthetic=0")
        case "heal":
            texts = Calibration("demo", length=calibration.length)
            return niwaki.heal(directory / "wanda", out, "demo", tokens=tokens, calibration=texts, **usual)
        case "shrink":
            usual["effort"] = "balanced:synthetic=0"
            return niwaki.shrink("demo", out, neurons=0.25, calibration=calibration, **usual)
        case _:
            return prune(0.5, solver=name)


def _compared(name: str, cpu: Path, other: Path, records: list[Record]) -> Cell:
    """Perplexities, times, and how far weights agree."""
    first, second = (
        {key: value for file in (path / name).glob("*.safetensors") for key, value in load_file(file).items()}
        for path in (cpu, other)
    )
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
def _logits(directory: Path, device: str) -> Iterator[Cell]:
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
            model = niwaki.load(directory / form, device, dtype)
            if two_four:
                _convert(model)
            prompt = model(tokens[:, :-1].to(device), use_cache=True)
            cache = next(name for name in CACHES if name in prompt)
            token = model(tokens[:, -1:].to(device), **{cache: prompt[cache]})
            found = torch.stack([prompt.logits[0, -1], token.logits[0, -1]]).cpu().double()
            error = float((found - right).norm() / right.norm())
            yield {"name": form + " as 2:4" * two_four, "dtype": dtype, "difference": error}


def _convert(model: torch.nn.Module) -> None:
    """Gives linear layers with two zeros in every four weights torch's 2:4 tensors."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and (layer.weight != 0).unflatten(1, (-1, 4)).sum(2).max() <= 2:
            sparse = torch.sparse.to_sparse_semi_structured(layer.weight.detach())
            layer.weight = torch.nn.Parameter(sparse, requires_grad=False)


def instructions(
    architectures: Annotated[str, Option(help="Generations of GPUs.")] = "80,89,90",
    rows: Annotated[str, Option(help="Of matrices.")] = "1024,4096,8192",
    vectors: Annotated[str, Option(help="Numbers of vectors.")] = "1,2,4,16",
    kinds: Annotated[str, Option(help="Of values: float16, bfloat16, float32 or int8.")] = "float16,bfloat16,int8",
    record: common.Record = None,
) -> None:
    """Instructions of the kernel for packed matrices, counted in what compilers make of it. Needs no GPU.

    Triton compiles the kernel as niwaki.packed.gpu.multiply would, and its disassembler shows the loop. A turn of it is
    64 positions for each lane. It waits where it uses something that it has asked for since the last wait: the loads
    between two waits are in flight together.
    """
    from gpu_loop import KINDS, VERSION, compiled, disassembled, waits  # needs Triton

    print(f"{'':>9} {'vectors':>8} {'rows':>6} {'sm':>4} {'instructions':>13} {'waits':>6} {'registers':>10}")
    results: list[Cell] = []
    chosen, sizes = common.chosen(kinds, KINDS), itertools.product(integers(vectors), integers(rows))
    for kind, (number, height), architecture in itertools.product(chosen, sizes, integers(architectures)):
        loop, registers = disassembled(compiled(architecture, height, number, kind))
        count, waited = len(loop) / POSITIONS, waits(loop)
        line = f"{kind:>9} {number:8} {height:6} {architecture:4} {count:13.2f} {waited:6} {registers:10}"
        print(line, flush=True)
        case = {"kind": kind, "vectors": number, "rows": height, "architecture": architecture}
        results.append({**case, "instructions": count, "waits": waited, "registers": registers})
    common.save(record, triton=VERSION, results=results)


if __name__ == "__main__":
    common.main(decode, devices, instructions, about=__doc__)
