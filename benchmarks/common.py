"""What the benchmarks share: options, layers and texts to measure on, times in turns, and records."""

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, TypeVar

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is loaded, see niwaki/cli/main.py

import torch
from torch import Tensor
from transformers.utils import logging
from typer import Argument, BadParameter, Option, Typer

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.cli.common import names as names
from niwaki.evaluation.evaluate import evaluate_both
from niwaki.files import replace_file
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import load_tokenizer
from niwaki.options import Compute, Measurement
from niwaki.records.perplexity import Perplexity
from niwaki.records.record import versions
from niwaki.texts.texts import read_windows

Call = Callable[[], object]
Cell = dict[str, Any]
Name = TypeVar("Name", bound=str)

#: The text to measure on, where no other is asked for.
HELD = ["demo-held"]
#: For what a benchmark measures itself.
NOTHING = Measurement(samples=0)

# Options and arguments. What holds several values has commas between them, as in niwaki compare.
Model = Annotated[Path, Argument(help="A model directory, or demo.")]
Corpus = Annotated[
    Path,
    Argument(
        help="A directory with train.txt.xz (books), held.txt.xz (books by others), wikitext2.valid.txt and "
        "wikitext2.test.txt."
    ),
]
Work = Annotated[
    Path, Argument(help="Keeps all that is made and measured: the same command resumes, one that asks for more adds.")
]
Blocks = Annotated[str, Option(help="Numbers of blocks.")]
Calibration = Annotated[str, Option(help="The text to calibrate on.")]
Device = Annotated[str, Option(help="cpu or cuda.")]
Efforts = Annotated[str, Option(help="Of pruning.")]
Held = Annotated[list[str], Option("--text", help="To measure on; may be given several times.")]
Length = Annotated[int, Option(help="Tokens in a window.")]
Measured = Annotated[str, Option("--texts", help="Names of the texts to measure on.")]
Patterns = Annotated[str, Option(help='Such as "50 %,2:4".')]
Record = Annotated[Path | None, Option(help="Write JSON there.")]
Rounds = Annotated[int, Option(help="In each of which everything that is timed has a turn.")]
Samples = Annotated[int, Option(help="Windows to calibrate on.")]
Sizes = Annotated[str, Option(metavar="ROWSxCOLUMNS", help="Of matrices.")]
Solvers = Annotated[str, Option(help="With their options, as in admm-grad,continuation:sweeps=40.")]
Sparsities = Annotated[str, Option(help="Shares of zeros.")]
TextSamples = Annotated[int, Option(help="Windows of each text to measure on.")]
Threads = Annotated[str, Option(help="Numbers of threads.")]


