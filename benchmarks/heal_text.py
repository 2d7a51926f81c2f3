"""What healing trains on: shares of text that the dense model writes itself, by the KL divergence from that model.

    python benchmarks/heal_text.py demo CORPUS WORK

CORPUS is that of real.py. WORK keeps the models: the same command goes on where it stopped. The model is pruned to 60 %
on books, and healed on the same number of tokens each time. KL is measured with the whole models of transformers on
WikiText-2's test text, books by others and source code, which nothing is trained on.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import torch
from real import Texts
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import niwaki
from niwaki.models.locate import locate_model
from niwaki.models.tokens import load_tokenizer
from niwaki.options import Calibration, Compute
from niwaki.records.record import Record
from niwaki.texts.reading import read_windows

MEASURED = ["wikitext2", "books", "code"]


def main() -> None:
    """Makes the models that are not there yet, and prints a row of a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "corpus", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--effort", default="best:healing=0", help="of pruning")
    parser.add_argument("--methods", nargs="+", default=["full", "blocks"])
    parser.add_argument("--texts", nargs="+", default=["books", "books+wikitext2"], help="to train on")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0, 0.25, 0.5], help="of own text")
    parser.add_argument("--tokens", type=int, default=60_000, help="to train on")
    parser.add_argument("--rate", type=float, default=0.004, help="of all methods but blocks")
    parser.add_argument("--samples", type=int, default=64, help="windows of each text to measure on")
    parser.add_argument("--length", type=int, default=256, help="tokens in a window")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    model, work, length = arguments.model, arguments.work, arguments.length
    texts = Texts(model, arguments.corpus, work, 128, length)
    tokenizer = load_tokenizer(locate_model(str(model)))
    measured = {
        name: read_windows(texts.to_measure(name, 128), tokenizer, length, arguments.samples).tokens
        for name in MEASURED
    }
    dense = _loaded(locate_model(str(model)))
    pruned = work / f"{arguments.effort}-60"
    if not (pruned / "niwaki.json").exists():
        books = Calibration(texts.to_calibrate("books"), samples=128, length=length)
        niwaki.prune(model, pruned, 0.6, effort=arguments.effort, calibration=books, measurement=None)
    print(f"| | trained on | own text | {' | '.join(MEASURED)} | seconds |", flush=True)
    _show(dense, pruned, measured, "as it came", "", "", "")
    for method, names, share in itertools.product(arguments.methods, arguments.texts, arguments.shares):
        healed = work / f"{pruned.name}-{method}-{names}-{share}-{arguments.tokens}"
        if not (healed / "niwaki.json").exists():
            text = [file for name in names.split("+") for file in texts.to_calibrate(name)]
            niwaki.heal(
                pruned,
                healed,
                model,
                method=method,
                tokens=arguments.tokens,
                rate=None if method == "blocks" else arguments.rate,
                own_text=share,
                calibration=Calibration(text, length=length),
                measurement=None,
                compute=Compute(dtype="float32"),
            )
        seconds = Record.load(healed / "niwaki.json").seconds["total"]
        _show(dense, healed, measured, method, names, f"{share:g}", f"{seconds:.0f}")


def _loaded(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    return model


def _show(dense: PreTrainedModel, path: Path, measured: dict[str, Tensor], *cells: str) -> None:
    """Prints KL in nats a token with its standard error, and perplexity, on each text."""
    *first, seconds = cells
    model = _loaded(path)
    row = [_measured(dense, model, tokens) for tokens in measured.values()]
    print(f"| {' | '.join([*first, *row, seconds])} |", flush=True)


@torch.no_grad()
def _measured(dense: PreTrainedModel, model: PreTrainedModel, tokens: Tensor) -> str:
    divergences, losses = [], []
    for batch in tokens.split(4):
        log_p, log_q = (each(batch).logits.log_softmax(-1) for each in (dense, model))
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1).mean(1))
        losses.append(-log_q[:, :-1].gather(2, batch[:, 1:, None]).mean())
    kl = torch.cat(divergences)
    error = float(kl.std()) / math.sqrt(len(kl))
    return f"{float(kl.mean()):.4f} ±{error:.4f} ({math.exp(float(torch.stack(losses).mean())):.2f})"


if __name__ == "__main__":
    main()
