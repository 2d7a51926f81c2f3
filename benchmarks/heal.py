"""A real model pruned and healed, for a time that is given: what is left of the distance from the dense model.

    python scripts/smollm2.py MODEL
    python benchmarks/heal.py MODEL CORPUS WORK --time 40m --record benchmarks/results/heal.json

CORPUS is that of real.py. WORK keeps the models and what was measured of them: the same command goes on where it
stopped, and one with other patterns, efforts, methods or times adds to the record. Patterns are those of niwaki prune,
and also "4 blocks" and "25 % neurons", which niwaki shrink removes.

Models are calibrated on books and healed on books and WikiText-2's validation text. They are measured on WikiText-2's
test text, books by others, source code and the dense model's answers to prompts, see real.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
from real import CHARACTERS, MEASURED, Texts
from rich.console import Console
from transformers.utils import logging

import niwaki
from niwaki.options import HEALING_RATE, HEALING_TOKENS, OWN_TEXT, Calibration, Compute, Measurement
from niwaki.records.record import Record


def main() -> None:
    """Makes and measures what is not there yet, prints a line for each model and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "corpus", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--efforts", nargs="+", default=["balanced"])
    parser.add_argument("--patterns", nargs="+", default=["50 %"])
    parser.add_argument("--methods", nargs="*", default=["full"], help="of healing")
    parser.add_argument("--time", default="40m", help="for each healing")
    parser.add_argument("--tokens", default=HEALING_TOKENS, help="for each healing, if there is time")
    parser.add_argument("--characters", type=int, default=CHARACTERS, help="of each text to train on, at most")
    parser.add_argument("--rate", type=float, default=HEALING_RATE)
    parser.add_argument("--own-text", type=float, default=OWN_TEXT, help="share of it, see niwaki heal")
    parser.add_argument("--texts", nargs="+", choices=MEASURED, default=MEASURED, help="to measure on")
    parser.add_argument("--samples", type=int, default=48, help="windows to calibrate on")
    parser.add_argument("--text-samples", type=int, default=16, help="windows of each text to measure on")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    parser.add_argument("--record", type=Path, help="write JSON there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    console = Console(width=140, highlight=False, emoji=False)
    results = list(_measured(arguments, console))
    if arguments.record:
        results = sorted(common.with_earlier(results, arguments.record, "results", _key), key=_key)
        sizes = {name: getattr(arguments, name) for name in ("samples", "text_samples", "length")}
        common.save(arguments.record, model=arguments.model.name, **sizes, results=results)


def _key(result: dict[str, Any]) -> tuple[bool, str, str, str, str, str]:
    values = (str(result.get(name, "")) for name in ("pattern", "effort", "method", "time", "own_text"))
    return result["effort"] != "dense", *values


def _prune(model: Path, out: Path, pattern: str, effort: str, calibration: Calibration) -> None:
    match re.fullmatch(r"(\d+) (blocks|% neurons)", pattern):
        case None:
            niwaki.prune(model, out, pattern, effort=effort, calibration=calibration, measurement=None)
        case found if found[2] == "blocks":
            niwaki.shrink(model, out, blocks=int(found[1]), calibration=calibration, measurement=None)
        case found:
            niwaki.shrink(model, out, neurons=int(found[1]) / 100, calibration=calibration, measurement=None)


def _measured(arguments: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    model, models = arguments.model, arguments.work / "models"
    texts = Texts(model, arguments.corpus, arguments.work, arguments.samples, arguments.length, arguments.characters)
    measured = {name: texts.to_measure(name, arguments.text_samples) for name in arguments.texts}

    def result(directory: Path, **values: Any) -> dict[str, Any]:
        file = models / f"{directory.name}.json"
        if not file.exists():
            console.print(f"measuring {directory.name}")
            losses = {}
            for name, text in measured.items():
                measurement = Measurement(text, samples=arguments.text_samples, length=arguments.length)
                losses[name] = niwaki.evaluate(directory, measurement, compute=Compute(dtype="float32")).losses
            file.write_text(json.dumps(losses))
        made = Record.load(directory / "niwaki.json") if directory != model else None
        if made:
            values["seconds"] = made.seconds["total"]
            values["healing"] = made.healing and dataclasses.asdict(made.healing) | {"teacher": model.name}
        return {**values, "losses": json.loads(file.read_text())}

    models.mkdir(parents=True, exist_ok=True)
    yield result(model, effort="dense")
    for pattern in arguments.patterns:
        for effort in ["shrink"] if pattern.endswith(("blocks", "neurons")) else arguments.efforts:
            pruned = models / f"{effort} {pattern}".replace(" ", "-").replace(":", "-")
            books = Calibration(texts.to_calibrate("books"), samples=arguments.samples, length=arguments.length)
            if not (pruned / "niwaki.json").exists():
                _prune(model, pruned, pattern, effort, books)
            yield result(pruned, effort=effort, pattern=pattern)
            for method in arguments.methods:
                rate = "" if arguments.rate == HEALING_RATE else f"-{arguments.rate}"
                own = {"own_text": arguments.own_text} if arguments.own_text else {}
                suffix = f"{rate}-own-{arguments.own_text:g}" if own else rate
                healed = models / f"{pruned.name}-{method}-{arguments.time}{suffix}"
                if not (healed / "niwaki.json").exists():
                    text = [*texts.to_calibrate("books"), *texts.to_calibrate("wikitext2")]
                    niwaki.heal(
                        pruned,
                        healed,
                        model,
                        method=method,
                        tokens=arguments.tokens,
                        max_time=arguments.time,
                        rate=arguments.rate,
                        own_text=arguments.own_text,
                        calibration=Calibration(text, length=arguments.length),
                        measurement=None,
                    )
                yield result(healed, effort=effort, pattern=pattern, method=method, time=arguments.time, **own)


if __name__ == "__main__":
    main()