def main(*benchmarks: Callable[..., None], about: str | None) -> None:
    """A command line with a command for each benchmark."""
    app = Typer(
        help=(about or "").partition("\n")[0],
        add_completion=False,
        no_args_is_help=len(benchmarks) > 1,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for benchmark in benchmarks:
        app.command()(benchmark)
    logging.disable_progress_bar()
    app()


def chosen(text: str, known: Collection[Name]) -> list[Name]:
    """The names in ``text``, all of which have to be known."""
    by_name = dict(zip(map(str, known), known, strict=True))
    if unknown := [name for name in names(text) if name not in by_name]:
        raise BadParameter(f"{unknown[0]!r} is not one of {', '.join(by_name)}")
    return [by_name[name] for name in names(text)]


def integers(text: str) -> list[int]:
    """Those of a list such as "1,2"."""
    return [int(part) for part in names(text)]


def fractions(text: str) -> list[float]:
    """Those of a list such as "0.5,0.7"."""
    return [float(part) for part in names(text)]


def shape_of(size: str) -> tuple[int, int]:
    """The rows and columns of "4096x11008"."""
    rows, columns = size.split("x")
    return int(rows), int(columns)


# Times


def seconds(call: Call) -> float:
    """The time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def turns(calls: Mapping[str, Sequence[Call]]) -> Iterator[dict[str, list[float]]]:
    """Rounds without end, in each of which every name has a turn: the seconds of each of its calls.

    A machine that is slow for a while is so for all of them.
    """
    while True:
        yield {name: [seconds(call) for call in those] for name, those in calls.items()}


def in_turns(calls: Mapping[str, Sequence[Call]], rounds: int, *, warm_up: bool = True) -> dict[str, list[float]]:
    """The mean seconds of each name's calls in each of so many rounds, after one more that is not counted."""
    measured = turns(calls)
    if warm_up:
        next(measured)
    counted = [next(measured) for _ in range(rounds)]
    return {name: [fmean(turn[name]) for turn in counted] for name in calls}


# Layers


@dataclass(frozen=True)
class Layer:
    """A matrix with the Gram matrix of its inputs of some tokens, and that on another text if there is one."""

    name: str
    W: Tensor
    H: Tensor
    H_held: Tensor | None = None
    tokens: int | None = None

    def problem(self) -> LayerProblem:
        """With nothing computed in advance except the power, which belongs to the measurement."""
        problem = LayerProblem(self.W, Gram(self.H, shared=False, tokens=self.tokens))
        _ = problem.power
        return problem


def synthetic(rows: int, columns: int, device: str = "cpu") -> Layer:
    """(rows, columns) weights of Student's t with 4 degrees of freedom; inputs with a few strong directions."""
    generator = torch.Generator(device).manual_seed(0)
    W = torch.randn(rows, columns, generator=generator, device=device)
    chi = torch.zeros_like(W)
    for _ in range(4):
        normal = torch.randn(rows, columns, generator=generator, device=device)
        chi.addcmul_(normal, normal, value=0.25)
    H = torch.zeros(columns, columns, device=device)
    directions = torch.randn(16, columns, generator=generator, device=device)
    for _ in range(8):
        X = torch.randn(columns // 4, columns, generator=generator, device=device)
        X.addmm_(torch.randn(len(X), 16, generator=generator, device=device), directions)
        H.addmm_(X.T, X, alpha=1 / (8 * len(X)))
    return Layer(f"synthetic {rows} x {columns}", W.div_(chi.sqrt_()), H)


@dataclass(frozen=True)
class Layers:
    """The matrices of the chosen blocks, from dense inputs on both texts, or synthetic ones of the given sizes."""

    model: str
    texts: tuple[str, ...]
    samples: tuple[int, ...]
    length: int
    blocks: list[int]
    sizes: list[str]

    def __call__(self, dtype: str = "float32") -> Iterator[Layer]:
        """One after the other; the model runs in ``dtype``."""
        for size in self.sizes:
            yield synthetic(*shape_of(size))
        if self.sizes:
            return
        checkpoint = Checkpoint(locate_model(self.model))
        streamed, tokenizer = StreamedModel(checkpoint, dtype=dtype), load_tokenizer(checkpoint.path)
        states = [
            streamed.embed(read_windows(text, tokenizer, self.length, count).tokens)
            for text, count in zip(self.texts, self.samples, strict=True)
        ]
        for block in streamed.stream():
            if block.index in self.blocks:
                calibration, held = (block.input_grams(state) for state in states)
                matrices = {matrix.name: matrix for matrix in block.matrices}
                for ours, theirs in zip(calibration, held, strict=True):
                    for name in ours.names:
                        weight = block.weight(matrices[name])
                        yield Layer(f"block {block.index} {name}", weight, ours.H, theirs.H, ours.tokens)
            if block.index >= max(self.blocks, default=0):
                return
            for state in states:
                block.advance(state)


# Models


def measured(
    model: str | Path, texts: Mapping[str, str], windows: int, length: int, dtype: str = "auto"
) -> dict[str, Perplexity]:
    """The perplexity of a model on so many windows of each text, by the texts' names."""
    return {
        name: niwaki.evaluate(model, Measurement(text, samples=windows, length=length), compute=Compute(dtype=dtype))
        for name, text in texts.items()
    }


def by_name(texts: Iterable[str]) -> dict[str, str]:
    """Texts by names without folders: where a file lies on this machine is nobody else's business."""
    return {Path(text).name: text for text in texts}


def without_places(perplexity: Mapping[str, Perplexity]) -> dict[str, Cell]:
    """What a record has of perplexities: names of texts, and of no file where it lies."""
    return {
        name: {**asdict(value), "text": name, "origin": value.origin if value.text == name else ""}
        for name, value in perplexity.items()
    }


def means(losses: Mapping[str, Sequence[float]]) -> str:
    """The mean loss on each text, in words."""
    return ", ".join(f"{name} {fmean(values):.4f}" for name, values in losses.items()) + " nats"


# Records


def processor() -> str:
    """This machine's processor, where the system tells it: its name, and family and model, since names are of many."""
    with contextlib.suppress(OSError, KeyError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return f"{told['model name']} (family {told['cpu family']}, model {told['model']})"
    return platform.processor()


def node_script(peer: Path, name: str) -> list[str]:
    """The command that runs the script ``name`` of this directory in node, which finds node-llama-cpp in ``peer``.

    Node looks for packages beside a script, so that there is a copy of it.
    """
    return ["node", str(shutil.copy(Path(__file__).with_name(name), peer / name))]


def save(path: Path | None, **content: Any) -> None:
    """Writes ``content`` with the versions and the number of threads, if there is a path."""
    if path:
        threads = torch.get_num_threads()
        replace_file(path, json.dumps({**content, "threads": threads, "versions": versions()}, indent=2) + "\n")


def with_earlier(made: list[Cell], path: Path, part: str, key: Callable[[Cell], object]) -> list[Cell]:
    """What the record at ``path`` has as ``part``; what was ``made`` takes the places of the same keys."""
    earlier = json.loads(path.read_text())[part] if path.exists() else []
    return list(({key(each): each for each in earlier} | {key(each): each for each in made}).values())


@dataclass(frozen=True)
class Sheet:
    """A record that is written after each cell, from which the same command resumes.

    Attributes:
        settings: What the record has besides its cells; that of one which is there already has to be the same.
    """

    path: Path | None
    settings: Cell
    cells: list[Cell] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path and self.path.exists():
            made = json.loads(self.path.read_text())
            if {name: made.get(name) for name in self.settings} != self.settings:
                raise BadParameter(f"{self.path} is of other settings")
            self.cells.extend(made["cells"])

    def has(self, **values: object) -> bool:
        """Whether a cell has these values."""
        return any(values.items() <= {name: cell.get(name) for name in values}.items() for cell in self.cells)

    def add(self, **cell: Any) -> None:
        """One more."""
        self.cells.append(cell)
        save(self.path, **self.settings, cells=self.cells)


def add_measured(
    sheet: Sheet,
    held: dict[str, str],
    text_samples: int,
    length: int,
    dtype: str,
    directory: Path,
    dense: Path | None = None,
    **cell: Any,
) -> None:
    """Puts a ``cell`` with the losses of the model in ``directory`` on the ``sheet``, and says their means.

    With the ``dense`` model that it is from, which is first on the sheet and has more tokens, losses are of those.
    """
    if dense:
        asked = {name: Measurement(text, samples=text_samples, length=length) for name, text in held.items()}
        whole = sheet.cells[0]["losses"]
        losses = {name: _lost(directory, dense, each, whole[name]) for name, each in asked.items()}
    else:
        found = measured(directory, held, text_samples, length, dtype)
        losses = {name: list(each.losses) for name, each in found.items()}
    print(f"{cell}: {means(losses)}", flush=True)
    sheet.add(**cell, losses=losses)


def _lost(directory: Path, dense: Path, measurement: Measurement, losses: Sequence[float]) -> list[float]:
    """The ``losses`` of the dense model on windows of a text, and what the model in ``directory`` loses besides."""
    after, before = evaluate_both(directory, dense, measurement, Compute(), {})
    windows = zip(after.losses, after.counts, before.losses, before.counts, losses, strict=True)
    return [whole + (mine * count - its * of) / of for mine, count, its, of, whole in windows]
