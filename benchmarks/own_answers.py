"""A real model calibrated on its own answers, on books, and on both: what becomes of its answers to other prompts.

    python scripts/smollm2.py MODEL
    python benchmarks/own_answers.py MODEL CORPUS WORK --record benchmarks/results/own_answers.json

CORPUS is that of real.py. WORK keeps the pruned models and what was measured of them: the same command goes on where it
stopped, and one with more patterns adds to it.

The dense model answers prompts that are not among those it is calibrated on (held_prompts.jsonl). On these answers the
KL divergence of each pruned model from the dense one is measured, in nats a token. Each pruned model answers the same
prompts: how long its answers are, how many have not ended, and how many of these say the same for ever.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import common
import torch
from real import HELD_PROMPTS, Texts
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.effort import EFFORTS
from niwaki.models.generation import continued
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import load_tokenizer
from niwaki.options import OWN_ANSWERS, Calibration, Compute, Measurement
from niwaki.texts.answers import USUAL_SAMPLING
from niwaki.texts.sources import read_prompts

#: An answer says the same for ever that ends with so many tokens of a cycle of at most LONGEST, twice or more.
REPEATED, LONGEST = 48, 64


def whole(directory: Path) -> Any:
    """A context with the whole model in float32."""
    return StreamedModel(Checkpoint(directory), dtype="float32").whole()


class Prompts:
    """The held prompts as tokens of a model, and its answers to them."""

    def __init__(self, model: Path, number: int, length: int) -> None:
        tokenizer, self.length = load_tokenizer(model), length
        asked, _ = read_prompts(str(HELD_PROMPTS))
        self.tokens = [_templated(tokenizer, each) for each in asked[:: max(1, len(asked) // number)][:number]]
        self.end = int(tokenizer.eos_token_id)

    def answers(self, model: PreTrainedModel, console: Console) -> list[list[int]]:
        """To each at most ``length`` tokens, with the one that ends it."""
        width, steps = max(map(len, self.tokens)), 0
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in self.tokens])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in self.tokens])

        def done() -> None:
            nonlocal steps
            steps += 1
            if steps % 64 == 0:
                console.print(f"  {steps} of {self.length} tokens")

        torch.manual_seed(0)
        text = continued(model, padded, width + self.length, done, mask, [self.end], USUAL_SAMPLING)[:, width:].tolist()
        return [answer[: answer.index(self.end) + 1] if self.end in answer else answer for answer in text]

    def divergences(self, dense: PreTrainedModel, pruned: PreTrainedModel, answers: list[list[int]]) -> list[float]:
        """KL(dense | pruned) in nats a token, for each of ``answers``."""
        return [
            float(_divergence(_logits(dense, prompt, answer), _logits(pruned, prompt, answer)))
            for prompt, answer in zip(self.tokens, answers, strict=True)
        ]


def _templated(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def _logits(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> Tensor:
    """(answer, vocabulary): from which each token of the answer is drawn."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].double()


def _divergence(dense: Tensor, pruned: Tensor) -> Tensor:
    p, q = dense.log_softmax(1), pruned.log_softmax(1)
    return (p.exp() * (p - q)).sum(1).mean()


def is_endless(answer: list[int], end: int) -> bool:
    """Whether it has not ended, and ends with a cycle."""
    if answer[-1] == end:
        return False
    for period in range(1, min(LONGEST, len(answer) // 2) + 1):
        tail = max(REPEATED, 2 * period)
        if len(answer) >= tail and all(answer[-i] == answer[-i - period] for i in range(1, tail - period + 1)):
            return True
    return False


def summary(answers: list[list[int]], end: int) -> dict[str, float]:
    """What a table says of them."""
    return {
        "tokens": fmean(map(len, answers)),
        "unended": sum(answer[-1] != end for answer in answers),
        "endless": sum(is_endless(answer, end) for answer in answers),
    }


def main() -> None:
    """Prunes and measures what is not there yet, prints a line for each model and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "corpus", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--efforts", nargs="+", default=["fast", "balanced"])
    parser.add_argument("--patterns", nargs="+", default=["50 %", "60 %"])
    parser.add_argument("--samples", type=int, default=48, help="windows to calibrate on")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    parser.add_argument("--prompts", type=int, default=50, help="how many held prompts are answered")
    parser.add_argument("--answer", type=int, default=256, help="tokens in an answer, at most")
    parser.add_argument("--text-samples", type=int, default=24, help="windows of plain text to measure on")
    parser.add_argument("--record", type=Path, help="write JSON there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    console = Console(width=140, highlight=False, emoji=False)
    results = list(_measured(arguments, console))
    if arguments.record:
        sizes = {name: getattr(arguments, name) for name in ("samples", "length", "prompts", "answer")}
        results = common.with_earlier(results, arguments.record, "results", _key)
        order = ["", *EFFORTS]
        results.sort(key=lambda each: (order.index(each["effort"].partition(":")[0]), each["pattern"]))
        common.save(arguments.record, model=arguments.model.name, **sizes, results=results)


def _key(result: dict[str, Any]) -> tuple[str, str, str]:
    return result["calibration"], result["pattern"], result["effort"]


def _measured(arguments: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    model, work = arguments.model, arguments.work
    texts = Texts(model, arguments.corpus, work, arguments.samples, arguments.length)
    prompts = Prompts(model, arguments.prompts, arguments.answer)
    plain = {name: texts.to_measure(name, arguments.text_samples) for name in ("wikitext2", "books")}

    def result(name: str, directory: Path, **values: Any) -> dict[str, Any]:
        file = work / f"{name}.json"
        if not file.exists():
            with whole(directory) as pruned:
                own = prompts.answers(pruned, console)
            values.update(answers=own, **summary(own, prompts.end))
            if directory != model:
                with whole(model) as dense, whole(directory) as pruned:
                    each = prompts.divergences(dense, pruned, json.loads((work / "dense.json").read_text())["answers"])
                values["divergence"], values["error"] = fmean(each), stdev(each) / len(each) ** 0.5
            for text, source in plain.items():
                measurement = Measurement(source, samples=arguments.text_samples, length=arguments.length)
                values[text] = niwaki.evaluate(directory, measurement, compute=Compute(dtype="float32")).value
            file.write_text(json.dumps(values))
        found: dict[str, Any] = json.loads(file.read_text())
        del found["answers"]
        console.print(found)
        return found

    yield result("dense", model, effort="", calibration="", pattern="")
    for effort, pattern in itertools.product(arguments.efforts, arguments.patterns):
        for name in ("books", OWN_ANSWERS, f"{OWN_ANSWERS} + books"):
            directory = work / "models" / f"{name} {pattern} {effort}".replace(" ", "-").replace(":", "-")
            if not (directory / "niwaki.json").exists():
                sources = [
                    file
                    for each in name.split(" + ")
                    for file in ([OWN_ANSWERS] if each == OWN_ANSWERS else texts.to_calibrate(each))
                ]
                calibration = Calibration(sources, samples=arguments.samples, length=arguments.length)
                niwaki.prune(model, directory, pattern, effort=effort, calibration=calibration, measurement=None)
            yield result(directory.name, directory, effort=effort, calibration=name, pattern=pattern)


if __name__ == "__main__":
    main()
