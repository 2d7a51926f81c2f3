"""Texts of several kinds, to calibrate and to measure a real model on.

Calibrations: books; wikitext2; code (Python's standard library); answers (the model's own, to the prompts that ship
with niwaki); own (text that it writes without a prompt); mixture (as much of each of these). Measured on: wikitext2,
books, code, and answers that the dense model has drawn for the prompts in held_prompts.jsonl: there the nats above the
dense model estimate the KL divergence from it.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import common  # noqa: F401 - first: it sets what OpenMP reads when torch is loaded
import torch

from niwaki.checkpoints.reading import Checkpoint
from niwaki.models.generation import continued
from niwaki.models.locate import locate_model
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import load_tokenizer
from niwaki.options import OWN_ANSWERS, Calibration
from niwaki.records.progress import Progress
from niwaki.texts.own import with_answers
from niwaki.texts.sources import read_text
from niwaki.windows import Windows

HELD_PROMPTS = Path(__file__).with_name("held_prompts.jsonl")
CALIBRATIONS = ("books", "wikitext2", "answers", "own", "mixture")
MEASURED = ("wikitext2", "books", "code", "answers")
#: The same as values of options.
ALL_CALIBRATIONS, ALL_MEASURED = ",".join(CALIBRATIONS), ",".join(MEASURED)
#: Characters of each text, more than is calibrated or measured on.
CHARACTERS = 2_000_000


class Texts:
    """The texts, as files in WORK/texts that are made once."""

    def __init__(
        self, model: Path, corpus: Path, work: Path, samples: int, length: int, characters: int = CHARACTERS
    ) -> None:
        self._model, self._corpus, self._place = locate_model(str(model)), corpus, work / "texts"
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
