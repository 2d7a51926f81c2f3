"""Transformers models with one decoder block in memory at a time; only this and ``block`` know their insides.

The model's structure is built without weights. Its embeddings and head are read when tokens go in or
losses come out, each block when its turn comes. What the blocks need besides hidden states (rotary
embeddings, masks) is recorded for each block from the model's own forward pass with blocks that let
everything through, because for some families it differs from block to block.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from niwaki.errors import (
    CheckpointError,
    NiwakiError,
    NumericalError,
    UnsupportedModelError,
    UsageError,
)
from niwaki.models.block import DecoderBlock
from niwaki.models.checkpoint import Checkpoint
from niwaki.models.device import find_device, find_dtype
from niwaki.models.families import FAMILIES, Family
from niwaki.models.hidden_states import HiddenStates, MemoryBudget, SpillList
from niwaki.models.layout import Layout, Matrix

#: Tokens in one forward pass: enough to fill the cores, little enough for a block's activations.
TOKENS_PER_BATCH = 4096
#: Logits at a time: a window of 2,048 tokens with a vocabulary of 128,000 has twice as many.
LOGITS_PER_BATCH = 1 << 27
#: The sequence length where nobody says; also the literature's. The model's maximum may be 131,072.
DEFAULT_LENGTH = 2048


class StreamedModel:
    """A causal language model whose weights are in the checkpoint and not in memory.

    Args:
        checkpoint: Where the weights are.
        device: Where blocks run: "cpu", "cuda", "cuda:1"...; "auto" is a GPU if there is one.
        dtype: What they run in: "float32", "bfloat16", "float16"; "auto" is float32 on a CPU and the
            checkpoint's own on a GPU.
        room: What memory hidden states may take.

    Raises:
        UsageError: no such device or dtype.
        UnsupportedModelError: no list of decoder blocks can be found, or the weights are quantised.
        CheckpointError: the checkpoint does not have the tensors that the configuration promises.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto", room: MemoryBudget | None = None
    ) -> None:
        if "quantization_config" in checkpoint.config:
            raise UnsupportedModelError(
                f"{checkpoint.path} was exported for other programs; give the directory that it was made from"
                if "quantization" in checkpoint.config.get("pruning_config", {})
                else f"{checkpoint.path} is quantised; prune the original and quantise the result"
            )
        self.checkpoint = checkpoint
        self.room = room or MemoryBudget()
        self.device = find_device(device)
        self.dtype = find_dtype(dtype, self.device, checkpoint)
        self.model = structure(checkpoint.path, self.dtype)
        self.config = self.model.config.get_text_config()
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to(self.device), name not in module._non_persistent_buffers_set)
        kind = str(checkpoint.config.get("model_type"))
        self.notes: list[str] = []
        self._known = kind in FAMILIES
        if getattr(self.config, "num_kv_shared_layers", 0):
            raise UnsupportedModelError(
                f"blocks of {checkpoint.path} ({kind}) use keys and values of earlier ones; models like this one "
                "are not supported"
            )
        self.path, self.blocks = _block_list(self.model, kind)
        decoder = self.model.get_decoder()
        #: Without the head: LLaMA 4 says that the whole model is its decoder.
        self._decoder = decoder if decoder is not self.model else _parent(self.model, self.path)
        self.layout = Layout(self.model, checkpoint)
        family = FAMILIES.get(kind, Family())
        self._matrices = [
            self.layout.matrices(index, f"{self.path}.{index}.", block, family)
            for index, block in enumerate(self.blocks)
        ]
        if not all(self._matrices):
            raise UnsupportedModelError(f"{checkpoint.path} has blocks ({kind}) without matrices to prune")
        if not self._known:
            names = ", ".join(dict.fromkeys(re.sub(r"\d+", "N", m.name) for m in self.matrices()))
            self.notes.append(
                f"{kind!r} is not among the model families that niwaki is tested with; by its structure it has "
                f"{len(self.blocks)} blocks with {names}"
            )
        self._answers_tuple: bool | None = None
        #: Whether to read the next block's weights while the present one is at work.
        self._ahead = self.device.type == "cuda"

    @property
    def max_length(self) -> int:
        """The number of positions that the model was made for, or a usual one if it does not say."""
        return int(getattr(self.config, "max_position_embeddings", None) or DEFAULT_LENGTH)

    def window_length(self, asked: int | None) -> tuple[int, str]:
        """The sequence length to use, and what to note where nobody asked for it.

        Raises:
            UsageError: it is more than the model has positions for.
        """
        if asked is None:
            length = min(DEFAULT_LENGTH, self.max_length)
            return length, f"sequence length {length:,}, because none was asked for"
        if asked > self.max_length:
            raise UsageError(f"the sequence length {asked:,} is more than the model's {self.max_length:,} positions")
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

    def matrices(self, block: int | None = None) -> list[Matrix]:
        """The matrices that can be pruned, of one block or of all."""
        chosen = self._matrices if block is None else [self._matrices[block]]
        return [matrix for matrices in chosen for matrix in matrices]

    def vectors(self, block: int) -> dict[str, str]:
        """The parameters of one dimension in a block, norms and biases: path in the block to key."""
        prefix = f"{self.path}.{block}."
        named = self.blocks[block].named_parameters()
        return {name: self.layout.key(prefix + name) for name, value in named if value.ndim == 1}

    def limit(self, blocks: range) -> None:
        """From now on only the matrices of ``blocks`` can be pruned."""
        self._matrices = [matrices if index in blocks else [] for index, matrices in enumerate(self._matrices)]

    @property
    def block_size(self) -> int:
        """Bytes of the largest block's weights while it runs."""
        return max(sum(value.nbytes for value in block.parameters()) for block in self.blocks)

    @torch.no_grad()
    def embed(
        self, tokens: Tensor, tokens_per_part: int | None = None, room: MemoryBudget | None = None
    ) -> HiddenStates:
        """The inputs of the first block for ``tokens`` (samples, length), in batches.

        Args:
            tokens: The sequences.
            tokens_per_part: Of the parts of batches, see :meth:`HiddenStates.parts`, in which blocks are to run too.
            room: Where the inputs go, by default the model's.

        Raises:
            UnsupportedModelError: blocks get more from the tokens than their hidden states.
        """
        size = max(TOKENS_PER_BATCH, tokens_per_part or 0)
        states = HiddenStates(list(tokens.split(max(1, size // tokens.shape[1]))), SpillList(room or self.room))
        seen: list[Tensor] = []

        def record(index: int) -> Callable[..., Any]:
            def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
                before = states.arguments.setdefault((index, hidden.shape[0]), (args, kwargs))
                if not _same(before, (args, kwargs)):
                    raise UnsupportedModelError(
                        f"block {index} is told something about the tokens besides its hidden states; models "
                        "like this one are not supported"
                    )
                seen.append(hidden)
                return self._answer(hidden)

            return forward

        with self._outer_weights():
            if self._answers_tuple is None:
                self._answers_tuple = self._try_first(tokens[:1, :1])
            with self._replaced_blocks(record):
                for batch in states.tokens:
                    self._decoder(input_ids=batch.to(self.device), use_cache=False)
                    states.hidden.append(seen[0])
                    seen.clear()
                parts = states.parts(tokens_per_part) if tokens_per_part else []
                for samples in {rows.stop - rows.start for _, rows in parts}:
                    self._decoder(input_ids=tokens[:samples].to(self.device), use_cache=False)
        return states

    def _try_first(self, tokens: Tensor) -> bool:
        """What :meth:`_first_answers_tuple` says, if models of an unknown kind come that far.

        Raises:
            UnsupportedModelError: they do not.
        """
        try:
            return self._first_answers_tuple(tokens)
        except Exception as error:
            if self._known or isinstance(error, NiwakiError):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UnsupportedModelError(f"{self.checkpoint.path} cannot be run a block at a time: {reason}") from error

    def _first_answers_tuple(self, tokens: Tensor) -> bool:
        """Whether blocks answer with a tuple around their hidden states, as those of some families do."""
        answers: list[bool] = []

        def let_through(index: int) -> Callable[..., Any]:
            forward = type(self.blocks[index]).forward

            def first(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
                answer = forward(self.blocks[0], hidden, *args, **kwargs)
                answers.append(isinstance(answer, tuple | list))
                return answer

            return first if index == 0 else lambda hidden, *_, **__: (hidden,) if answers[0] else hidden

        weights = self._read(self.blocks[0], f"{self.path}.0.")
        with _holding(self.blocks[0], weights), self._replaced_blocks(let_through):
            self._decoder(input_ids=tokens.to(self.device), use_cache=False)
        return answers[0]

    def _answer(self, hidden: Tensor) -> Any:
        return (hidden,) if self._answers_tuple else hidden

    @torch.no_grad()
    def losses(self, states: HiddenStates) -> Tensor:
        """(samples, length - 1) float32 cross-entropies in nats, of each token given those before it.

        ``states`` are those after the last block.
        """
        losses = []
        with self.head() as head:
            for batch, ends in zip(states.tokens, states.hidden, strict=True):
                samples = max(1, LOGITS_PER_BATCH // (batch.shape[1] * self.config.vocab_size))
                for tokens, hidden in zip(batch.split(samples), ends.split(samples), strict=True):
                    logits = head(hidden, tokens)
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

    @contextlib.contextmanager
    def head(self, dtype: torch.dtype | None = None) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
        """What makes logits (samples, length, vocabulary) of hidden states behind the last block and their tokens.

        It computes in ``dtype``, by default the model's.
        """

        def logits(hidden: Tensor, tokens: Tensor) -> Tensor:
            """``hidden`` (samples, length, width), ``tokens`` (samples, length)."""
            with self._replaced_blocks(self._constant(hidden.to(dtype or hidden.dtype))):
                found: Tensor = self.model(input_ids=tokens.to(self.device), use_cache=False).logits
            return found

        with self._outer_weights(dtype):
            yield logits

    def stream(self, backwards: bool = False) -> Generator[DecoderBlock]:
        """The blocks in order, or the last one first, each with its weights until the next one is asked for.

        For a GPU those of the next block are read and copied meanwhile.
        """
        order = range(len(self.blocks))[:: -1 if backwards else 1]
        with ThreadPoolExecutor(1, "reader") if self._ahead else contextlib.nullcontext() as reader:
            coming: Future[dict[str, Tensor]] | None = None
            for index, after in zip_longest(order, order[1:]):
                module = self.blocks[index]
                weights = coming.result() if coming else self._read(module, f"{self.path}.{index}.")
                if reader and after is not None:
                    coming = reader.submit(self._read, self.blocks[after], f"{self.path}.{after}.")
                with _holding(module, weights):
                    del weights  # or they would stay while the next ones are read
                    block = DecoderBlock(index, module, self)
                    try:
                        yield block
                    finally:
                        block.forget()  # likewise

    @property
    def size(self) -> int:
        """Bytes of all weights while the whole model runs."""
        return sum(value.nbytes for value in self.model.parameters())

    @contextlib.contextmanager
    def whole(self) -> Iterator[PreTrainedModel]:
        """The model with all its weights, as a model of transformers."""
        with contextlib.ExitStack() as held:
            held.enter_context(self._outer_weights())
            for index, block in enumerate(self.blocks):
                held.enter_context(_holding(block, self._read(block, f"{self.path}.{index}.")))
            yield self.model

    def load(self, skip: Collection[str] = ()) -> PreTrainedModel:
        """The model with its weights and settings for generating text, for good.

        Of parameters whose keys in the checkpoint are in ``skip`` the weights are left out.
        """
        left = {name for name in self.model.state_dict() if not {*skip}.isdisjoint(self.layout.keys(name))}
        weights = {
            name: self.layout.read(name).to(self.device)
            for name in self.model.state_dict()
            if name in self.layout and name not in left
        }
        self.model.load_state_dict(weights, strict=False, assign=True)
        if any(value.is_meta for name, value in self.model.named_parameters() if name not in left):
            self.model.tie_weights()
        with contextlib.suppress(OSError):  # many models have none
            self.model.generation_config = GenerationConfig.from_pretrained(self.checkpoint.path)
        return self.model

    def parameter(self, block: int, name: str) -> Tensor:
        """The original weights of a parameter of a block, on the device."""
        return self.layout.read(f"{self.path}.{block}.{name}").to(self.device)

    def _read(self, module: nn.Module, prefix: str, skip: str | None = None) -> dict[str, Tensor]:
        """The weights of ``module`` but for those under ``skip``, on the device."""
        names = [
            name
            for name in module.state_dict()
            if prefix + name in self.layout and not (skip and name.startswith(skip))
        ]
        if self.device.type != "cuda":
            return {name: self.layout.read(prefix + name).to(self.device) for name in names}
        # On a stream of its own, so that copies and the present block's products go on side by side.
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            weights = {
                name: self.layout.read(prefix + name).pin_memory().to(self.device, non_blocking=True) for name in names
            }
        stream.synchronize()
        for value in weights.values():  # their memory is not to be used again before the other stream is done
            value.record_stream(torch.cuda.default_stream(self.device))
        return weights

    @contextlib.contextmanager
    def _outer_weights(self, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Everything outside the blocks: embeddings, last norm, head; in the model's dtype or another."""
        weights = self._read(self.model, "", skip=self.path + ".")
        if dtype is not None:
            weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
        with _holding(self.model, weights):
            del weights
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
    def _replaced_blocks(self, make: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
        """Blocks whose forward pass is ``make(index)``; their attributes, which parents read, stay."""
        try:
            for index, block in enumerate(self.blocks):
                block.forward = make(index)
            yield
        finally:
            for block in self.blocks:
                block.__dict__.pop("forward", None)

    def _constant(self, hidden: Tensor) -> Callable[[int], Callable[..., Any]]:
        """Blocks that answer ``hidden``, whatever goes in."""
        return lambda _: lambda *_, **__: self._answer(hidden)


@contextlib.contextmanager
def _holding(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """``module`` with ``weights``, of which it lets go at the end."""
    empty = {name: value for name, value in module.state_dict().items() if name in weights}
    try:
        module.load_state_dict(weights, strict=False, assign=True)
        del weights  # or what a block releases would stay
        yield
    finally:
        module.load_state_dict(empty, strict=False, assign=True)


def structure(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of ``config.json`` without memory for its parameters; buffers, which are computed, are real.

    Raises:
        UnsupportedModelError: it is not a decoder only.
        CheckpointError: transformers refuses the configuration.
    """
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        if config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{directory} is an encoder with a decoder ({config.model_type}); niwaki prunes models that "
                "are a decoder only"
            )
        with init_empty_weights(include_buffers=False):
            # One expert after the other: the other ways of running them sort tokens into one large product.
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
            assert isinstance(model, PreTrainedModel)
    except UnsupportedModelError:
        raise
    except Exception as error:  # transformers checks some values and stumbles over others
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason.split(" Model type should be one of ")[0]  # and all of them
        raise CheckpointError(f"{directory / 'config.json'} is refused by transformers: {reason}") from error
    model.eval().requires_grad_(False)
    return model


def _block_list(model: PreTrainedModel, kind: str) -> tuple[str, nn.ModuleList]:
    """(path, decoder blocks): the first list under the decoder that is as long as the model is deep."""
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    decoder = {id(module) for module in model.get_decoder().modules()}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth and id(module) in decoder:
            return path, module
    raise UnsupportedModelError(f"no list of {depth} decoder blocks can be found in a model of type {kind!r}")


def _parent(model: PreTrainedModel, path: str) -> nn.Module:
    return model.get_submodule(path.rpartition(".")[0])


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments of a block are equal."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and (a is b or (isinstance(a, bool | int | float | str | None) and a == b))
