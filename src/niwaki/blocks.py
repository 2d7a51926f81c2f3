"""The only module that knows the insides of transformers models: one decoder block in memory at a time.

The model's structure is built without weights. Its embeddings and head are read when tokens go in or
losses come out, each block when its turn comes. What the blocks need besides hidden states (rotary
embeddings, masks) is recorded for each block from the model's own forward pass with blocks that let
everything through, because for some families it differs from block to block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from niwaki.checkpoint import Checkpoint
from niwaki.errors import CheckpointError, NumericalError, UnsupportedModelError, UsageError

#: Tokens in one forward pass: enough to fill the cores, little enough for a block's activations.
TOKENS_PER_BATCH = 4096
#: Logits at a time: a window of 2,048 tokens with a vocabulary of 128,000 has twice as many.
LOGITS_PER_BATCH = 1 << 27
#: The sequence length where nobody says; also the literature's. The model's maximum may be 131,072.
DEFAULT_LENGTH = 2048


@dataclass(frozen=True)
class Family:
    """What differs between model families.

    Attributes:
        blocks: Path of the list of decoder blocks, in the model and in the checkpoint's keys.
        matrices: Paths of the matrices to prune inside a block, in the order of computation.
    """

    blocks: str
    matrices: tuple[str, ...]


_LLAMA = Family(
    blocks="model.layers",
    matrices=(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ),
)

#: By the ``model_type`` of config.json.
FAMILIES: dict[str, Family] = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA}


@dataclass(frozen=True)
class Matrix:
    """A matrix that can be pruned: its block, its path there, its key in the checkpoint, its shape (out, in)."""

    block: int
    name: str
    key: str
    shape: tuple[int, int]


@dataclass
class States:
    """Token sequences on their way through the model.

    Attributes:
        tokens: Batches of (samples, length) int64.
        hidden: For each batch (samples, length, width), the inputs of the block that comes next.
        kwargs: For each block and number of samples in a batch, its other arguments.
    """

    tokens: list[Tensor]
    hidden: list[Tensor]
    kwargs: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)


@dataclass
class InputGram:
    """The Gram matrix of an input that one or more matrices of a block share.

    Attributes:
        names: The matrices' paths in the block.
        H: (in, in) float32, X^T X / tokens.
        mean: (in,) float32, the mean of the rows of X.
        tokens: Number of rows of X.
    """

    names: list[str]
    H: Tensor
    mean: Tensor
    tokens: int = 0


class StreamedModel:
    """A causal language model whose weights are in the checkpoint and not in memory.

    Args:
        checkpoint: Where the weights are.
        device: Where blocks run: "cpu", "cuda", "cuda:1"...; "auto" is a GPU if there is one.
        dtype: What they run in: "float32", "bfloat16", "float16"; "auto" is float32 on a CPU and the
            checkpoint's own on a GPU.

    Raises:
        UsageError: no such device or dtype.
        UnsupportedModelError: a family that is not in ``FAMILIES``, or quantised weights.
        CheckpointError: the checkpoint does not have the tensors that the configuration promises.
    """

    def __init__(self, checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto") -> None:
        kind = checkpoint.config.get("model_type")
        if not isinstance(kind, str) or kind not in FAMILIES:
            architecture = ", ".join(checkpoint.config.get("architectures") or ["unknown"])
            raise UnsupportedModelError(
                f"{checkpoint.path} is of type {kind!r} ({architecture}); supported: {', '.join(FAMILIES)}"
            )
        if "quantization_config" in checkpoint.config:
            raise UnsupportedModelError(
                f"{checkpoint.path} is quantised; prune the original and quantise the result"
            )
        self.checkpoint = checkpoint
        self.family = FAMILIES[kind]
        self.device = _find_device(device)
        self.dtype = _find_dtype(dtype, self.device, checkpoint)
        try:
            self.config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
            # Buffers such as rotary frequencies are computed, not read, and have to be real.
            with init_empty_weights(include_buffers=False):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype)
        except Exception as error:  # transformers checks some values and stumbles over others
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CheckpointError(
                f"{checkpoint.path / 'config.json'} is refused by transformers: {reason}"
            ) from error
        self.model = model.eval().requires_grad_(False)
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(
                    name, buffer.to(self.device), name not in module._non_persistent_buffers_set
                )
        self.blocks: nn.ModuleList = self.model.get_submodule(self.family.blocks)
        self._check_keys()

    def _check_keys(self) -> None:
        tied = set(self.model._tied_weights_keys or ()) if self.config.tie_word_embeddings else set()
        for name, value in self.model.state_dict().items():
            if name in tied:
                continue
            entry = self.checkpoint.entries.get(name)
            if entry is None:
                raise CheckpointError(
                    f"{self.checkpoint.path} lacks {name!r}, which its config.json asks for"
                )
            if entry.shape != tuple(value.shape):
                raise CheckpointError(
                    f"{self.checkpoint.path}: {name!r} has shape {entry.shape}, its config.json asks for "
                    f"{tuple(value.shape)}"
                )

    @property
    def max_length(self) -> int:
        """The number of positions that the model was made for."""
        return int(self.config.max_position_embeddings)

    def window_length(self, asked: int | None) -> tuple[int, str]:
        """The sequence length to use, and what to note where nobody asked for it.

        Raises:
            UsageError: it is more than the model has positions for.
        """
        if asked is None:
            length = min(DEFAULT_LENGTH, self.max_length)
            return length, f"sequence length {length:,}, because none was asked for"
        if asked > self.max_length:
            raise UsageError(
                f"the sequence length {asked:,} is more than the model's {self.max_length:,} positions"
            )
        return asked, ""

    def check(self, tokens: Tensor) -> None:
        """Raises UsageError unless ``tokens`` are (samples, length) int64 that the model can take."""
        if tokens.ndim != 2 or tokens.dtype != torch.int64 or not tokens.numel():
            raise UsageError(f"tokens are (samples, length) int64; got {tuple(tokens.shape)} {tokens.dtype}")
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise UsageError(
                f"tokens go from 0 to {self.config.vocab_size - 1:,} here, and these to {int(tokens.max()):,}; "
                "is it the model's own tokenizer?"
            )
        self.window_length(tokens.shape[1])

    def matrices(self) -> list[Matrix]:
        """All matrices that can be pruned, block by block in the order of computation."""
        found = []
        for index, block in enumerate(self.blocks):
            for name in self.family.matrices:
                rows, columns = _weight(block, name).shape
                key = f"{self.family.blocks}.{index}.{name}.weight"
                found.append(Matrix(index, name, key, (rows, columns)))
        return found

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> States:
        """The inputs of the first block for ``tokens`` (samples, length)."""
        batches = list(tokens.split(max(1, TOKENS_PER_BATCH // tokens.shape[1])))
        states = States(batches, [])
        seen: list[Tensor] = []

        def record(index: int) -> Callable[..., Tensor]:
            def forward(hidden: Tensor, **kwargs: Any) -> Tensor:
                states.kwargs.setdefault((index, hidden.shape[0]), kwargs)
                seen.append(hidden)
                return hidden

            return forward

        with self._outer_weights(), self._replaced_blocks(record):
            for batch in batches:
                self.model.get_decoder()(input_ids=batch.to(self.device), use_cache=False)
                states.hidden.append(seen[0])
                seen.clear()
        return states

    @torch.no_grad()
    def losses(self, states: States) -> Tensor:
        """(samples, length - 1) float32 cross-entropies in nats, of each token given those before it.

        ``states`` are those after the last block.
        """
        losses = []
        with self._outer_weights():
            for batch, ends in zip(states.tokens, states.hidden, strict=True):
                samples = max(1, LOGITS_PER_BATCH // (batch.shape[1] * self.config.vocab_size))
                for tokens, hidden in zip(batch.split(samples), ends.split(samples), strict=True):
                    with self._replaced_blocks(_constant(hidden)):
                        logits = self.model(input_ids=tokens.to(self.device), use_cache=False).logits
                    loss = nn.functional.cross_entropy(
                        logits[:, :-1].flatten(0, 1).float(),
                        tokens[:, 1:].flatten().to(self.device),
                        reduction="none",
                    )
                    losses.append(loss.view(len(tokens), -1).cpu())
        found = torch.cat(losses)
        if not torch.isfinite(found).all():
            raise NumericalError("the model's outputs are NaN or infinite on this text; try --dtype float32")
        return found

    def stream(self) -> Iterator[Block]:
        """The blocks in order, each with its weights until the next one is asked for."""
        for index, module in enumerate(self.blocks):
            prefix = f"{self.family.blocks}.{index}."
            with self._loaded(module, prefix):
                yield Block(index, prefix, module, self)

    @contextlib.contextmanager
    def _loaded(self, module: nn.Module, prefix: str, skip: str | None = None) -> Iterator[None]:
        """Reads the weights of ``module`` but for those under ``skip``; lets go of them at the end."""
        empty = {
            name: value
            for name, value in module.state_dict().items()
            if prefix + name in self.checkpoint and not (skip and name.startswith(skip))
        }
        try:
            loaded = {name: self.checkpoint.read(prefix + name).to(self.device, self.dtype) for name in empty}
            module.load_state_dict(loaded, strict=False, assign=True)
            yield
        finally:
            module.load_state_dict(empty, strict=False, assign=True)

    @contextlib.contextmanager
    def _outer_weights(self) -> Iterator[None]:
        """Everything outside the blocks: embeddings, last norm, head."""
        with self._loaded(self.model, "", skip=self.family.blocks + "."):
            head = self.model.get_output_embeddings()
            own = head.weight
            if own.is_meta:  # not in the checkpoint: tied to the embeddings, for as long as they are here
                head.weight = self.model.get_input_embeddings().weight
            try:
                yield
            finally:
                if own.is_meta:
                    head.weight = own

    @contextlib.contextmanager
    def _replaced_blocks(self, make: Callable[[int], Callable[..., Tensor]]) -> Iterator[None]:
        """Blocks whose forward pass is ``make(index)``; their attributes, which parents read, stay."""
        try:
            for index, block in enumerate(self.blocks):
                block.forward = make(index)
            yield
        finally:
            for block in self.blocks:
                block.__dict__.pop("forward", None)


class Block:
    """One decoder block with its weights in memory.

    Attributes:
        index: Its place, from 0.
    """

    def __init__(self, index: int, prefix: str, module: nn.Module, model: StreamedModel) -> None:
        self.index = index
        self._prefix = prefix
        self._module = module
        self._model = model

    @torch.no_grad()
    def advance(self, states: States, done: Callable[[], None] = lambda: None) -> None:
        """Runs the block: ``states`` become the inputs of the next one. ``done`` is called after each batch."""
        for i, hidden in enumerate(states.hidden):
            states.hidden[i] = self._run(hidden, states)
            done()

    @torch.no_grad()
    def input_grams(self, states: States, done: Callable[[], None] = lambda: None) -> list[InputGram]:
        """The Gram matrices of all distinct inputs, from one pass that leaves ``states`` alone.

        Raises:
            NumericalError: an activation is NaN or infinite.
        """
        grams: dict[str, InputGram] = {}
        inputs: list[tuple[Tensor, InputGram]] = []  # of the current batch; keeps tensors alive for `is`

        def gather(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                for seen, gram in inputs:
                    if seen is args[0]:
                        if name not in gram.names:
                            gram.names.append(name)
                        return
                X = args[0].flatten(0, -2).float()
                if name not in grams:
                    width = X.shape[1]
                    H, mean = X.new_zeros(width, width), X.new_zeros(width)
                    grams[name] = InputGram([name], H, mean)
                grams[name].H.addmm_(X.T, X)
                grams[name].mean += X.sum(dim=0)
                grams[name].tokens += X.shape[0]
                inputs.append((args[0], grams[name]))

            return hook

        handles = [
            self._module.get_submodule(name).register_forward_pre_hook(gather(name))
            for name in self._model.family.matrices
        ]
        try:
            for hidden in states.hidden:
                self._run(hidden, states)
                inputs.clear()
                done()
        finally:
            for handle in handles:
                handle.remove()
        for gram in grams.values():
            gram.H.div_(gram.tokens)
            gram.mean.div_(gram.tokens)
            if not torch.isfinite(gram.H).all():
                raise NumericalError(
                    f"the inputs of {self._prefix}{gram.names[0]} are NaN or infinite on the calibration text; "
                    "try --dtype float32, or another text"
                )
        return list(grams.values())

    def weight(self, name: str) -> Tensor:
        """(out, in) float32: the original weights of the matrix ``name``."""
        return self._model.checkpoint.read(self.key(name)).to(self._model.device, torch.float32)

    def replace(self, name: str, W: Tensor) -> Tensor:
        """Puts W (out, in) in the place of the matrix ``name``.

        Returns:
            W in the dtype of the checkpoint, which is what the block computes with from now on, with
            zeros that are exactly +0.0.

        Raises:
            NumericalError: a weight is too large for that dtype.
        """
        parameter = _weight(self._module, name)
        stored = W.to(self._model.checkpoint.dtype(self.key(name))).add_(0.0)  # rounding can leave -0.0
        if not torch.isfinite(stored).all():
            raise NumericalError(f"{self.key(name)}: a pruned weight is too large for {stored.dtype}")
        parameter.copy_(stored)
        return stored

    def key(self, name: str) -> str:
        """The checkpoint's key of the matrix ``name``."""
        return f"{self._prefix}{name}.weight"

    def _run(self, hidden: Tensor, states: States) -> Tensor:
        out = self._module(hidden, **states.kwargs[self.index, hidden.shape[0]])
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


def _weight(block: nn.Module, name: str) -> Tensor:
    weight = block.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight


def _constant(hidden: Tensor) -> Callable[[int], Callable[..., Tensor]]:
    """Blocks that answer ``hidden``, whatever goes in."""
    return lambda _: lambda *_, **__: hidden


def _find_device(name: str) -> torch.device:
    """The device called ``name``; "auto" is a GPU if there is one.

    Raises:
        UsageError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"the device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _find_dtype(name: str, device: torch.device, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype called ``name``; "auto" is float32 on a CPU and the checkpoint's on a GPU.

    Raises:
        UsageError: it is none that a model can run in.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto":
        if name not in known:
            raise UsageError(f"--dtype must be auto, {', '.join(known)}; got {name}")
        return known[name]
    if device.type == "cpu":
        return torch.float32  # half precision is 100 times slower on a CPU without instructions for it
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32"
    return known.get(stored, torch.float32)
