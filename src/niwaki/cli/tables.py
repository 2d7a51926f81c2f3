"""Tables for the screen; imports no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from niwaki.checkpoints.gguf_header import GgufTensor
from niwaki.records.comparison import CAPTION, Comparison
from niwaki.records.record import LeftDense, Record, facts
from niwaki.records.speed import SpeedRecord
from niwaki.records.wording import duration, kind, printable, short, size

if TYPE_CHECKING:
    from niwaki.evaluation.inspect import MatrixSummary
    from niwaki.evaluation.tasks import TaskScores
    from niwaki.exports.push import PublishedFile
    from niwaki.models.outside import ExtraTensors

#: Facts that are on the screen before the work, unless parts were removed.
_SAID_FIRST = {"pattern", "mask from"}


def _table(head: Iterable[str], rows: Iterable[Sequence[str | Text]], words: Collection[str], **options: Any) -> Table:
    """A table without lines, whose columns called ``words`` are aligned left and all others right."""
    table = Table(box=None, title_justify="left", caption_justify="left", **options)
    for name in head:
        table.add_column(name, justify="left" if name in words else "right", no_wrap=name == "method")
    for row in rows:
        table.add_row(*row)
    return table


def files_table(files: Sequence[PublishedFile]) -> Table:
    """A table of the files that would be uploaded, with their sizes."""
    rows = [(file.path, size(file.size)) for file in files]
    return _table(("file", "size"), [*rows, ("", size(sum(file.size for file in files)))], words=("file",))


def summary(record: Record) -> Table:
    """A table of what a run came to."""
    table = Table(Column(style="bold"), Column(), show_header=False, box=None, pad_edge=False)
    for name, value in facts(record).items():
        if name not in _SAID_FIRST:
            table.add_row(name, Text(value))  # Text: no markup in paths
    if record.fits:
        before, after = (fmean(getattr(fit, when) for fit in record.fits) for when in ("before", "after"))
        table.add_row("fit", f"error of blocks' outputs {before:.4g} to {after:.4g} (mean, on held-out samples)")
    for name, words in record.measured().items():
        table.add_row(name, Text(words))
    for when, measured in record.perplexity.items():
        if when != "after" and "after" in record.perplexity:
            table.add_row(f"above {when}", record.perplexity["after"].above(measured).words)
    for stage, cost in record.costs():
        table.add_row(stage.name, Text(f"{f'{cost.words}, ' if cost else ''}{duration(stage.seconds)}"))
    stages = {name: seconds for name, seconds in record.seconds.items() if name != "total" and seconds >= 0.05}
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items())
    table.add_row("seconds", f"{record.seconds['total']:.1f} ({parts})")
    table.add_row("peak memory", ", ".join(f"{size(peak)} {where}" for where, peak in record.peak_memory.items()))
    return table


def speed_table(record: SpeedRecord) -> Table:
    """A table with a row for each form of the model."""
    head, *rows = record.table()
    return _table(head, rows, head[:2], padding=(0, 2, 0, 0))


def task_table(scores: TaskScores) -> Table:
    """A table with a row for each task and metric, in %."""
    rows, before = [], None
    for score in scores.scores:
        task = [score.task, score.version, str(score.shots), f"{score.questions:,}"]
        percent = _percent(score.value, score.standard_error)
        rows.append([*([""] * len(task) if score.task == before else task), score.metric, percent])
        before = score.task
    if scores.mean is not None:
        rows.append(["mean", "", "", "", "acc", _percent(*scores.mean)])
    head = ["task", "version", "few-shot", "questions", "metric", "score"]
    return _table(head, rows, ("task", "version", "metric"), padding=(0, 2, 0, 0))


def _percent(value: float, error: float | None) -> str:
    return f"{100 * value:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")


def inspection_tables(
    matrices: Iterable[MatrixSummary], left: Iterable[LeftDense], extra: Iterable[ExtraTensors]
) -> list[Table]:
    """Tables of what would be pruned, by kind of matrix, of what would not be, and of the sparsities of each block.

    ``extra`` are tensors of the files that are not the model's.
    """
    kinds: dict[tuple[str, tuple[int, int]], list[MatrixSummary]] = defaultdict(list)
    blocks: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item in matrices:
        name = kind(item.matrix.name)
        kinds[name, item.matrix.shape].append(item)
        blocks[item.matrix.block][name].append(item.sparsity)
    patterns = next(iter(kinds.values()))[0].fitting
    by_kind = []
    for (name, shape), items in kinds.items():
        weights = len(items) * shape[0] * shape[1]
        row = [short(name), f"{shape[0]}x{shape[1]}", str(len(items)), f"{weights:,}"]
        row.append(f"{100 * sum(item.zeros for item in items) / weights:.2f} %")
        row.append(f"{min(item.row_zeros[0] for item in items)}-{max(item.row_zeros[1] for item in items)}")
        by_kind.append(row + [f"{100 * fmean(item.fitting[pattern] for item in items):.1f} %" for pattern in patterns])
    head = ["matrix", "shape", "number", "weights", "zeros", "in a row", *patterns]
    names = list(dict.fromkeys(name for name, _ in kinds))
    by_block = [
        [str(block), *(f"{100 * fmean(row[name]):.2f}" if name in row else "" for name in names)]
        for block, row in blocks.items()
    ]
    stays = [[each.name, f"{each.size:,}", f"{100 * each.share:.2g} %", each.reason] for each in left]
    head_of_rest = ["what stays dense", "weights", "of the decoder", "why"]
    beside = [[each.name, str(len(each.keys)), size(each.size), each.what] for each in extra]
    head_of_beside = ["not in transformers' model", "tensors", "size", "what it is"]
    return [
        _table(head, by_kind, ["matrix"], title="what niwaki changes (n:m: groups of m with at most n non-zero)"),
        *([_table(head_of_rest, stays, ["what stays dense", "why"])] if stays else []),
        *([_table(head_of_beside, beside, head_of_beside[::3])] if beside else []),
        _table(["block", *map(short, names)], by_block, [], title="zeros, %"),
    ]


def gguf_tables(tensors: Iterable[GgufTensor], types: Mapping[int, str]) -> list[Table]:
    """Tables of what a GGUF file has, by the type of numbers and by kind of tensor; ``types`` are names by numbers."""
    by_type, by_kind = defaultdict[str, list[GgufTensor]](list), defaultdict[str, list[GgufTensor]](list)
    for tensor in tensors:
        by_type[types[tensor.kind]].append(tensor)
        by_kind[kind(tensor.name)].append(tensor)
    every = [tensor for found in by_type.values() for tensor in found]

    def figures(of: Sequence[GgufTensor]) -> list[str]:
        weights, taken = sum(tensor.count for tensor in of), sum(tensor.size for tensor in of)
        return [f"{len(of):,}", f"{weights:,}", size(taken), f"{8 * taken / max(1, weights):.2f}"]

    largest = sorted(by_type.items(), key=lambda item: -sum(tensor.size for tensor in item[1]))
    rows = [[name, *figures(of)] for name, of in largest]
    tensor_rows = list[list[str | Text]]()
    for name, of in by_kind.items():
        counts = Counter(types[tensor.kind] for tensor in of).most_common()
        mixture = ", ".join(name if len(counts) == 1 else f"{count} {name}" for name, count in counts)
        tensor_rows.append([Text(printable(name.removesuffix(".weight"))), mixture, *figures(of)])
    head = ["tensors", "weights", "size", "bits a weight"]
    return [
        _table(["type", *head], [*rows, ["", *figures(every)]], ["type"], title="types of llama.cpp in the file"),
        _table(["tensor", "types", *head], tensor_rows, ["tensor", "types"]),
    ]


def perplexity_tables(comparison: Comparison, text: str) -> list[Table]:
    """The tables of a comparison, perplexities as in the paper's table 1 and nats, with the best in bold."""
    tables = []
    for title, (head, cells) in comparison.tables(text).items():
        rows = [[Text(cell.text, "bold" if cell.best else "") for cell in row] for row in cells]
        tables.append(_table(head, rows, ["method"], title=Text(title)))
    tables[-1].caption = CAPTION
    return tables
