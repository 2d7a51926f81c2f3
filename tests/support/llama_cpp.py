"""llama.cpp itself, where it is: its tokens and logits of GGUF files; and a stand-in for its package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

LLAMA_CPP = Path(os.environ.get("NIWAKI_LLAMA_CPP", "nowhere")) / "node_modules"


@dataclass
class Answer:
    """What llama.cpp makes of a file, or the ``error`` that it ends in."""

    error: str = ""
    #: The tokens of each text, with what is added before and behind.
    split: list[list[int]] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # (tokens, words) float64
    length: int = 0  # of the context


def ask(place: Path, questions: Sequence[tuple[Path, Sequence[str], Sequence[int]]]) -> list[Answer]:
    """Of (file, texts, tokens) each, from one process in the directory ``place``."""
    shutil.copy(Path(__file__).parent / "llama_cpp.mjs", place)
    if not (place / "node_modules").exists():
        (place / "node_modules").symlink_to(LLAMA_CPP)
    asked = [{"file": str(file), "texts": list(texts), "tokens": list(tokens)} for file, texts, tokens in questions]
    (place / "questions.json").write_text(json.dumps(asked))
    command = ["node", "llama_cpp.mjs", "questions.json", "answers.json"]
    subprocess.run(command, cwd=place, capture_output=True, check=True, timeout=300)
    answers = []
    for said in json.loads((place / "answers.json").read_text()):
        if "error" in said:
            answers.append(Answer(said["error"]))
            continue
        rows = [np.frombuffer(base64.b64decode(row), np.float32) for row in said["logits"]]
        split = [said["starts"] + tokens + said["ends"] for tokens in said["split"]]
        answers.append(Answer("", split, torch.from_numpy(np.stack(rows)).double(), said["length"]))
    return answers


def distance(logits: Tensor, expected: Tensor) -> Tensor:
    """(tokens,) how far logits (tokens, words) are from others, in standard deviations of these."""
    difference = logits.double() - expected.double()
    return difference.pow(2).mean(-1).sqrt() / expected.double().std(-1)


class Llama:
    """Instead of llama-cpp-python: answers with the words of what it is asked, and writes down what it is given."""

    seen: ClassVar[list[Any]] = []
    metadata: ClassVar[dict[str, str]] = {}
    fails = False

    def __init__(self, path: str, **how: Any) -> None:
        if self.fails:
            raise ValueError(f"Failed to load model from file: {path}")
        self.seen.append((Path(path).name, how))

    def create_chat_completion(self, messages: list[dict[str, str]], **how: Any) -> Iterator[Any]:
        self.seen.append(how)
        ((_, content),) = [(each["role"], each["content"]) for each in messages]
        yield {"choices": [{"delta": {"role": "assistant"}}]}
        for word in content.split():
            yield {"choices": [{"delta": {"content": word + "!"}}]}

    def create_completion(self, prompt: str, **how: Any) -> Iterator[Any]:
        self.seen.append(how)
        yield from ({"choices": [{"text": text}]} for text in (" of", "", f" {len(prompt)}"))

    def tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
        assert add_bos
        assert special
        return [*text]

    def n_vocab(self) -> int:
        return 50

    def reset(self) -> None:
        self.seen.append("reset")

    def eval(self, tokens: list[int]) -> None:
        self.seen.append(len(tokens))

    def sample(self, temp: float) -> int:
        assert temp == 0.0
        return 7
