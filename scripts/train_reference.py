r"""Train a small model of the LLaMA, Qwen3 or Qwen3-MoE architecture from a text file.

    python scripts/train_reference.py TEXT OUT [--held FILE]

TEXT is UTF-8, plain or compressed (.xz, .gz). OUT is created and loads in transformers'
AutoModelForCausalLM and AutoTokenizer; a folder that already holds something is refused. The
defaults follow the reference model, with ordinary choices for what is not recorded of it (warmup,
betas, decay, clipping): the result is a model like it, not the same weights. The same seed on the
same machine gives the same bytes again. Something larger, for a GPU (23 M parameters):

    python scripts/train_reference.py TEXT OUT --hidden 448 --blocks 8 --mlp 1216 --heads 7 \
        --vocab 8192 --context 512 --tokens 200000000 --lr 1e-3

With --architecture qwen3 two heads share keys and values, queries and keys are normalized, and the head is not the
embedding: what a method is tried on that was tuned on the reference model. With --architecture qwen3_moe each MLP is
a mixture of experts of --mlp neurons each: what removing experts is tried on.

Cost of the defaults on two CPU cores, in float32: 1.5 minutes for the tokens of 151 MB of text,
then 2.4 s a step (3,400 tokens/s), which makes 2.4 hours for the 3,625 steps; 2.6 GB of memory.
Where other programs want the same cores, OMP_WAIT_POLICY=passive in the environment keeps waiting
threads from blocking working ones; without it a small model can be 30 times slower there.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import lzma
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
    get_cosine_schedule_with_warmup as cosine_schedule,
)

PIECE = 1 << 16  # characters read at a time: what keeps memory bounded
HELD = 200  # windows of the held-out loss
BALANCE = 0.01  # the weight in the loss of how unevenly a mixture uses its experts
OPTIONS = [
    ("--hidden", 192, "width of the model"),
    ("--blocks", 6, "number of blocks"),
    ("--mlp", 512, "width inside the MLP"),
    ("--heads", 6, "attention heads"),
    ("--experts", 32, "experts in a block of a mixture"),
    ("--chosen", 4, "of them for each token"),
    ("--context", 256, "tokens in a window"),
    ("--vocab", 4096, "tokens of the tokenizer, 258 to 65536"),
    ("--tokenizer-chars", 30_000_000, "characters of the text that the tokenizer is made from"),
    ("--tokens", 29_700_000, "tokens to train on"),
    ("--batch", 32, "windows in a batch"),
    ("--lr", 3e-3, "peak learning rate"),
    ("--warmup", 100, "steps of warmup, at most a tenth of all steps"),
    ("--seed", 0, "seed of the initial weights and of the order of the windows"),
]


def parse() -> argparse.Namespace:
    """The options, refused here where they cannot work rather than after the text is read."""
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="Train a small model.", formatter_class=style)
    parser.add_argument("text", type=Path, help="UTF-8 text, plain, .xz or .gz")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--held", type=Path, help=f"text whose first {HELD} windows are held out")
    parser.add_argument("--architecture", default="llama", choices=["llama", "qwen3", "qwen3_moe"])
    for name, default, text in OPTIONS:
        parser.add_argument(name, type=type(default), default=default, help=text)
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto (cuda or cpu)")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    args = parser.parse_args()
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"{args.out} exists and is not an empty folder")
    for path in filter(None, (args.text, args.held)):
        if not path.is_file():
            parser.error(f"{path} is not a file")
    if args.hidden % (2 * args.heads):
        parser.error("--hidden must be a multiple of twice --heads")
    if args.architecture != "llama" and args.heads % 2:
        parser.error("--heads must be even, as two share keys and values")
    if not 0 < args.chosen <= args.experts:
        parser.error("--chosen must be from 1 to --experts")
    if not 258 <= args.vocab <= 65536:
        parser.error("--vocab must hold 256 bytes and 2 special tokens, and fit 16 bits")
    if args.tokens < args.batch * args.context:
        parser.error("--tokens is less than one batch")
    return args


def open_text(path: Path) -> TextIO:
    """The text of a file, decompressed if its name says so."""
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def pieces(path: Path, characters: int = sys.maxsize) -> Iterator[str]:
    """The text in pieces that end with a line, so that no word is cut in two."""
    with open_text(path) as file:
        while characters > 0 and (piece := file.read(min(PIECE, characters)) + file.readline()):
            characters -= len(piece)
            yield piece


def train_tokenizer(path: Path, vocab: int, characters: int) -> Tokenizer:
    """Byte-level BPE on the first characters of the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<s>", "</s>"],
        # All bytes, seen or not: then no text is ever out of vocabulary.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces(path, characters), trainer)
    return tokenizer


