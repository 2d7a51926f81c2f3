"""A model pruned and healed: what is left of the distance from the dense model, and what text does best.

python scripts/real_models.py . smollm2
python benchmarks/heal.py distance MODEL CORPUS WORK --max-time 40m --record benchmarks/results/heal.json
python benchmarks/heal.py texts demo CORPUS WORK
"""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, get_args

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from common import NOTHING, Cell, Corpus, Length, Model, Samples, TextSamples, Work, fractions, names
from corpus import ALL_MEASURED, CHARACTERS, MEASURED, Texts
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer import Option

import niwaki
from niwaki import Calibration, Compute, Record
from niwaki.choices import HealingMethod
from niwaki.models.locate import locate_model
from niwaki.models.tokens import load_tokenizer
from niwaki.options import HEALING_RATE, HEALING_TOKENS, OWN_TEXT
from niwaki.texts.texts import read_windows

#: Windows to calibrate on.
SAMPLES = 128
METHODS: tuple[HealingMethod, ...] = get_args(HealingMethod)
PLAIN = ("wikitext2", "books", "code")

Methods = Annotated[str, Option(help="Of healing.")]
Rate = Annotated[float, Option(help="Of learning.")]


def distance(
    model: Model,
    corpus: Corpus,
    work: Work,
    efforts: common.Efforts = "balanced",
    patterns: Annotated[str, Option(help='Of niwaki prune, and also "4 blocks" and "25 % neurons".')] = "50 %",
    methods: Methods = "full",
    max_time: Annotated[str, Option(help="For each healing.")] = "40m",
    tokens: Annotated[str, Option(help="For each healing, if there is time.")] = HEALING_TOKENS,
    characters: Annotated[int, Option(help="Of each text to train on, at most.")] = CHARACTERS,
    rate: Rate = HEALING_RATE,
    own_text: Annotated[float, Option(help="Share of it, see niwaki heal.")] = OWN_TEXT,
    texts: common.Measured = ALL_MEASURED,
    samples: Samples = 48,
    text_samples: TextSamples = 16,
    length: Length = 512,
    record: common.Record = None,
) -> None:
    """A real model pruned and healed, for a time that is given: what is left of the distance from the dense model.

    Models are calibrated on books and healed on books and WikiText-2's validation text. Other patterns, efforts,
    methods or times add to the record.
    """
    console = Console(width=140, highlight=False, emoji=False)
    models = work / "models"
    made = Texts(model, corpus, work, samples, length, characters)
    held = {name: made.to_measure(name, text_samples) for name in common.chosen(texts, MEASURED)}
    books = Calibration(made.to_calibrate("books"), samples=samples, length=length)
    training = Calibration([*made.to_calibrate("books"), *made.to_calibrate("wikitext2")], length=length)
    models.mkdir(parents=True, exist_ok=True)
    results: list[Cell] = []

    def add(directory: Path, **values: Any) -> None:
        file = models / f"{directory.name}.json"
        if not file.exists():
            console.print(f"measuring {directory.name}")
            found = common.measured(directory, held, text_samples, length, "float32")
            file.write_text(json.dumps({name: each.losses for name, each in found.items()}))
        if directory != model:
            run = Record.load(directory / "niwaki.json")
            values["seconds"] = run.seconds["total"]
            values["healing"] = run.healing and dataclasses.asdict(run.healing) | {"teacher": model.name}
        results.append({**values, "losses": json.loads(file.read_text())})

    add(model, effort="dense")
    options: dict[str, Any] = {"tokens": tokens, "max_time": max_time, "rate": rate, "own_text": own_text}
    options |= {"calibration": training, "measurement": None}
    own = {"own_text": own_text} if own_text else {}
    suffix = ("" if rate == HEALING_RATE else f"-{rate}") + (f"-own-{own_text:g}" if own else "")
    for pattern in names(patterns):
        for effort in ["shrink"] if pattern.endswith(("blocks", "neurons")) else names(efforts):
            pruned = models / f"{effort} {pattern}".replace(" ", "-").replace(":", "-")
            if not (pruned / "niwaki.json").exists():
                _prune(model, pruned, pattern, effort, books)
            add(pruned, effort=effort, pattern=pattern)
            for method in common.chosen(methods, METHODS):
                healed = models / f"{pruned.name}-{method}-{max_time}{suffix}"
                if not (healed / "niwaki.json").exists():
                    niwaki.heal(pruned, healed, model, **options, method=method)
                add(healed, effort=effort, pattern=pattern, method=method, time=max_time, **own)
    if record:
        results = sorted(common.with_earlier(results, record, "results", _key), key=_key)
        sizes = {"samples": samples, "text_samples": text_samples, "length": length}
        common.save(record, model=model.name, **sizes, results=results)


