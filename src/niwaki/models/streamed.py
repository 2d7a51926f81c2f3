"""Transformers models with one decoder block in memory at a time.

The model's structure is built without weights. Its embeddings and head are read when tokens go in or losses come out,
each block when its turn comes. A block's other arguments (rotary embeddings, masks) are recorded from the model's own
forward pass with blocks that return their inputs; for some families they differ from block to block.
"""

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, NumericalError, UnsupportedModelError, UsageError, one_line, raised_as
from niwaki.models.block import DecoderBlock
from niwaki.models.crossing import Answers, PairInputs, find_crossing
from niwaki.models.device import find_device, find_dtype, return_freed
from niwaki.models.hidden_states import (
    BlockArguments,
    Crossing,
    HiddenStates,
    MemoryBudget,
    SpillList,
    pieces,
    streams_first,
)
from niwaki.models.interface import (
    Inputs,
    Interface,
    check_towers,
    count_answers,
    find_interface,
    record_each,
    record_text,
    replaced_blocks,
)
from niwaki.models.layout import Layout, Matrix, by_first_use, only_in
from niwaki.models.pairs import parted
from niwaki.models.processes import World
from niwaki.models.structure import (
    ENCODER_DECODERS,
    FAMILIES,
    Parts,
    choice,
    config_of_text,
    find_parts,
    is_bidirectional,
    is_cross_attention,
    is_in_tower,
    is_reached,
    predicts_words,
    refusals,
    structure,
)
from niwaki.models.tokens import check_tokens, load_tokenizer
from niwaki.records.perplexity import Divergence, Perplexity
from niwaki.records.progress import Progress
from niwaki.records.record import LeftDense
from niwaki.records.wording import kind
from niwaki.windows import Windows


class Weights:
    """The weights of a model with these ``parts``, which the checkpoint has as its ``layout`` says.

    They are read where they are needed, and freed after that.

    UnsupportedModelError where blocks share weights with the rest of the model.
    """

    def __init__(self, parts: Parts, layout: Layout, device: torch.device) -> None:
        self._model, self._blocks, self._layout, self._device = parts.model, parts.blocks, layout, device
        self._inside, self._places = parts.inside, parts.places
        #: What is needed of towers: where they are in the decoder, and where a model takes its device from.
        self._with_text = {name for name in self._names if name.startswith(parts.decoder_path)}
        for path, module in self._model.named_modules():
            if isinstance(module, PreTrainedModel):
                self._with_text |= {f"{path}.{name}".lstrip(".") for name, _ in [*module.named_parameters()][:1]}
        #: Parameters outside the blocks that are the same as others, for as long as these are there.
        self._ties = {name: other for name, other in layout.ties.items() if not name.startswith(self._inside)}
        for name, other in layout.ties.items():
            if name.startswith(self._inside) != other.startswith(self._inside):
                raise UnsupportedModelError(
                    f"{name!r} is the same as {other!r}; blocks that share weights with the rest of the model are not "
                    "supported"
                )

    def of_block(self, index: int) -> dict[str, Tensor]:
        """The weights of a block, by their names in it, on the device."""
        prefix, names = self._places[index], self._blocks[index].state_dict()
        return self._read([name for name in names if self._layout.keys(prefix + name)], prefix)

    @contextlib.contextmanager
    def outside(self, dtype: torch.dtype | None = None, has_towers: bool = False) -> Iterator[None]:
        """The model with all outside the blocks: embeddings, last norm, head, maybe towers; in another dtype if given.

        Towers are there if it ``has_towers``, and what else is needed of them.
        """
        names = [name for name in self._names if self._is_read(name) and not name.startswith(self._inside)]
        weights = self._read([name for name in names if has_towers or not is_in_tower(name) or name in self._with_text])
        if dtype is not None:
            weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
        with holding(self._model, weights):
            del weights
            own = {name: self._model.get_parameter(name) for name in self._ties}
            try:
                for name, other in self._ties.items():
                    self._set(name, self._model.get_parameter(other))
                yield
            finally:
                for name, value in own.items():
                    self._set(name, value)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """The model with all of them."""
        with contextlib.ExitStack() as held:
            held.enter_context(self.outside())
            for index, block in enumerate(self._blocks):
                held.enter_context(holding(block, self.of_block(index)))
            yield

    def load(self, skip: Collection[str]) -> None:
        """Reads all of them to stay, but those that are in keys of the checkpoint to ``skip``."""
        left = {name for name in self._names if not {*skip}.isdisjoint(self._layout.keys(name))}
        names = (name for name in self._names if self._is_read(name) and name not in left)
        weights = {name: self._layout.read(name).to(self._device) for name in names}
        self._model.load_state_dict(weights, strict=False, assign=True)
        if any(value.is_meta for name, value in self._model.named_parameters() if name not in left):
            self._model.tie_weights()

    def unload(self) -> None:
        """Frees what :meth:`load` has read; from then on the model does not run."""
        self._model.to_empty(device="meta")
        return_freed()

    @property
    def _names(self) -> Iterable[str]:
        return self._model.state_dict()

    def _is_read(self, name: str) -> bool:
        """Whether the checkpoint has a parameter or buffer, and under no other name."""
        return bool(self._layout.keys(name)) and name not in self._layout.ties

    def _read(self, names: list[str], prefix: str = "") -> dict[str, Tensor]:
        """The parameters ``names``, which the model has behind ``prefix``, on the device."""
        if self._device.type != "cuda":
            return {name: self._layout.read(prefix + name).to(self._device) for name in names}
        # On a stream of its own, so that copies and the present block's products run side by side.
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            pinned = ((name, self._layout.read(prefix + name).pin_memory()) for name in names)
            weights = {name: value.to(self._device, non_blocking=True) for name, value in pinned}
        stream.synchronize()
        for value in weights.values():  # their memory is not to be used again before the other stream is done
            value.record_stream(torch.cuda.default_stream(self._device))
        return weights

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        path, _, own = name.rpartition(".")
        setattr(self._model.get_submodule(path), own, parameter)