def windows(path: Path, tokenizer: Tokenizer, context: int, most: int = sys.maxsize) -> np.ndarray:
    """The first `most` non-overlapping windows of the text's tokens, one a row."""
    found, count, source = [np.empty(0, np.uint16)], 0, pieces(path)
    while count // context < most and (batch := list(itertools.islice(source, 32))):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            found.append(np.array(encoding.ids, dtype=np.uint16))
            count += len(encoding)
    rows = min(count // context, most)
    if not rows:
        sys.exit(f"{path} is shorter than one window")
    return np.concatenate(found)[: rows * context].reshape(rows, context)


def bf16_is_fast(device: torch.device) -> bool:
    """Whether bf16 autocast would be a gain on this device."""
    if device.type != "cpu":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    # A CPU without bf16 instructions can be 100 times slower in bf16 than in float32: measure.
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, times = torch.ones(384, 384, dtype=dtype), []
        for _ in range(5):
            start = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - start)
        best[dtype] = min(times)
    return best[torch.bfloat16] < 0.7 * best[torch.float32]  # autocast adds casts of its own


def loss_of(model: PreTrainedModel, rows: np.ndarray) -> torch.Tensor:
    """Mean cross-entropy of every token of the windows but their first."""
    ids = torch.from_numpy(rows.astype(np.int64)).to(model.device)
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