def _key(result: Cell) -> tuple[bool, str, str, str, str, str]:
    values = (str(result.get(name, "")) for name in ("pattern", "effort", "method", "time", "own_text"))
    return result["effort"] != "dense", *values


def _prune(model: Path, out: Path, pattern: str, effort: str, calibration: Calibration) -> None:
    match re.fullmatch(r"(\d+) (blocks|% neurons)", pattern):
        case None:
            niwaki.prune(model, out, pattern, effort=effort, calibration=calibration, measurement=NOTHING)
        case found if found[2] == "blocks":
            niwaki.shrink(model, out, blocks=int(found[1]), calibration=calibration, measurement=NOTHING)
        case found:
            niwaki.shrink(model, out, neurons=int(found[1]) / 100, calibration=calibration, measurement=NOTHING)


def texts(
    model: Model,
    corpus: Corpus,
    work: Work,
    effort: Annotated[str, Option(help="Of pruning.")] = "best:healing=0",
    methods: Methods = "full,blocks",
    texts: Annotated[str, Option(help="To train on.")] = "books,books+wikitext2",
    shares: Annotated[str, Option(help="Of own text.")] = "0,0.25,0.5",
    tokens: Annotated[int, Option(help="To train on.")] = 60_000,
    rate: Annotated[float, Option(help="Of all methods but blocks.")] = 0.004,
    text_samples: TextSamples = 64,
    length: Length = 256,
) -> None:
    """What healing trains on: shares of text that the dense model writes itself, by the KL divergence from that model.

    The model is pruned to 60 % on books, and healed on the same number of tokens each time. KL is measured with the
    whole models of transformers on WikiText-2's test text, books by others and source code, which nothing is trained
    on.
    """
    made = Texts(model, corpus, work, SAMPLES, length)
    directory = locate_model(str(model))
    tokenizer, dense = load_tokenizer(directory), _loaded(directory)
    held = {
        name: read_windows(made.to_measure(name, SAMPLES), tokenizer, length, text_samples).tokens for name in PLAIN
    }
    pruned = work / f"{effort}-60"
    if not (pruned / "niwaki.json").exists():
        books = Calibration(made.to_calibrate("books"), samples=SAMPLES, length=length)
        niwaki.prune(model, pruned, 0.6, effort=effort, calibration=books, measurement=NOTHING)
    print(f"| | trained on | own text | {' | '.join(PLAIN)} | seconds |", flush=True)
    _show(dense, pruned, held, "as it came", "", "", "")
    for method, kinds, share in itertools.product(common.chosen(methods, METHODS), names(texts), fractions(shares)):
        healed = work / f"{pruned.name}-{method}-{kinds}-{share}-{tokens}"
        if not (healed / "niwaki.json").exists():
            text = [file for name in kinds.split("+") for file in made.to_calibrate(name)]
            niwaki.heal(
                pruned,
                healed,
                model,
                method=method,
                tokens=tokens,
                rate=None if method == "blocks" else rate,
                own_text=share,
                calibration=Calibration(text, length=length),
                measurement=NOTHING,
                compute=Compute(dtype="float32"),
            )
        seconds = Record.load(healed / "niwaki.json").seconds["total"]
        _show(dense, healed, held, method, kinds, f"{share:g}", f"{seconds:.0f}")


def _loaded(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    return model


def _show(dense: PreTrainedModel, path: Path, held: dict[str, Tensor], *cells: str) -> None:
    """Prints KL in nats a token with its standard error, and perplexity, on each text."""
    *first, seconds = cells
    model = _loaded(path)
    row = [_divergence(dense, model, tokens) for tokens in held.values()]
    print(f"| {' | '.join([*first, *row, seconds])} |", flush=True)


@torch.no_grad()
def _divergence(dense: PreTrainedModel, model: PreTrainedModel, tokens: Tensor) -> str:
    divergences, losses = [], []
    for batch in tokens.split(4):
        log_p, log_q = (each(batch).logits.log_softmax(-1) for each in (dense, model))
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1).mean(1))
        losses.append(-log_q[:, :-1].gather(2, batch[:, 1:, None]).mean())
    kl = torch.cat(divergences)
    error = float(kl.std()) / math.sqrt(len(kl))
    return f"{float(kl.mean()):.4f} ±{error:.4f} ({math.exp(float(torch.stack(losses).mean())):.2f})"


if __name__ == "__main__":
    common.main(distance, texts, about=__doc__)