@contextlib.contextmanager
def holding(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """``module`` with ``weights``, which it frees at the end."""
    empty = {name: value for name, value in module.state_dict().items() if name in weights}
    try:
        module.load_state_dict(weights, strict=False, assign=True)
        del weights  # or what a block releases would stay
        yield
    finally:
        module.load_state_dict(empty, strict=False, assign=True)


# What of a decoder's weights is not pruned, and why not.

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: Why weights do not belong to what a language model computes of text.
_OUTSIDE = {
    _TOWER := "not of the language model",
    _CROSS := "cross-attention, which text alone does not reach",
    _FRONT := "before the encoder's blocks",
}


def left_dense(parts: Parts, layout: Layout, matrices: Iterable[Matrix]) -> list[LeftDense]:
    """The tensors of two dimensions or more that stay as they are, those of all blocks as one; the largest first.

    ``matrices`` are what can be pruned. Embeddings and the head are no part of this.
    """
    parameters = dict(parts.model.named_parameters())
    ends = parts.model.get_input_embeddings(), parts.head
    others = {id(value) for end in ends if end is not None for value in end.parameters()}
    others |= {id(parameters[name]) for name in layout.ties if name in parameters}
    pruned, places, crosses = 0, parts.places, parts.encoded > 0
    for matrix in matrices:
        name = f"{places[matrix.block]}{matrix.parameter}"
        others.add(id(parameters[layout.ties.get(name, name)]))
        pruned += matrix.size
    unreached = tuple(
        place for place, block in zip(places, parts.blocks, strict=True) if not crosses and not is_reached(block)
    )
    sizes, reasons = Counter[str](), dict[str, str]()
    for path, module in parts.decoder.named_modules():
        where = f"{parts.decoder_path}{path}."
        for own, value in module.named_parameters(recurse=False):
            inside = next((stack.path for stack in parts.stacks if where.startswith(f"{stack.path}.")), None)
            name = kind(f"{where}{own}".removeprefix(parts.decoder_path).removesuffix(".weight"))
            # Of other lists of blocks, and of towers, it is enough to say where they are.
            shown = kind(f"{inside}.".removeprefix(parts.decoder_path)) + "*."
            name = name.removeprefix(shown) if inside else name.partition(".*")[0]
            is_vector = sum(size > 1 for size in value.shape) < 2
            if is_vector or "bias" in own or isinstance(module, nn.Embedding) or id(value) in others:
                continue
            sizes[name] += value.numel()
            reasons[name] = _CROSS if where.startswith(unreached) else _reason(path, module, bool(inside), crosses)
    total = pruned + sum(sizes.values())
    return [LeftDense(name, size, size / total, reasons[name]) for name, size in sizes.most_common()]


def coverage(left: Collection[LeftDense]) -> float:
    """The share of a language model's weights in tensors of its decoder that can be pruned."""
    towers = sum(each.share for each in left if each.reason in _OUTSIDE)
    return 1 - (sum(each.share for each in left) - towers) / max(1e-9, 1 - towers)


def _reason(where: str, module: nn.Module, is_inside: bool, crosses: bool) -> str:
    if chooses := choice(where):
        return chooses
    if is_in_tower(where):
        return _TOWER
    if is_cross_attention(where) and not crosses:
        return _CROSS
    if crosses and not is_inside and "encoder" in where.split("."):
        return _FRONT
    if isinstance(module, _CONVOLUTIONS):
        return "convolution"
    return "no matrix of a known kind" if is_inside else "outside of the blocks"


_ALONE = World()
#: What makes something of the last hidden states (samples, length, ..) and their tokens (samples, length).
_Ending = Callable[[Tensor, Tensor], Tensor]
#: The share of a decoder's weights that a pruned model without much of it still dense has in matrices to prune.
_LEAST_COVERAGE = 0.75
#: Tokens in one forward pass: enough to fill the cores, few enough for a block's activations.
TOKENS_PER_BATCH = 4096
#: Logits at a time, at least those of one token: more are no faster, and each takes 12 bytes.
LOGITS_PER_BATCH = 1 << 25
#: The default sequence length, as in the literature. The model's maximum may be 131,072.
DEFAULT_LENGTH = 2048


class StreamedModel:
    """A causal language model whose weights are in the checkpoint and not in memory.

    ``device`` and ``dtype`` are names, see :mod:`niwaki.models.device`; hidden states may take ``budget``. UsageError
    for unknown ones, CheckpointError for missing tensors, UnsupportedModelError for quantized weights or no blocks.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto", budget: MemoryBudget | None = None
    ) -> None:
        checkpoint.check_kind()
        self.checkpoint = checkpoint
        self.budget = budget or MemoryBudget()
        self.device = find_device(device)
        self.dtype = find_dtype(dtype, self.device, checkpoint)
        has_words = predicts_words(checkpoint.path, checkpoint.entries)
        self.model = structure(checkpoint.path, self.dtype, has_words)
        if getattr(self.model, "pooler", None) is not None and not any("pooler." in key for key in checkpoint.entries):
            self.model.register_module("pooler", None)  # which files of a model that filled in words are without
        #: That of the language model, or of the decoder.
        self.config = config_of_text(self.model.config)
        for buffer in self.model.buffers():
            buffer.data = buffer.to(self.device)
        #: The most tokens in a window; None where the model has no limit.
        of_targets = getattr(self.config, "max_target_positions", None)
        self.positions = getattr(self.config, "max_position_embeddings", of_targets)
        if self.positions is not None and (type(self.positions) is not int or self.positions < 2):
            raise CheckpointError(f"{checkpoint.path / 'config.json'} gives the model {self.positions} positions")
        for name, table in self.model.named_modules():
            if isinstance(table, nn.Embedding) and "position" in name and table.padding_idx is not None:
                self.positions = table.num_embeddings - table.padding_idx - 1  # as in RoBERTa: 512 of 514
        kind = str(checkpoint.config.get("model_type"))
        self._parts = find_parts(self.model, kind)
        self.blocks, self.places, self.decoder = self._parts.blocks, self._parts.places, self._parts.decoder
        #: Whether it makes predictions of words: others make vectors or scores of texts.
        self.has_head = has_words and self._parts.head is not None
        #: Whether it is a classifier, which gives texts or tokens scores.
        self.has_scores = self._parts.has_scores
        #: How it is run on pairs, where it is an encoder with a decoder, such as T5; None of other models.
        self.pairs: PairInputs | None = None
        if self._parts.encoded:
            last = self.model.get_submodule(self._parts.stacks[-1].path.rpartition(".")[0])
            self.pairs = PairInputs(self.model, self.config, last, self.device)
        #: The first block of each list of blocks: of the decoder, or of the encoder and the decoder.
        self.starts: tuple[int, ...] = (0,) if self.pairs is None else (0, self._parts.encoded)
        #: Whether it is an encoder, such as BERT: each token sees those after it too.
        is_causal = any(getattr(part, "is_causal", False) for part in self.blocks[0].modules())
        is_encoder = not is_causal and not getattr(self.config, "is_decoder", not is_bidirectional(self.config))
        self.sees_ahead = is_encoder and self.pairs is None
        self.layout = Layout(self.model, checkpoint)
        self._weights = Weights(self._parts, self.layout, self.device)
        used = [
            self.layout.matrices(i, place, block, crosses=self.pairs is not None)
            for i, (place, block) in enumerate(zip(self.places, self.blocks, strict=True))
        ]
        empty = (block for block, matrices in zip(self.blocks, used, strict=True) if not matrices)
        if any(map(is_reached, empty)):
            raise UnsupportedModelError(f"{checkpoint.path} has blocks ({kind}) without matrices to prune")
        self._matrices, self._shared = by_first_use(used)
        #: What is not pruned.
        self.left_dense = left_dense(self._parts, self.layout, self.matrices())
        #: What a record should say of the model.
        self.notes = [*checkpoint.notes, *self._notes(kind)]
        self._found: Interface | None = None  # not known yet
        self._crossing: Crossing | None = None  # likewise
        self._ahead = self.device.type == "cuda"  # whether to read the next block while the present one is at work

    def _notes(self, kind: str) -> Iterator[str]:
        if kind not in FAMILIES and kind not in ENCODER_DECODERS:
            names = ", ".join(dict.fromkeys(re.sub(r"\d+", "N", m.name) for m in self.matrices()))
            yield (
                f"niwaki has no list of what to prune in a model of the type {kind!r}: by its structure it has "
                f"{len(self.blocks)} blocks with {names}"
            )
        if not (self.has_head or self.has_scores or self.sees_ahead):
            yield (
                "the files have no head, and config.json names none, or sentence-transformers' files pool states: it "
                "is taken as a model that makes vectors"
            )
        if self.sees_ahead and self.has_head:
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
        if self.pairs is None:
            check_tokens(tokens, self.config)
            self.window_length(tokens.shape[1])
            return
        for row in tokens:
            self.pairs.check(row, self.positions)

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
        So are those of an encoder with a decoder, whose ``samples`` are pairs.
        They may take ``budget``, by default the model's. With ``tokens_per_minibatch`` blocks can also run on
        :meth:`HiddenStates.minibatches`. UnsupportedModelError where blocks receive more than can be kept.
        """
        budget = budget or self.budget
        if self.pairs is not None:
            assert isinstance(samples, Tensor)
            return self._embed_pairs(samples, self.pairs, budget)
        with self._weights.outside(has_towers=not isinstance(samples, Tensor)):
            interface = self._find_interface()
            states = HiddenStates([], SpillList(budget), BlockArguments(budget), interface.leading)
            if isinstance(samples, Tensor):
                size = max(TOKENS_PER_BATCH, tokens_per_minibatch or 0)
                states.tokens += samples.split(max(1, size // samples.shape[1]))
                record_text(self._decode, self.blocks, interface, states, tokens_per_minibatch)
            else:
                check_towers(self.model, self._parts.inside, self.checkpoint.path)
                images = " with images" if any("pixel_values" in sample for sample in samples) else " on this text"
                what = f"{self.checkpoint.path} cannot be run{images}"
                with raised_as(UnsupportedModelError, what, reason=one_line):
                    runs = ((each["input_ids"], functools.partial(self._see, each)) for each in samples)
                    record_each(runs, self.blocks, states, lambda _, x, __: interface.answer(torch.zeros_like(x)))
        return states

    def _embed_pairs(self, rows: Tensor, pairs: PairInputs, budget: MemoryBudget) -> HiddenStates:
        """The inputs of the first block for pairs, each a batch, with all that blocks receive of them."""
        states = HiddenStates([], SpillList(budget), BlockArguments(budget), rows=[*rows.split(1)])
        runs = [functools.partial(lambda row: self._see(pairs.of(row)), row) for row in states.rows]
        tokens = (parted(row[0])[1][None, :-1] for row in states.rows)
        what = f"{self.checkpoint.path} cannot be run a block at a time"
        with contextlib.ExitStack() as held, raised_as(UnsupportedModelError, what, reason=one_line):
            held.enter_context(self._weights.outside(has_towers=True))
            for start in self.starts:
                held.enter_context(holding(self.blocks[start], self._weights.of_block(start)))
            if self._crossing is None:
                self._crossing = find_crossing(runs[0], self.blocks, self._parts.encoded)
            states.crossing = self._crossing
            answers = Answers(self.blocks, self._crossing.first)
            record_each(zip(tokens, runs, strict=True), self.blocks, states, answers.of)
        return states

    def target_states(self, rows: Tensor) -> Tensor:
        """The states of :meth:`.PairInputs.target_states`; the whole model is in memory."""
        assert self.pairs is not None
        return self.pairs.target_states(rows, self._given(self.pairs.of(rows)))

    def _given(self, inputs: Inputs) -> dict[str, Tensor]:
        """``inputs`` on the device, in the dtype of the model."""
        given = {name: value.to(self.device) for name, value in inputs.items()}
        return given | {name: value.to(self.dtype) for name, value in given.items() if value.is_floating_point()}

    def _decode(self, tokens: Tensor) -> None:
        self.decoder(input_ids=tokens.to(self.device), use_cache=False)

    def _see(self, inputs: Inputs) -> None:
        self.model(**self._given(inputs), use_cache=False)

    @property
    def interface(self) -> Interface:
        """How blocks and what is around them work together."""
        if self._found is not None:
            return self._found
        with self._weights.outside():
            return self._find_interface()

    def _find_interface(self) -> Interface:
        """The :attr:`interface`, where the weights outside the blocks are in memory."""
        if self._found is None:
            what, first = f"{self.checkpoint.path} cannot be run a block at a time", self._parts.encoded
            refused = raised_as(UnsupportedModelError, what, reason=one_line)
            with refused, holding(self.blocks[first], self._weights.of_block(first)):
                if self.pairs is not None:
                    token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
                    inputs = self.pairs.behind_blocks(token, self.dtype)
                    run = functools.partial(self.model, **inputs, use_cache=False)
                    self._found = Interface(count_answers(run, self.blocks[first:], constant=True), (), [])
                else:
                    self._found = find_interface(self.decoder, self.blocks, self.device, self.config.vocab_size)
        return self._found

    def losses(self, states: HiddenStates, only: Tensor | None = None) -> Tensor:
        """(samples, length - 1) float32 cross-entropies in nats, by ``states`` after the last block.

        Of pairs they are those of the targets, and 0 after shorter ones. With ``only`` the model has no other tokens.
        """
        return self._judged(states, only)[0]

    def divergences(self, states: HiddenStates, to: "Reference") -> tuple[Tensor, Tensor]:
        """KL in nats from the predictions of another model, and 1 where the first choice is the same.

        Both are (samples, length) float32, 0 after pairs that are shorter. NumericalError where either model's outputs
        are not finite.
        """
        _, divergences, same = self._judged(states, to=to)
        return divergences, same

    @torch.no_grad()
    def _judged(
        self,
        states: HiddenStates,
        only: Tensor | None = None,
        done: Callable[[], None] = lambda: None,
        to: "Reference | None" = None,
    ) -> list[Tensor]:
        """The :meth:`losses`, and the :meth:`divergences` from another model; ``done`` is called after each batch."""
        found: list[list[Tensor]] = [[] for _ in range(1 if to is None else 3)]
        rows = self.tokens_at_a_time(len(found))
        with self.head() as head, contextlib.ExitStack() as held:
            others = None
            if to is not None:
                others = head if to.model is self else held.enter_context(to.model.head())
            for i, batch in enumerate(states.tokens):
                labels = states.labels(i)
                values = [torch.empty(batch.shape) for _ in found]
                padded = nn.functional.pad(labels, (0, batch.shape[1] - labels.shape[1]))
                theirs = [] if to is None else [to.states.hidden[i]]
                given = pieces(rows, states.hidden[i], batch, padded, *theirs, *values)
                for hidden, tokens, targets, *rest in given:
                    logits = head(hidden, tokens).flatten(0, 1).float()
                    if only is not None:
                        logits += torch.full_like(logits[0], -torch.inf).index_fill(0, only.to(self.device), 0.0)
                    targets = targets.to(self.device).flatten()
                    judged = [nn.functional.cross_entropy(logits, targets, reduction="none")]
                    if others is not None:
                        log_p = others(rest.pop(0), tokens).flatten(0, 1).float().log_softmax(-1)
                        same = log_p.argmax(-1) == logits.argmax(-1)
                        log_q = logits.log_softmax(-1)
                        judged += [(log_p.exp() * log_q.neg_().add_(log_p)).sum(-1), same]
                    for value, out in zip(judged, rest, strict=True):
                        out.copy_(value.view(out.shape))
                found[0] += values.pop(0)[:, : labels.shape[1]]
                for each, value in zip(found[1:], values, strict=True):
                    each += value
                done()
        joined = [torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in found]
        if not all(torch.isfinite(each).all() for each in joined):
            raise NumericalError("the model's outputs are NaN or infinite on this text; try dtype float32")
        return joined

    def measured(
        self,
        states: HiddenStates,
        windows: Windows,
        world: World = _ALONE,
        only: Tensor | None = None,
        done: Callable[[], None] = lambda: None,
        to: "Reference | None" = None,
    ) -> Perplexity:
        """The perplexity, by ``states`` after the last block, of each process's share of ``windows``.

        With ``only`` these tokens can be predicted, and no others. ``done`` is called after each batch of states. With
        another model to compare ``to`` it has the divergence from that one.
        """
        losses, *compared = self._judged(states, only, done, to)
        judged = [losses, *(each[:, : losses.shape[1]] for each in compared)]
        counts = tuple[int, ...]()
        places = torch.arange(1, losses.shape[1] + 1)
        predicted = torch.ones(losses.shape)
        if self.pairs is not None:
            counts = tuple(tokens.shape[1] for tokens in states.tokens)
            predicted = (places <= torch.tensor(counts).unsqueeze(1)).float()
        if windows.spans is not None:
            predicted = ((places >= windows.spans[:, :1]) & (places < windows.spans[:, 1:])).float()
            judged[0], counts = judged[0] * predicted, tuple(int(count) for count in predicted.sum(dim=1).tolist())
        shares = world.collected(([*judged, predicted], counts, windows.bytes))
        every, counted, lengths = zip(*shares, strict=True)
        longest = max(each.shape[1] for each, *_ in every)
        losses, *compared = (
            torch.cat([nn.functional.pad(each, (0, longest - each.shape[1])) for each in parts])
            for parts in zip(*every, strict=True)
        )
        divergence = None if to is None else Divergence.of(*compared)
        return Perplexity.of(losses, windows.source, windows.origin, sum(counted, ()), sum(lengths, ()), divergence)

    def perplexity(
        self,
        windows: Windows,
        progress: Progress | None = None,
        world: World = _ALONE,
        to: "Reference | None" = None,
    ) -> Perplexity:
        """The perplexity on ``windows``, each process's share; with the divergence from a model to compare ``to``."""
        return self.perplexity_and_states(windows, progress, world, to)[0]

    def perplexity_and_states(
        self,
        windows: Windows,
        progress: Progress | None = None,
        world: World = _ALONE,
        to: "Reference | None" = None,
    ) -> tuple[Perplexity, HiddenStates]:
        """The :meth:`perplexity`, and the hidden states after the last block that it comes from."""
        self.check_head()
        states, progress = self.embed(windows.tokens), progress or Progress()
        # Of a small model with many tokens the head takes longer than all blocks.
        weights = max(1, sum(value.numel() for value in self.blocks[0].parameters()))
        head = max(1, round(self.config.get_text_config().vocab_size * states.hidden[0].shape[-1] / weights))
        progress.stage(0, "perplexity", (len(self.blocks) + head) * len(states.hidden))
        for block in self.stream():
            block.advance(states, progress.step)

        def done() -> None:
            for _ in range(head):
                progress.step()

        return self.measured(states, windows, world, done=done, to=to), states

    def check_head(self) -> None:
        """Raises UnsupportedModelError where the model makes no predictions."""
        if not self.has_head:
            what = "scores" if self.has_scores else "vectors"
            raise UnsupportedModelError(
                f"{self.checkpoint.path} has no head, and makes no predictions of words, which this needs; niwaki "
                f"prune, quantize, shrink and heal compare its {what} with the dense model's"
            )

    def head(self, dtype: torch.dtype | None = None) -> contextlib.AbstractContextManager[_Ending]:
        """What makes logits (samples, length, vocabulary) of the last hidden states and their tokens, in ``dtype``."""
        self.check_head()
        return self._made_by(self._parts.speaker, "logits", dtype)

    def tokens_at_a_time(self, copies: int = 1) -> int:
        """Of how many tokens to have the logits at a time, ``copies`` of them."""
        vocabulary: int = self.config.vocab_size
        return max(1, LOGITS_PER_BATCH // (copies * vocabulary))

    def last_states(self) -> contextlib.AbstractContextManager[_Ending]:
        """What makes the states (samples, length, width) after the last norm, of the last hidden ones and their tokens.

        It is what the head would receive, and what a model without one gives.
        """
        return self._made_by(self.decoder, "last_hidden_state")

    def scores(self) -> contextlib.AbstractContextManager[_Ending]:
        """What makes the scores of a classifier, (samples, labels) or (samples, length, labels), likewise."""
        return self._made_by(self.model, "logits")

    @contextlib.contextmanager
    def _made_by(self, module: nn.Module, output: str, dtype: torch.dtype | None = None) -> Iterator[_Ending]:
        """What makes this ``output`` of ``module``, which has the blocks in it, in ``dtype``."""
        interface = self.interface

        def made(hidden: Tensor, tokens: Tensor) -> Tensor:
            hidden, tokens = hidden.to(dtype or hidden.dtype), tokens.to(self.device)
            answer = interface.answer(streams_first(hidden, interface.leading))
            given = {"input_ids": tokens} if self.pairs is None else self.pairs.behind_blocks(tokens, hidden.dtype)
            with replaced_blocks(self.blocks, lambda *_, **__: answer):
                values: Tensor = getattr(module(**given, use_cache=False), output)
            return values

        with self._weights.outside(dtype):
            yield made

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
                where = self.places[index], self.layout, self.budget, self.device, self.dtype
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


@dataclass
class Reference:
    """A model that others are compared with, and its ``states`` of some tokens after the last block."""

    model: StreamedModel
    states: HiddenStates

    @classmethod
    def of(cls, model: StreamedModel, windows: Windows, progress: Progress) -> "Reference":
        """That of a model which has yet to run on the ``windows``."""
        model.check_head()
        states = model.embed(windows.tokens)
        progress.stage(0, "perplexity", len(model.blocks) * len(states.hidden))
        for block in model.stream():
            block.advance(states, progress.step)
        return cls(model, states)

    def is_of(self, windows: Windows) -> bool:
        """Whether the states are of the tokens of ``windows``."""
        return torch.equal(torch.cat(self.states.rows or self.states.tokens), windows.tokens)
