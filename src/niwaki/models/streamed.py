"""Transformers models with one decoder block in memory at a time.

The model's structure is built without weights. Its embeddings and head are read when tokens go in or losses come out,
each block when its turn comes. A block's other arguments (rotary embeddings, masks) are recorded from the model's own
forward pass with blocks that return their inputs; for some families they differ from block to block.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, NumericalError, UnsupportedModelError, UsageError, unsupported
from niwaki.models.block import DecoderBlock
from niwaki.models.block_arguments import BlockArguments
from niwaki.models.device import find_device, find_dtype, return_freed
from niwaki.models.families import FAMILIES, is_in_tower, is_reached
from niwaki.models.hidden_states import HiddenStates, streams_first
from niwaki.models.interface import Interface, find_interface, replaced_blocks
from niwaki.models.layout import Layout, Matrix
from niwaki.models.left_dense import coverage, left_dense
from niwaki.models.processes import World
from niwaki.models.recording import Inputs, check_towers, record_each, record_text
from niwaki.models.sharing import by_first_use, only_in
from niwaki.models.spill import MemoryBudget, SpillList
from niwaki.models.structure import decoder_of, find_blocks, refusals, structure
from niwaki.models.tokens import check_tokens
from niwaki.records.perplexity import Perplexity
from niwaki.records.record import LeftDense
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
        kind = str(checkpoint.config.get("model_type"))
        #: The most tokens in a window; None where the model has no limit.
        self.positions = getattr(self.config, "max_position_embeddings", None)
        if self.positions is not None and (type(self.positions) is not int or self.positions < 2):
            raise CheckpointError(f"{checkpoint.path / 'config.json'} gives the model {self.positions} positions")
        self.path, self.blocks = find_blocks(self.model, kind)
        decoder = decoder_of(self.model)
        head, block = self.model.get_output_embeddings(), self.blocks[0]
        #: Whether it makes predictions: an encoder may have none.
        self.has_head = head is not None
        #: Without the head: LLaMA 4 says that it is part of its decoder.
        is_within = self.has_head and head in decoder.modules()
        self.decoder = self.model.get_submodule(self.path.rpartition(".")[0]) if is_within else decoder
        #: The decoder with the head: some models have other parts around both, which do not run without images.
        models = [module for module in self.model.modules() if isinstance(module, PreTrainedModel)]
        self._speaker = [self.model, *(model for model in models if {head, block}.issubset(model.modules()))][-1]
        self._decoder = next(f"{name}." for name, module in self.model.named_modules() if module is self.decoder)
        #: What is needed of towers: where they are in the decoder, and where a model takes its device from.
        self._with_text = {name for name in self.model.state_dict() if name.startswith(self._decoder)}
        for path, module in self.model.named_modules():
            if isinstance(module, PreTrainedModel):
                self._with_text |= {f"{path}.{name}".lstrip(".") for name, _ in [*module.named_parameters()][:1]}
        self.layout = Layout(self.model, checkpoint)
        #: Parameters outside the blocks that are the same as others, for as long as these are there.
        self._ties = {name: other for name, other in self.layout.ties.items() if not self._is_inside(name)}
        for pair in self.layout.ties.items():
            if self._is_inside(pair[0]) != self._is_inside(pair[1]):
                raise UnsupportedModelError(
                    f"{pair[0]!r} is the same as {pair[1]!r}; blocks that share weights with the rest of the model are "
                    "not supported"
                )
        used = [self.layout.matrices(i, f"{self.path}.{i}.", block) for i, block in enumerate(self.blocks)]
        empty = (block for block, matrices in zip(self.blocks, used, strict=True) if not matrices)
        if any(map(is_reached, empty)):
            raise UnsupportedModelError(f"{checkpoint.path} has blocks ({kind}) without matrices to prune")
        self._matrices, self._shared = by_first_use(used)
        #: What is not pruned, see :mod:`.left_dense`.
        self.left_dense = self._left_dense()
        self.notes = checkpoint.notes
        if kind not in FAMILIES:
            names = ", ".join(dict.fromkeys(re.sub(r"\d+", "N", m.name) for m in self.matrices()))
            self.notes.append(
                f"{kind!r} is not among the model families that niwaki is tested with; by its structure it has "
                f"{len(self.blocks)} blocks with {names}"
            )
        #: Whether it is an encoder, such as BERT: each token sees those after it too.
        is_causal = any(getattr(part, "is_causal", False) for part in self.blocks[0].modules())
        self.sees_ahead = not is_causal and not getattr(self.config, "is_decoder", True)
        if self.sees_ahead:
            self.notes.append(
                f"{kind!r} is an encoder, whose tokens see those after them: perplexity says little of it"
            )
        self._found: Interface | None = None  # not known yet
        self._ahead = self.device.type == "cuda"  # whether to read the next block while the present one is at work

    def _is_inside(self, name: str) -> bool:
        return name.startswith(f"{self.path}.")

    def _left_dense(self) -> list[LeftDense]:
        sizes = Counter[str]()
        for matrix in self.matrices():
            name = f"{self.path}.{matrix.block}.{matrix.parameter}"
            sizes[self.layout.ties.get(name, name)] += matrix.size
        parameters = dict(self.model.named_parameters())
        ends = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        return left_dense(
            self.decoder,
            self.path.removeprefix(self._decoder),
            {id(parameters[name]): size for name, size in sizes.items()},
            {id(value) for end in ends if end is not None for value in end.parameters()}
            | {id(parameters[name]) for name in self.layout.ties if name in parameters},
        )

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
            raise UsageError(f"the sequence length {length:,} is more than the model's {positions:,} positions")
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
        with self._outer_weights(has_towers=not isinstance(samples, Tensor)):
            interface = self._find_interface()
            states = HiddenStates([], SpillList(budget), BlockArguments(budget), interface.leading)
            if isinstance(samples, Tensor):
                size = max(TOKENS_PER_BATCH, tokens_per_minibatch or 0)
                states.tokens += samples.split(max(1, size // samples.shape[1]))
                record_text(self._decode, self.blocks, interface, states, tokens_per_minibatch)
            else:
                check_towers(self.model, self.path, self.checkpoint.path)
                with unsupported(f"{self.checkpoint.path} cannot be run with images"):
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
        with self._outer_weights():
            return self._find_interface()

    def _find_interface(self) -> Interface:
        """The same, where the weights outside the blocks are there."""
        if self._found is None:
            what = f"{self.checkpoint.path} cannot be run a block at a time"
            with unsupported(what), _holding(self.blocks[0], self._read(0)):
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
        return Perplexity.of(torch.cat(world.collected(self.losses(states))), windows.source, windows.origin)

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
            raise UnsupportedModelError(f"{path} has no head, and makes no predictions of words; it can only be pruned")

    @contextlib.contextmanager
    def head(self, dtype: torch.dtype | None = None) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
        """What makes logits (samples, length, vocabulary) of the last hidden states and their tokens, in ``dtype``."""
        self.check_head()

        interface = self.interface

        def logits(hidden: Tensor, tokens: Tensor) -> Tensor:
            answer = interface.answer(streams_first(hidden.to(dtype or hidden.dtype), interface.leading))
            with replaced_blocks(self.blocks, lambda _: lambda *_, **__: answer):
                values: Tensor = self._speaker(input_ids=tokens.to(self.device), use_cache=False).logits
            return values

        with self._outer_weights(dtype):
            yield logits

    def stream(self, backwards: bool = False) -> Generator[DecoderBlock]:
        """The blocks in order, or the last one first, each with its weights until the next one is asked for."""
        order = range(len(self.blocks))[:: -1 if backwards else 1]
        coming: Future[dict[str, Tensor]] | None = None
        with ThreadPoolExecutor(1, "reader") if self._ahead else contextlib.nullcontext() as reader:
            for index, after in zip_longest(order, order[1:]):
                weights = coming.result() if coming else self._read(index)
                if reader and after is not None:
                    coming = reader.submit(self._read, after)
                module, matrices, shared = self.blocks[index], self._matrices[index], self._shared[index]
                where = f"{self.path}.{index}.", self.layout, self.budget, self.device, self.dtype
                block = DecoderBlock(index, module, matrices, shared, *where)
                with _holding(module, weights):
                    del weights  # or they would stay while the next ones are read
                    yield block

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
                held.enter_context(_holding(block, self._read(index)))
            yield self.model

    def load(self, skip: Collection[str] = ()) -> PreTrainedModel:
        """The model to stay in memory, with its settings for generating text; keys of the checkpoint to ``skip``."""
        left = {name for name in self.model.state_dict() if not {*skip}.isdisjoint(self.layout.keys(name))}
        names = [name for name in self.model.state_dict() if self._is_read(name) and name not in left]
        weights = {name: self.layout.read(name).to(self.device) for name in names}
        self.model.load_state_dict(weights, strict=False, assign=True)
        if any(value.is_meta for name, value in self.model.named_parameters() if name not in left):
            self.model.tie_weights()
        file = self.checkpoint.path / "generation_config.json"
        if file.exists():  # many models have none
            with refusals(file):
                self.model.generation_config = GenerationConfig.from_pretrained(self.checkpoint.path)
        return self.model

    def unload(self) -> None:
        """Frees what :meth:`load` has read; from then on the model does not run."""
        self.model.to_empty(device="meta")
        return_freed()

    def _is_read(self, name: str) -> bool:
        """Whether the checkpoint has a parameter or buffer, and under no other name."""
        return bool(self.layout.keys(name)) and name not in self.layout.ties

    def _read(self, block: int | None, has_towers: bool = False) -> dict[str, Tensor]:
        """The weights of a block, or those outside the blocks, on the device; of towers only if it ``has_towers``."""
        if block is None:
            outside = (name for name in self.model.state_dict() if self._is_read(name) and not self._is_inside(name))
            wanted = (name for name in outside if has_towers or not is_in_tower(name) or name in self._with_text)
            prefix, names = "", list(wanted)
        else:
            prefix, names = f"{self.path}.{block}.", list(self.blocks[block].state_dict())
        names = [name for name in names if self.layout.keys(prefix + name)]
        if self.device.type != "cuda":
            return {name: self.layout.read(prefix + name).to(self.device) for name in names}
        # On a stream of its own, so that copies and the present block's products run side by side.
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            pinned = ((name, self.layout.read(prefix + name).pin_memory()) for name in names)
            weights = {name: value.to(self.device, non_blocking=True) for name, value in pinned}
        stream.synchronize()
        for value in weights.values():  # their memory is not to be used again before the other stream is done
            value.record_stream(torch.cuda.default_stream(self.device))
        return weights

    @contextlib.contextmanager
    def _outer_weights(self, dtype: torch.dtype | None = None, has_towers: bool = False) -> Iterator[None]:
        """Everything outside the blocks: embeddings, last norm, head, maybe towers; in the model's dtype or another."""
        weights = self._read(None, has_towers)
        if dtype is not None:
            weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
        with _holding(self.model, weights):
            del weights
            own = {name: self.model.get_parameter(name) for name in self._ties}
            try:
                for name, other in self._ties.items():
                    self._set(name, self.model.get_parameter(other))
                yield
            finally:
                for name, value in own.items():
                    self._set(name, value)

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        path, _, own = name.rpartition(".")
        setattr(self.model.get_submodule(path), own, parameter)


@contextlib.contextmanager
def _holding(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """``module`` with ``weights``, which it frees at the end."""
    empty = {name: value for name, value in module.state_dict().items() if name in weights}
    try:
        module.load_state_dict(weights, strict=False, assign=True)
        del weights  # or what a block releases would stay
        yield
    finally:
        module.load_state_dict(empty, strict=False, assign=True)
