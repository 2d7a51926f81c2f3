"""A real language model, calibrated on several kinds of text and measured on several others.

    python scripts/smollm2.py MODEL
    python benchmarks/real.py MODEL CORPUS WORK --record benchmarks/results/real.json

CORPUS has train.txt.xz (books), held.txt.xz (books by others), wikitext2.valid.txt and wikitext2.test.txt. WORK keeps
all that is made and measured: the same command goes on where it stopped, and one with more methods, patterns or
calibrations adds to it, and to the record.

Calibrations: books; wikitext2; answers (the model's own, to the prompts that ship with niwaki); own (text that it
writes without a prompt); mixture (as much of each of these and of source code). Measured on: wikitext2, books, code
(Python's standard library), and answers that the dense model has drawn for the prompts in held_prompts.jsonl: there the
nats above the dense model estimate the KL divergence from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from protocol import Lines
from rich.console import Console
from transformers.utils import logging

from niwaki.checkpoints.reading import Checkpoint
from niwaki.cli.tables import perplexity_tables
from niwaki.evaluation.compare import compare
from niwaki.models.generation import continued
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import load_tokenizer
from niwaki.options import OWN_ANSWERS, Calibration, Measurement
from niwaki.records.comparison import Cell, Comparison
from niwaki.records.progress import Progress
from niwaki.texts.answers import with_answers
from niwaki.texts.sources import read_text
from niwaki.windows import Windows

HELD_PROMPTS = Path(__file__).with_name("held_prompts.jsonl")
METHODS = ["wanda", "sparsegpt", "admm-grad", "continuation", "continuation@balanced", "continuation@best"]
PATTERNS = ["50 %", "60 %", "2:4"]
CALIBRATIONS = ["books", "wikitext2", "answers", "own", "mixture"]
MEASURED = ["wikitext2", "books", "code", "answers"]
#: Characters of each text, more than is calibrated or measured on.
CHARACTERS = 2_000_000


class Texts:
    """The texts, as files in WORK/texts that are made once."""

    def __init__(
        self, model: Path, corpus: Path, work: Path, samples: int, length: int, characters: int = CHARACTERS
    ) -> None:
        self._model, self._corpus, self._place = model, corpus, work / "texts"
        self._samples, self._length, self._characters = samples, length, characters
        self._place.mkdir(parents=True, exist_ok=True)

    def to_calibrate(self, name: str) -> list[str]:
        """The files."""
        if name == "mixture":
            return [file for each in (*CALIBRATIONS[:4], "code") for file in self.to_calibrate(each)]
        make = {
            "books": lambda: self._start_of("train.txt.xz"),
            "wikitext2": lambda: self._start_of("wikitext2.valid.txt"),
            "code": lambda: _source_code("a", "m"),
            "answers": lambda: self._answers(OWN_ANSWERS, self._samples, 0),
            "own": self._own,
        }[name]
        return [self._file(f"{name}.jsonl", make)]

    def to_measure(self, name: str, windows: int) -> str:
        """The file."""
        make = {
            "wikitext2": lambda: self._start_of("wikitext2.test.txt"),
            "books": lambda: self._start_of("held.txt.xz"),
            "code": lambda: _source_code("n", "z"),
            "answers": lambda: self._answers(str(HELD_PROMPTS), windows, 1),
        }[name]
        return self._file(f"held-{name}.jsonl", make)

    def _file(self, name: str, make: Callable[[], list[str]]) -> str:
        file = self._place / name
        if not file.exists():
            file.with_suffix(".new").write_text("".join(json.dumps({"text": text}) + "\n" for text in make()))
            file.with_suffix(".new").rename(file)
        return str(file)

    def _start_of(self, name: str) -> list[str]:
        pieces, text = read_text(str(self._corpus / name)).pieces, ""
        while len(text) < self._characters and (piece := next(pieces, "")):
            text += piece
        return [text[: self._characters]]

    def _answers(self, prompts: str, windows: int, seed: int) -> list[str]:
        """More than so many windows of conversations, each with what its template puts around it."""
        asked = Calibration(prompts, samples=windows + 2, length=self._length, answers="own", seed=seed)
        written = with_answers(self._stream(), asked, None, World(), Progress()).text
        assert isinstance(written, Windows)
        tokenizer = load_tokenizer(self._model)
        return ["".join(str(tokenizer.decode(window)) for window in written.tokens)]

    def _own(self) -> list[str]:
        """What the model says where nothing was said."""
        model, tokenizer = self._stream(), load_tokenizer(self._model)
        torch.manual_seed(0)
        first = torch.full((self._samples + 2, 1), int(tokenizer.unk_token_id or tokenizer.bos_token_id or 0))
        with model.whole() as whole:
            parts = [continued(whole, part, self._length + 1, lambda: None)[:, 1:] for part in first.split(32)]
        return [str(tokenizer.decode(text)) for text in torch.cat(parts)]

    def _stream(self) -> StreamedModel:
        return StreamedModel(Checkpoint(self._model), dtype="float32")


def _source_code(first: str, last: str) -> list[str]:
    """Of the modules of Python's standard library with names between two letters."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    code = "\n\n".join(file.read_text("utf-8", "replace") for file in files if first <= file.stem[0] <= last)
    return [code[:CHARACTERS]]


