"""Transformers models with one decoder block in memory at a time.

The model's structure is built without weights. Its embeddings and head are read when tokens go in or losses come out,
each block when its turn comes. A block's other arguments (rotary embeddings, masks) are recorded from the model's own
forward pass with blocks that return their inputs; for some families they differ from block to block.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, NumericalError, UnsupportedModelError, UsageError, one_line, raised_as
from niwaki.layer.problem import Gram
from niwaki.models.block import DecoderBlock
from niwaki.models.device import find_device, find_dtype
from niwaki.models.families import FAMILIES, is_reached
from niwaki.models.gram_capture import InputGrams
from niwaki.models.hidden_states import BlockArguments, HiddenStates, streams_first
from niwaki.models.interface import (
    Inputs,
    Interface,
    check_towers,
    find_interface,
    record_each,
    record_text,
    replaced_blocks,
)
from niwaki.models.layout import Layout, Matrix, check_dtypes
from niwaki.models.left_dense import coverage, left_dense
from niwaki.models.processes import World
from niwaki.models.sharing import by_first_use, only_in
from niwaki.models.spill import MemoryBudget, SpillList
from niwaki.models.structure import find_parts, refusals, structure
from niwaki.models.tokens import check_tokens, load_tokenizer
from niwaki.models.weights import Weights, holding
from niwaki.records.perplexity import Perplexity
from niwaki.windows import Windows

_ALONE = World()
#: The share of a decoder's weights that a pruned model without much of it still dense has in matrices to prune.
_LEAST_COVERAGE = 0.9
#: Tokens in one forward pass: enough to fill the cores, few enough for a block's activations.
TOKENS_PER_BATCH = 4096
#: Logits at a time, at least those of one window: more are no faster, and each takes 12 bytes.
LOGITS_PER_BATCH = 1 << 25
#: The default sequence length, as in the literature. The model's maximum may be 131,072.
DEFAULT_LENGTH = 2048


class StreamedModel:
    """A causal language model whose weights are in the checkpoint and not in memory.

    ``device`` and ``dtype`` are names, see :mod:`niwaki.models.device`; hidden states may take ``budget``. UsageError
    for unknown ones, CheckpointError for missing tensors, UnsupportedModelError for quantised weights or no blocks.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto", budget: MemoryBudget | None = None
    ) -> None:
        checkpoint.check_kind()
        self.checkpoint = checkpoint
        self.budget = budget or MemoryBudget()
        self.device = find_device(device)
        self.dtype = find_dtype(dtype, self.device, checkpoint)
        self.model = structure(checkpoint.path, self.dtype)
        self.config = self.model.config.get_text_config()
        for buffer in self.model.buffers():
            buffer.data = buffer.to(self.device)
        #: The most tokens in a window; None where the model has no limit.
        self.positions = getattr(self.config, "max_position_embeddings", None)
        if self.positions is not None and (type(self.positions) is not int or self.positions < 2):
            raise CheckpointError(f"{checkpoint.path / 'config.json'} gives the model {self.positions} positions")
        kind = str(checkpoint.config.get("model_type"))
        self._parts = find_parts(self.model, kind)
        self.path, self.blocks, self.decoder = self._parts.path, self._parts.blocks, self._parts.decoder
        #: Whether it makes predictions: an encoder may have none.
        self.has_head = self._parts.head is not None
        #: Whether it is an encoder, such as BERT: each token sees those after it too.
        is_causal = any(getattr(part, "is_causal", False) for part in self.blocks[0].modules())
        self.sees_ahead = not is_causal and not getattr(self.config, "is_decoder", True)
        self.layout = Layout(self.model, checkpoint)
        self._weights = Weights(self._parts, self.layout, self.device)
        used = [self.layout.matrices(i, f"{self.path}.{i}.", block) for i, block in enumerate(self.blocks)]
        empty = (block for block, matrices in zip(self.blocks, used, strict=True) if not matrices)
        if any(map(is_reached, empty)):
            raise UnsupportedModelError(f"{checkpoint.path} has blocks ({kind}) without matrices to prune")
        self._matrices, self._shared = by_first_use(used)
        #: What is not pruned.
        self.left_dense = left_dense(self._parts, self.layout, self.matrices())
        #: What a record should say of the model.
        self.notes = [*checkpoint.notes, *self._notes(kind)]
        self._found: Interface | None = None  # not known yet
        self._ahead = self.device.type == "cuda"  # whether to read the next block while the present one is at work

    def _notes(self, kind: str) -> Iterator[str]:
        if kind not in FAMILIES:
            names = ", ".join(dict.fromkeys(re.sub(r"\d+", "N", m.name) for m in self.matrices()))
            yield (
                f"{kind!r} is not among the model families that niwaki is tested with; by its structure it has "
                f"{len(self.blocks)} blocks with {names}"
            )
        if self.sees_ahead:
            yield f"{kind!r} is an encoder, whose tokens see those after them: perplexity says little of it"

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer; errors as of :func:`.load_tokenizer`."""
        return load_tokenizer(self.checkpoint.path)

    def check_coverage(self) -> None:
        """Raises UnsupportedModelError where much of the decoder's weights is in nothing that can be pruned."""
        share = coverage(self.left_dense)
        if share < _LEAST_COVERAGE:
            raise UnsupportedModelError(
                f"{self.checkpoint.path}: only {100 * share:.0f} % of the decoder's weights are in matrices that can "
                f"be pruned; to prune these alone, say so with --blocks 0:{len(self.blocks)}. The others are "
                f"{', '.join(map(str, self.left_dense[:4]))}" + (" and more" if len(self.left_dense) > 4 else "")
            )

    def window_length(self, asked: int | None) -> int:
        """The sequence length, if none was ``asked`` for the usual one; UsageError beyond the model's positions."""
        positions = self.positions or DEFAULT_LENGTH
        length = min(DEFAULT_LENGTH, positions) if asked is None else asked
        if length > positions:
            raise UsageError(f"a length of {length:,} is more than the model's {positions:,} positions")
        return length

    def check(self, tokens: Tensor) -> None:
        """Raises UsageError unless ``tokens`` are (samples, length) int64 that the model can take."""
        if tokens.ndim != 2 or tokens.dtype != torch.int64 or not tokens.numel() or tokens.device.type != "cpu":
            given = f"{tuple(tokens.shape)} {tokens.dtype} on {tokens.device}"
            raise UsageError(f"tokens are (samples, length) int64 on the CPU; got {given}")
        check_tokens(tokens, self.config)
        self.window_length(tokens.shape[1])

    def matrices(self, block: int | None = None) -> list[Matrix]:
        """The matrices that can be pruned, of one block or of all; one of several blocks is the first one's."""
        chosen = self._matrices if block is None else [self._matrices[block]]
        return [matrix for matrices in chosen for matrix in matrices]

    def limit(self, blocks: range) -> None:
        """From now on only the matrices of ``blocks`` can be pruned."""
        self._matrices, self._shared, notes = only_in(blocks, self._matrices, self._shared)
        self.notes += notes

    def uses(self, matrix: Matrix) -> list[Matrix]:
        """``matrix``, and what it is in later blocks."""
        return [matrix, *(each for shared in self._shared for each in shared if each.entry == matrix.entry)]

    @property
    def block_size(self) -> int:
        """Bytes of the largest block's weights while it runs."""
        return max(sum(value.nbytes for value in block.parameters()) for block in self.blocks)

    @torch.no_grad()
    def embed(
        self,
        samples: Tensor | Sequence[Inputs],
        tokens_per_minibatch: int | None = None,
        budget: MemoryBudget | None = None,
    ) -> HiddenStates:
        """The inputs of the first block for ``samples``: tokens (samples, length), in batches.

        Samples of more than text, see :mod:`.conversations`, are a batch each, of the whole model's own forward pass.
        They may take ``budget``, by default the model's. With ``tokens_per_minibatch`` blocks can also run on
        :meth:`HiddenStates.minibatches`. UnsupportedModelError where blocks receive more than can be kept.
        """
        budget = budget or self.budget
        with self._weights.outside(has_towers=not isinstance(samples, Tensor)):
            interface = self._find_interface()
            states = HiddenStates([], SpillList(budget), BlockArguments(budget), interface.leading)
            if isinstance(samples, Tensor):
                size = max(TOKENS_PER_BATCH, tokens_per_minibatch or 0)
                states.tokens += samples.split(max(1, size // samples.shape[1]))
                record_text(self._decode, self.blocks, interface, states, tokens_per_minibatch)
            else:
                check_towers(self.model, self.path, self.checkpoint.path)
                what = f"{self.checkpoint.path} cannot be run with images"
                with raised_as(UnsupportedModelError, what, reason=one_line):
                    record_each(self._see, self.blocks, interface, states, samples)
        return states

    def _decode(self, tokens: Tensor) -> None:
        self.decoder(input_ids=tokens.to(self.device), use_cache=False)

    def _see(self, inputs: Inputs) -> None:
        given = {name: value.to(self.device) for name, value in inputs.items()}
        given |= {name: value.to(self.dtype) for name, value in given.items() if value.is_floating_point()}
        self.model(**given, use_cache=False)

    @property
    def interface(self) -> Interface:
        """How blocks and what is around them work together."""
        if self._found is not None:
            return self._found
        with self._weights.outside():
            return self._find_interface()

    def _find_interface(self) -> Interface:
        """The same, where the weights outside the blocks are there."""
        if self._found is None:
            what = f"{self.checkpoint.path} cannot be run a block at a time"
            refused = raised_as(UnsupportedModelError, what, reason=one_line)
            with refused, holding(self.blocks[0], self._weights.of_block(0)):
                self._found = find_interface(self.decoder, self.blocks, self.device, self.config.vocab_size)
        return self._found

    @torch.no_grad()
    def losses(self, states: HiddenStates) -> Tensor:
        """(samples, length - 1) float32 cross-entropies in nats, by ``states`` after the last block."""
        losses = []
        with self.head() as head:
            for batch, ends in zip(states.tokens, states.hidden, strict=True):
                samples = max(1, LOGITS_PER_BATCH // (batch.shape[1] * self.config.vocab_size))
                for tokens, hidden in zip(batch.split(samples), ends.split(samples), strict=True):
                    logits = head(hidden, tokens)
                    labels = tokens[:, 1:].flatten().to(self.device)
                    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels, reduction="none")
                    losses.append(loss.view(len(tokens), -1).cpu())
        joined = torch.cat(losses)
        if not torch.isfinite(joined).all():
            raise NumericalError("the model's outputs are NaN or infinite on this text; try dtype float32")
        return joined

    def measured(self, states: HiddenStates, windows: Windows, world: World = _ALONE) -> Perplexity:
        """The perplexity, by ``states`` after the last block, of each process's share of ``windows``."""
        losses, counts = self.losses(states), tuple[int, ...]()
        if windows.spans is not None:
            places = torch.arange(1, losses.shape[1] + 1)
            predicted = (places >= windows.spans[:, :1]) & (places < windows.spans[:, 1:])
            losses, counts = losses * predicted, tuple(predicted.sum(dim=1).tolist())
        shares = world.collected((losses, counts, windows.bytes))
        every, counted, lengths = zip(*shares, strict=True)
        return Perplexity.of(torch.cat(every), windows.source, windows.origin, sum(counted, ()), sum(lengths, ()))

    def perplexity(
        self, windows: Windows, done: Callable[[int, int], None] = lambda *_: None, world: World = _ALONE
    ) -> Perplexity:
        """The perplexity on ``windows``, each process's share; ``done(blocks, of)`` is called after each block."""
        self.check_head()
        states = self.embed(windows.tokens)
        for block in self.stream():
            block.advance(states)
            done(block.index + 1, len(self.blocks))
        return self.measured(states, windows, world)

    def check_head(self) -> None:
        """Raises UnsupportedModelError where the model makes no predictions."""
        if not self.has_head:
            path = self.checkpoint.path
            raise UnsupportedModelError(f"{path} has no head, and makes no predictions of words, which this needs")

    @property
    def embedding_keys(self) -> list[str]:
        """The keys of the token embeddings and the head, of which one is both where they are tied.

        UnsupportedModelError where they are not matrices of the checkpoint with a row for each token.
        """
        parts = {"embeddings": self.model.get_input_embeddings(), "head": self._parts.head}
        found = dict[str, None]()
        for what, module in parts.items():
            if module is None:
                continue
            names = [name for name, each in self.model.named_modules(remove_duplicate=False) if each is module]
            keys = [key for name in names for key in self.layout.keys(f"{name}.weight")]
            if not isinstance(module, nn.Embedding | nn.Linear) or len({*keys}) != 1:
                raise UnsupportedModelError(
                    f"the {what} of {self.checkpoint.path} are {type(module).__name__}, and not one matrix of its "
                    "files; they cannot be put on a grid"
                )
            found[keys[0]] = None
        check_dtypes(self.checkpoint, found)
        return list(found)

    @torch.no_grad()
    def head_gram(self, states: HiddenStates, world: World = _ALONE) -> Gram:
        """Of the head's inputs, over all processes, by ``states`` after the last block.

        UnsupportedModelError as of :attr:`embedding_keys`, NumericalError for inputs that are NaN or infinite.
        """
        key = self.embedding_keys[-1]
        rows, columns = self.checkpoint.entries[key].shape
        matrix = Matrix(len(self.blocks), "the head", key, (rows, columns), "weight")
        with self.head() as head:
            assert isinstance(self._parts.head, nn.Linear)  # as its key was found
            grams = InputGrams([matrix], {"weight": self._parts.head.weight})
            for batch, ends in zip(states.tokens, states.hidden, strict=True):
                for tokens, hidden in zip(batch.split(1), ends.split(1), strict=True):
                    grams.watch(functools.partial(head, hidden, tokens))
        return grams.finish(world)[0].gram(shared=True)

    @contextlib.contextmanager
    def head(self, dtype: torch.dtype | None = None) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
        """What makes logits (samples, length, vocabulary) of the last hidden states and their tokens, in ``dtype``."""
        self.check_head()
        run = self._behind_blocks(self._parts.speaker)

        def logits(hidden: Tensor, tokens: Tensor) -> Tensor:
            values: Tensor = run(hidden.to(dtype or hidden.dtype), tokens).logits
            return values

        with self._weights.outside(dtype):
            yield logits

    @contextlib.contextmanager
    def last_states(self) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
        """What makes the states (samples, length, width) after the last norm, of the last hidden ones and their tokens.

        It is what the head would receive, and what a model without one gives.
        """
        run = self._behind_blocks(self.decoder)

        def states(hidden: Tensor, tokens: Tensor) -> Tensor:
            values: Tensor = run(hidden, tokens).last_hidden_state
            return values

        with self._weights.outside():
            yield states

    def _behind_blocks(self, module: nn.Module) -> Callable[[Tensor, Tensor], Any]:
        """``module``, which has the blocks in it, for last hidden states and their tokens: what it makes of these."""
        interface = self.interface

        def run(hidden: Tensor, tokens: Tensor) -> Any:
            answer = interface.answer(streams_first(hidden, interface.leading))
            with replaced_blocks(self.blocks, lambda _: lambda *_, **__: answer):
                return module(input_ids=tokens.to(self.device), use_cache=False)

        return run

    def stream(self, order: Sequence[int] | None = None) -> Generator[DecoderBlock]:
        """The blocks one after the other, each with its weights until the next one is asked for.

        In another ``order`` than theirs a block can come twice, and then is read twice.
        """
        if order is None:
            order = range(len(self.blocks))
        coming: Future[dict[str, Tensor]] | None = None
        with ThreadPoolExecutor(1, "reader") if self._ahead else contextlib.nullcontext() as reader:
            for index, after in zip_longest(order, order[1:]):
                weights = coming.result() if coming else self._weights.of_block(index)
                if reader and after is not None:
                    coming = reader.submit(self._weights.of_block, after)
                module, matrices, shared = self.blocks[index], self._matrices[index], self._shared[index]
                where = f"{self.path}.{index}.", self.layout, self.budget, self.device, self.dtype
                block = DecoderBlock(index, module, matrices, shared, *where)
                with holding(module, weights):
                    del weights  # or they would stay while the next ones are read
                    yield block

    @property
    def size(self) -> int:
        """Bytes of all weights while the whole model runs."""
        return sum(value.nbytes for value in self.model.parameters())

    @contextlib.contextmanager
    def whole(self) -> Iterator[PreTrainedModel]:
        """The model with all its weights, as a model of transformers."""
        with self._weights.whole():
            yield self.model

    def load(self, skip: Collection[str] = ()) -> PreTrainedModel:
        """The model to stay in memory, with its settings for generating text; keys of the checkpoint to ``skip``."""
        self._weights.load(skip)
        file = self.checkpoint.path / "generation_config.json"
        if file.exists():  # many models have none
            with refusals(file):
                self.model.generation_config = GenerationConfig.from_pretrained(self.checkpoint.path)
        return self.model

    def unload(self) -> None:
        """Frees what :meth:`load` has read; from then on the model does not run."""
        self._weights.unload()
