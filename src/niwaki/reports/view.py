"""What a report says, section by section: numbers as text, tables, and charts of them."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from niwaki.records.record import MatrixRecord, Record
from niwaki.records.wording import counted, duration, kind, memory, short_text
from niwaki.reports import charts
from niwaki.reports.material import Extras, Material, Run, Sample
from niwaki.reports.parts import (
    Cell,
    Detail,
    Shown,
    Table,
    dense_line,
    device_of,
    facts_of,
    heading,
    heat_table,
    labels_of,
    notes_of,
    point_of,
    removed_tiles,
    same_start,
    structure_of,
    with_error,
)

#: What the stages of a run are for.
STAGES = {
    "prepare": "reading texts and the model's structure",
    "influence": "looking for the blocks that matter least",
    "plan": "looking at the dense model: where zeros cost least",
    "capture": "running blocks for the inputs of their matrices",
    "read": "reading weights",
    "solve": "choosing and changing weights",
    "fit": "fitting blocks to the dense ones",
    "advance": "running pruned blocks for the next ones' inputs",
    "write": "writing",
    "perplexity": "measuring perplexity",
    "check": "reading back what was written",
}


class View:
    """What the template shows.

    Args:
        material: What the page is about.
        extras: Masks and text.
        published: Whether published numbers are shown too.
    """

    #: What is behind each ±, and what the bars of charts are.
    spread = "standard errors: how another text of this kind would differ; models on the same text compare more tightly"

    def __init__(self, material: Material, extras: Extras, published: bool) -> None:
        self.material = material
        self.extras = extras
        self.runs = material.runs
        self.records = [run.record for run in self.runs if run.record is not None]
        self.methods = list(dict.fromkeys(run.method for run in self.runs))
        self.patterns = list(dict.fromkeys(run.pattern for run in self.runs))
        self.texts = list(dict.fromkeys(text for run in self.runs for text in run.perplexity))
        errors = [matrix.error for record in self.records for matrix in record.matrices if matrix.error > 0]
        #: The range of errors that colours stand for, the same over the page.
        self.errors = (min(errors), max(errors)) if errors else None
        self.name = Path(material.model).name or material.model
        compared = f"{counted(len(self.methods), 'method')} compared"
        what = compared if material.compared else heading(self.runs[0])
        self.title = f"{self.name}, {what}"
        self.published = self._published() if published else []
        self.steps = range(charts.STEPS)

    # The head

    @property
    def notes(self) -> list[str]:
        """What a careful reader should know, of all runs, and which runs it is about if not all."""
        about: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            for note in notes_of(run.record):
                about[note].append(run)
        found = []
        for note, runs in about.items():
            where = f"{runs[0].name}" if len(runs) == 1 else f"{len(runs)} of {counted(len(self.runs), 'run')}"
            found.append(note if len(runs) == len(self.runs) else f"{where}: {note}")
        return found

    @property
    def tiles(self) -> list[tuple[str, str, str]]:
        """What is said first: what it is, in large the number, and what belongs to it."""
        if self.material.compared:
            return self._best_tiles()
        (run,) = self.runs
        tiles = removed_tiles(run)
        for text, after in run.perplexity.items():
            before = self.material.dense.get(text)
            where = f"{after.tokens:,} tokens of {short_text(text)}, context {after.context:,}"
            if before is None:
                tiles.append(("perplexity", with_error(after), where))
            else:
                tiles.append(("perplexity dense", with_error(before), where))
                gain = 100 * (after.value / before.value - 1)
                tiles.append(("perplexity pruned", with_error(after), f"{gain:+.1f} % against dense"))
        if not run.perplexity:
            tiles.append(("perplexity", "?", "not measured"))
        tiles.append(("time", duration(run.seconds), device_of(run.record)))
        if run.record is not None:
            for where, size in run.record.peak_memory.items():
                tiles.append(("peak memory", memory(size), where))
        return tiles

    @property
    def speed(self) -> Table | None:
        """What ``niwaki bench`` found, a column for each form of the model: there are few, and phones are narrow."""
        if self.material.speed is None:
            return None
        head, *rows = zip(*self.material.speed.table(), strict=True)
        return Table.of(head, rows)

    def _best_tiles(self) -> list[tuple[str, str, str]]:
        text = self.texts[0] if self.texts else ""
        tiles = []
        dense = self.material.dense.get(text)
        if dense is not None:
            where = f"{dense.tokens:,} tokens of {short_text(text)}, context {dense.context:,}"
            tiles.append(("perplexity dense", with_error(dense), where))
        for pattern in self.patterns:
            found = [run for run in self.runs if run.pattern == pattern and text in run.perplexity]
            if found:
                best = min(found, key=lambda run: run.perplexity[text].value)
                tiles.append((f"best at {pattern}", with_error(best.perplexity[text]), best.method))
        return tiles

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Names and values below the tiles."""
        calibration = self.material.calibration
        text = ""
        if calibration:
            text = (
                f"{counted(calibration.get('samples', '?'), 'window')} of "
                f"{counted(calibration.get('sequence_length', '?'), 'token')} "
                f"of {short_text(str(calibration.get('source', '?')))}"
            )
        found = [("model", self.material.model)]
        if self.material.compared:
            found.append(("runs", f"{len(self.runs)}, in {duration(self.material.seconds)} with measuring"))
        else:
            found += facts_of(self.runs[0])
        found += [("calibration", text)] if text else []
        if not self.material.compared and any("±" in value for _, value, _ in self.tiles):
            found.append(("±", self.spread))
        return found

    # Perplexity against sparsity

    @property
    def frontiers(self) -> list[Shown]:
        """For each text perplexity against sparsity, beside it patterns that are no percentages.

        Of a single model the tiles say it all.
        """
        found: list[Shown] = []
        if not self.material.compared:
            return found
        for text in self.texts:
            measured = [(run, run.perplexity[text]) for run in self.runs if text in run.perplexity]
            points = [point_of(run, value) for run, value in measured]
            dense = self.material.dense.get(text)
            line = dense_line(dense) if dense else None
            span = charts.value_span([*points, *([line] if line else [])])
            plain = [point for point, (run, _) in zip(points, measured, strict=True) if not run.grouped]
            grouped = [point for point, (run, _) in zip(points, measured, strict=True) if run.grouped]
            both = bool(plain and grouped)
            figures = []
            if plain:
                width = 0.66 if both else 1.0
                figures.append(charts.frontier(plain, self.methods, "perplexity", dense=line, share=width, span=span))
            if grouped:
                width = 0.32 if both else 1.0
                figures.append(
                    charts.groups(
                        grouped,
                        self.methods,
                        "perplexity",
                        dense=line,
                        share=width,
                        span=span,
                        legend=not both,
                    )
                )
            context = next(iter(measured))[1]
            title = f"{context.tokens:,} tokens of {short_text(text)}, context {context.context:,}"
            found.append(Shown(title, figures, self._perplexities(text)))
        return found

    def _perplexities(self, text: str) -> Table:
        """A row for each method, a column for each pattern, the best marked."""
        values = {(run.method, run.pattern): run.perplexity[text] for run in self.runs if text in run.perplexity}
        rows = []
        if dense := self.material.dense.get(text):
            rows.append([Cell("dense"), Cell(with_error(dense)), *(Cell("") for _ in self.patterns[1:])])
        for method in self.methods:
            row = [Cell(method)]
            for pattern in self.patterns:
                column = [value.value for (_, other), value in values.items() if other == pattern]
                if (value := values.get((method, pattern))) is None:
                    row.append(Cell(""))
                else:
                    row.append(Cell(with_error(value), best=len(column) > 1 and value.value == min(column)))
            rows.append(row)
        return Table(["method", *self.patterns], rows)

    def _published(self) -> list[Shown]:
        """Published results next to these, a chart for each model and context that was published.

        Perplexities of other models, texts and contexts do not compare, so no published one is drawn into the chart of
        what was measured here. What is drawn is the ratio to the dense model's perplexity, which says how much of a
        model is lost, and one chart for each published model: models differ in how much they lose, too.
        """
        data = json.loads((files("niwaki.reports") / "published.json").read_text(encoding="utf-8"))
        own = self.ratios
        # The same colours in all charts.
        methods = list(dict.fromkeys([*self.methods, *(item["method"] for item in data["series"])]))
        found = []
        for model, context in dict.fromkeys((item["model"], item["context"]) for item in data["series"]):
            series = [item for item in data["series"] if (item["model"], item["context"]) == (model, context)]
            where = f"{model} on {series[0]['text']}, context {context:,}"
            sources = "; ".join(dict.fromkeys(data["sources"][item["source"]] for item in series))
            points, rows = [], []
            for item in series:
                for pattern, value in item["perplexity"].items():
                    ratio = value / item["dense"]
                    rows.append([item["method"], pattern, f"{value:g}", f"{item['dense']:g}", f"{ratio:.3g}"])
                    label = f"published, not measured: {item['method']} at {pattern}, {where}: {value:g}, {ratio:.3g} "
                    if pattern.endswith("%"):
                        points.append(
                            {
                                "method": item["method"],
                                "sparsity": float(pattern.rstrip(" %")),
                                "value": ratio,
                                "low": None,
                                "high": None,
                                "published": True,
                                "label": f"{label}times the dense {item['dense']:g}",
                            }
                        )
            figure = charts.frontier([*points, *own], methods, "perplexity / dense perplexity", share=0.48)
            table = Table.of(["method", "pattern", "perplexity", "dense", "ratio"], rows)
            found.append(Shown(f"{where} ({sources})", [figure], table))
        return found

    @property
    def ratios(self) -> list[charts.Row]:
        """What was measured here on the first text, as a ratio to the dense model; none where no zeros were made."""
        text = self.texts[0] if self.texts else ""
        dense = self.material.dense.get(text)
        if dense is None:
            return []
        found = []
        for run in self.runs:
            if text in run.perplexity and not run.grouped and not structure_of(run):
                point = point_of(run, run.perplexity[text])
                for key in ("value", "low", "high"):
                    point[key] = None if point[key] is None else point[key] / dense.value
                point["label"] = f"measured: {point['label']}, {point['value']:.3g} times the dense {self.name}"
                found.append(point)
        return found

    # Errors and sparsities of matrices

    @property
    def heat_pattern(self) -> str:
        """The pattern whose heat maps are shown for all methods: the middle one of those most methods have."""
        counts = {
            pattern: sum(run.pattern == pattern and run.record is not None for run in self.runs)
            for pattern in self.patterns
        }
        most = [pattern for pattern, count in counts.items() if count == max(counts.values(), default=0) and count]
        return most[(len(most) - 1) // 2] if most else ""

    @property
    def heat_maps(self) -> list[Shown]:
        """Errors of blocks and matrices, for each run of ``heat_pattern``."""
        found = []
        for run in self.runs:
            if run.record is None or not run.record.matrices or run.pattern != self.heat_pattern:
                continue
            cells, rows, blocks = self._grid(run.record, lambda matrix: matrix.error, "error {:.4g}", self._step)
            drawn = [{**cell, "label": f"{run.method}, {cell['label']}"} for cell in cells]
            share = 0.5 if self.material.compared else 1.0
            figure = charts.heat_map(drawn, rows, blocks, share)
            found.append(Shown(run.method, [figure], heat_table(cells, rows, blocks)))
        return found

    @property
    def allocation(self) -> Shown | None:
        """Sparsity of blocks and matrices, of a single model with zeros."""
        if self.material.compared or not self.records or not self.records[0].matrices:
            return None
        record = self.records[0]
        if record.structure:
            return None
        weights: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for matrix in record.matrices:
            size = math.prod(matrix.shape)
            weights[matrix.block][0] += matrix.sparsity * size
            weights[matrix.block][1] += size
        blocks = [
            {
                "block": block,
                "value": 100 * zeros / size,
                "label": f"block {block}: {100 * zeros / size:.2f} %",
            }
            for block, (zeros, size) in weights.items()
        ]
        cells, rows, numbers = self._grid(record, lambda matrix: matrix.sparsity, "{:.2%} zeros", self._share)
        ticks = [{"block": c["block"], "value": 100 * c["value"], "label": c["label"]} for c in cells]
        figure = charts.shares(blocks, ticks)
        return Shown("sparsity", [figure], heat_table(cells, rows, numbers, "{:.1%}"))

    @property
    def uniform(self) -> bool:
        """Whether all matrices are as sparse."""
        found = [matrix.sparsity for record in self.records for matrix in record.matrices]
        return not found or max(found) - min(found) < 0.001

    @property
    def fits(self) -> Shown | None:
        """Errors of blocks before and after they were fitted, of a single model."""
        if self.material.compared or not self.records or not self.records[0].fits:
            return None
        fits = self.records[0].fits
        rows = [
            {
                "block": fit.block,
                "when": when,
                "value": value,
                "label": f"block {fit.block} {when} fitting: error {value:.4g}",
            }
            for fit in fits
            for when, value in (("before", fit.before), ("after", fit.after))
            if value > 0
        ]
        head = ["block", "error before", "error after", "epochs", "seconds"]
        table = Table.of(
            head,
            [
                (
                    str(fit.block),
                    f"{fit.before:.4g}",
                    f"{fit.after:.4g}",
                    str(fit.epochs),
                    f"{fit.seconds:.1f}",
                )
                for fit in fits
            ],
        )
        return Shown("fits", [charts.pairs(rows, "relative error of outputs")], table)

    # Time

    @property
    def time(self) -> Shown | None:
        """Seconds by stage: of a model, or of each method the mean over its runs."""
        by_method: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            if any(run.stages.values()):
                by_method[run.method].append(run)
        if not by_method:
            return None
        known = [name for run in self.runs for name, seconds in run.stages.items() if seconds > 0]
        stages = [name for name in STAGES if name in known]
        stages += [name for name in dict.fromkeys(known) if name not in STAGES]
        mean = {
            (method, stage): sum(run.stages.get(stage, 0.0) for run in runs) / len(runs)
            for method, runs in by_method.items()
            for stage in stages
        }
        drawn = [
            {
                "name": method if self.material.compared else "",
                "part": stage,
                "value": seconds,
                "order": stages.index(stage),
                "label": f"{method}, {stage}: {seconds:.2f} s" + (f" ({STAGES[stage]})" if stage in STAGES else ""),
            }
            for (method, stage), seconds in mean.items()
            if seconds > 0
        ]
        names = list(by_method) if self.material.compared else [""]
        figure = charts.stacked(drawn, names, stages, "seconds")
        if self.material.compared:
            rows = [[method, *(f"{mean[method, stage]:.2f}" for stage in stages)] for method in by_method]
            return Shown("time", [figure], Table.of(["method", *stages], rows))
        (method,) = by_method
        rows = [[stage, f"{mean[method, stage]:.2f}", STAGES.get(stage, "")] for stage in stages]
        return Shown("time", [figure], Table.of(["stage", "seconds", "for"], rows))

    @property
    def solving(self) -> Shown | None:
        """Of a single model the solver's seconds by kind of matrix."""
        if self.material.compared or not self.records:
            return None
        seconds: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for matrix in self.records[0].matrices:
            seconds[kind(matrix.name)] += matrix.seconds
            counts[kind(matrix.name)] += 1
        if not any(seconds.values()):
            return None
        labels = labels_of(seconds)
        drawn = [
            {
                "name": labels[name],
                "value": value,
                "label": f"{name}: {value:.2f} s in {counted(counts[name], 'matrix', 'matrices')}",
            }
            for name, value in seconds.items()
        ]
        figure = charts.bars(drawn, list(labels.values()), "seconds of the solver")
        rows = [[name, str(counts[name]), f"{value:.2f}"] for name, value in seconds.items()]
        return Shown("solver", [figure], Table.of(["matrix", "number", "seconds"], rows))

    # Text, runs, record

    @property
    def samples(self) -> list[tuple[Sample, int]]:
        """Each sample, and how many characters the pruned model has the same as the dense one."""
        clean = [
            Sample(sample.prompt, sample.pruned.strip(), sample.dense and sample.dense.strip())
            for sample in self.extras.samples
        ]
        return [(sample, same_start(sample)) for sample in clean]

    @property
    def details(self) -> list[Detail]:
        """All runs of a comparison that have a record."""
        if not self.material.compared:
            return []
        found = []
        for run in self.runs:
            if run.record is None:
                continue
            errors = self._grid(run.record, lambda matrix: matrix.error, "{:.4g}", self._step)
            shares = self._grid(run.record, lambda matrix: matrix.sparsity, "{:.2%}", self._share)
            measured = [
                (f"perplexity, {short_text(text)}", with_error(value)) for text, value in run.perplexity.items()
            ]
            error = [("error of the matrices, geometric mean", f"{run.error:.4g}")]
            facts = [*measured, *error, ("time", f"{run.seconds:.1f} s"), *facts_of(run)]
            found.append(
                Detail(
                    run.name,
                    facts,
                    notes_of(run.record),
                    heat_table(*errors),
                    heat_table(*shares, "{:.1%}"),
                    json.dumps(json.loads(run.record.to_json()), separators=(",", ":")),
                    f"{re.sub(r'[^a-z0-9]+', '-', run.name.lower()).strip('-')}.json",
                )
            )
        return found

    @property
    def file(self) -> str:
        """What the full record is called."""
        return "compare.json" if self.material.compared else "niwaki.json"

    def _step(self, error: float) -> int:
        """The colour of an error: equal steps on a logarithmic scale."""
        if self.errors is None or error <= 0 or self.errors[0] == self.errors[1]:
            return 0
        low, high = map(math.log, self.errors)
        return min(charts.STEPS - 1, int(charts.STEPS * (math.log(error) - low) / (high - low)))

    def _share(self, sparsity: float) -> int:
        return min(charts.STEPS - 1, int(charts.STEPS * sparsity))

    def _grid(
        self,
        record: Record,
        value: Callable[[MatrixRecord], float],
        shown: str,
        step: Callable[[float], int],
    ) -> tuple[list[charts.Row], list[str], list[int]]:
        """(cells, names of rows, numbers of blocks); of experts the mean."""
        groups: dict[tuple[int, str], list[float]] = defaultdict(list)
        for matrix in record.matrices:
            groups[matrix.block, kind(matrix.name)].append(value(matrix))
        labels = labels_of(name for _, name in groups)
        cells = []
        for (block, name), values in groups.items():
            mean = sum(values) / len(values)
            said = shown.format(mean)
            if len(values) > 1:
                between = f"{shown.format(min(values))} to {shown.format(max(values))}"
                said = f"{said}, the mean of {len(values)} ({between})"
            cells.append(
                {
                    "block": block,
                    "row": labels[name],
                    "value": mean,
                    "step": step(mean),
                    "label": f"block {block} {name}: {said}",
                }
            )
        return cells, list(labels.values()), sorted({block for block, _ in groups})