@contextlib.contextmanager
def balances(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """A list that gets a number for each mixture that runs: 1 where all its experts are used alike, and else more.

    Switch Transformers, arXiv 2101.03961, eq. 4. That of transformers is over all blocks at once, which leaves some
    experts of each block without tokens.
    """
    values: list[torch.Tensor] = []

    def hook(router: torch.nn.Module, _: object, answer: tuple[torch.Tensor, ...]) -> None:
        logits, _, experts = answer
        count = logits.shape[-1]
        share = torch.bincount(experts.flatten(), minlength=count) / experts.numel()
        values.append(count * (share * logits.float().softmax(dim=-1).mean(dim=0)).sum())

    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [module.register_forward_hook(hook) for module in routers]
    try:
        yield values
    finally:
        for each in hooks:
            each.remove()


@torch.no_grad()
def held_line(model: PreTrainedModel, rows: np.ndarray, batch: int) -> str:
    """The held-out loss, to be printed."""
    parts = [rows[i : i + batch] for i in range(0, len(rows), batch)]
    loss = sum(loss_of(model, part).item() * len(part) for part in parts) / len(rows)
    return f"held-out loss {loss:.4f}, perplexity {math.exp(loss):.2f}"


def configuration(args: argparse.Namespace) -> PretrainedConfig:
    """That of the model to train."""
    shape = {
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "intermediate_size": args.mlp,
        "num_hidden_layers": args.blocks,
        "num_attention_heads": args.heads,
        "max_position_embeddings": args.context,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if args.architecture == "llama":
        return LlamaConfig(**shape, tie_word_embeddings=True)
    width = args.hidden // args.heads
    shape |= {"num_key_value_heads": args.heads // 2, "head_dim": width, "tie_word_embeddings": False}
    if args.architecture == "qwen3":
        return Qwen3Config(**shape)
    experts = {"num_experts": args.experts, "num_experts_per_tok": args.chosen, "moe_intermediate_size": args.mlp}
    return Qwen3MoeConfig(**shape, **experts, norm_topk_prob=True)


def train(args: argparse.Namespace, folder: Path) -> None:
    """Everything from the text to the folder."""
    cuda = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(cuda if args.device == "auto" else args.device)
    bf16 = args.dtype == "bfloat16" or (args.dtype == "auto" and bf16_is_fast(device))
    print(f"device {device}, {'bfloat16 autocast' if bf16 else 'float32'}", flush=True)
    if device.type == "cuda":  # on a CPU the algorithms are deterministic as they are
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(args.seed)

    start = time.perf_counter()
    tokenizer = train_tokenizer(args.text, args.vocab, args.tokenizer_chars)
    if tokenizer.get_vocab_size() < args.vocab:
        sys.exit(f"the text gives only {tokenizer.get_vocab_size()} tokens: lower --vocab")
    data = windows(args.text, tokenizer, args.context)
    held = windows(args.held, tokenizer, args.context, HELD) if args.held else None
    print(f"text of {data.size:,} tokens, made in {time.perf_counter() - start:.0f} s", flush=True)

    # By the base class, since the `to` of transformers has lost its types.
    model = torch.nn.Module.to(AutoModelForCausalLM.from_config(configuration(args)), device).train()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    steps = args.tokens // (args.batch * args.context)
    schedule = cosine_schedule(optimizer, min(args.warmup, steps // 10), steps)
    # Epoch after epoch, each shuffled: no window comes twice before all have come once.
    rng, epochs = np.random.default_rng(args.seed), math.ceil(steps * args.batch / len(data))
    order = np.concatenate([rng.permutation(len(data)) for _ in range(epochs)])
    size = sum(p.numel() for p in model.parameters())
    print(f"model of {size:,} parameters, {steps:,} steps, {epochs} epoch(s) begun", flush=True)

    start, console, recent = time.perf_counter(), Console(), torch.zeros((), device=device)
    text, left = TextColumn("{task.description}"), TimeRemainingColumn()
    columns = BarColumn(), MofNCompleteColumn(), text, left
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    every = max(1, min(10, steps // 10))
    with bar:
        task = bar.add_task("", total=steps)
        for step in range(1, steps + 1):
            rows = data[order[(step - 1) * args.batch : step * args.batch]]
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16), balances(model) as uneven:
                loss = loss_of(model, rows) + BALANCE * sum(uneven)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            recent += loss.detach()
            if step % every == 0:  # reading the loss makes a GPU wait, so not at every step
                line = f"loss {recent.item() / every:.3f}"
                bar.update(task, completed=step, description=line)
                recent.zero_()
                if bar.disable and step % (10 * every) == 0:
                    rate = step * args.batch * args.context / (time.perf_counter() - start)
                    print(f"step {step:,}: {line}, {rate:,.0f} tokens/s", flush=True)
            if held is not None and step < steps and step % max(1, steps // 10) == 0:
                console.print(f"step {step:,}: {held_line(model, held, args.batch)}")
    print(f"trained in {time.perf_counter() - start:.0f} s", flush=True)

    with torch.no_grad():  # rounded before the last measure: what is measured is what is written
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    if held is not None:
        print(f"written model: {held_line(model, held, args.batch)}")
    model.to(torch.bfloat16).save_pretrained(folder)
    untyped: Any = PreTrainedTokenizerFast
    names = {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": args.context}
    untyped(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def main() -> None:
    """Train beside OUT and rename at the end: OUT is whole or absent."""
    args = parse()
    out = args.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        train(args, Path(temporary) / "model")
        if out.exists():  # empty; a rename onto it would fail on Windows
            out.rmdir()
        (Path(temporary) / "model").rename(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