def main() -> None:
    """Measures what is not measured yet, prints the tables and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "corpus", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--calibrations", nargs="+", choices=CALIBRATIONS, default=CALIBRATIONS)
    parser.add_argument("--texts", nargs="+", choices=MEASURED, default=MEASURED, help="to measure on")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--patterns", nargs="+", default=PATTERNS)
    parser.add_argument("--samples", type=int, default=48, help="windows to calibrate on")
    parser.add_argument("--text-samples", type=int, default=24, help="windows of each text to measure on")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    parser.add_argument("--record", type=Path, help="write JSON there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    console = Console(width=140, highlight=False, emoji=False)
    texts = Texts(arguments.model, arguments.corpus, arguments.work, arguments.samples, arguments.length)
    measured = [texts.to_measure(name, arguments.text_samples) for name in arguments.texts]
    for name in arguments.calibrations:
        console.print(f"calibrated on {name}")
        found = compare(
            arguments.model,
            arguments.work / name,
            solvers=arguments.methods,
            patterns=arguments.patterns,
            calibration=Calibration(texts.to_calibrate(name), samples=arguments.samples, length=arguments.length),
            measurement=Measurement(measured, samples=arguments.text_samples),
            progress=Lines(console),
        )
        for text in measured:
            for table in perplexity_tables(found, text):
                console.print(table)
        if arguments.record:
            kept = {each: arguments.work / each for each in CALIBRATIONS}
            cells = [
                _cell(calibration, cell, arguments.texts)
                for calibration, directory in kept.items()
                if (directory / "compare.json").exists()
                for cell in Comparison.load(directory).cells
            ]
            cells = common.with_earlier(cells, arguments.record, "cells", _key)  # also what another WORK has
            cells.sort(key=lambda cell: CALIBRATIONS.index(cell["calibration"]))
            sizes = {name: getattr(arguments, name) for name in ("samples", "text_samples", "length")}
            common.save(arguments.record, model=arguments.model.name, **sizes, cells=cells)


def _key(cell: dict[str, Any]) -> tuple[str, str, str]:
    return cell["calibration"], cell["method"], cell["pattern"]


def _cell(calibration: str, cell: Cell, texts: list[str]) -> dict[str, Any]:
    """Without where files lie on this machine."""
    values = dataclasses.asdict(cell)
    perplexity = dict(zip(texts, values["perplexity"].values(), strict=True))
    for text, measured in perplexity.items():
        measured.update(text=text, origin="")
    return {"calibration": calibration, **values, "perplexity": perplexity, "record": None}


if __name__ == "__main__":
    main()
