"""One file in the format GGUF, which llama.cpp and programs built on it (Ollama, LM Studio) run."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from niwaki.checkpoints.integers import Integers
from niwaki.checkpoints.reading import Checkpoint, pipeline
from niwaki.choices import ExportFormat
from niwaki.errors import CheckpointError, OutputError, UnsupportedModelError, UsageError, raised_as
from niwaki.exports.gguf_architectures import (
    ARCHITECTURES,
    ExportedTensor,
    Source,
    check_configuration,
    context_length,
    find_tensors,
    numbers,
    stretched,
)
from niwaki.exports.gguf_blocks import bytes_of, bytes_of_whole_numbers
from niwaki.exports.gguf_tokenizer import Tokenizer
from niwaki.files import check_space, given_path, new_file
from niwaki.layer.block_types import BLOCK_TYPES, BlockGrid, stored_type
from niwaki.layer.grid import WITH_Q4_0, AnyGrid, FloatGrid, Grid, parse_grid, scales_of_q4_0
from niwaki.layer.rounding import to_nearest
from niwaki.models.outside import embedding_keys, find_extra
from niwaki.models.scales import bits_in, embedding_grid_of, grid_of, read_embedding_scales, read_scales
from niwaki.models.sentence_vectors import pooling_of
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import config_of_text, read_config, refusals
from niwaki.records.progress import Progress
from niwaki.records.recipe import EARLIER_RECIPE, RECIPE
from niwaki.records.record import Record
from niwaki.records.wording import counted, markdown, several
from niwaki.runs.card import write_card_of_form
from niwaki.runs.conversion import Conversion, model_name

# Weights on a grid in the groups of 32 that llama.cpp has: the same whole numbers and scales, and no rounding.

Kind = Literal["", "F16", "Q8_0", "Q5_0", "Q4_0"]

GROUP = 32  # weights that have a scale in Q8_0, Q5_0 and Q4_0
#: The bits of a whole number there, the fewest first.
BITS: dict[str, int] = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8}
#: The same of those whose numbers begin anywhere.
_WITH_ZEROS = {"Q4_1": 4, "Q5_1": 5}


@dataclass(frozen=True)
class TensorOnGrid:
    """A tensor of a checkpoint that is on a ``grid``, how to read its scales (rows, groups), and the bits that it has.

    Of mixed bits these are known once it is written.
    """

    grid: AnyGrid
    scales: Callable[[], Tensor]
    find_bits: Callable[[], float]

    @cached_property
    def bits(self) -> float:
        """The bits that its whole numbers have."""
        return self.find_bits()

    @cached_property
    def type(self) -> str:
        """The one of llama.cpp's types that it has; "" on a grid of whole numbers."""
        return stored_type(self.scales()).name if isinstance(self.grid, BlockGrid) else ""

    def fits(self, kind: str, columns: int) -> bool:
        """Whether ``kind`` has its whole numbers, and a scale wherever the grid has one."""
        if isinstance(self.grid, BlockGrid):
            return self.type == kind
        return kind in BITS and self.bits <= BITS[kind] and (self.grid.group or columns) % GROUP == 0


def tensors_on_grids(model: StreamedModel) -> dict[tuple[str, int | None], TensorOnGrid]:
    """The tensors that ``model`` has on a grid, by key and index: matrices of its blocks, embeddings and head.

    CheckpointError where config.json names no grid that there is.
    """
    checkpoint, found = model.checkpoint, dict[tuple[str, int | None], TensorOnGrid]()
    for key, encoded in checkpoint.encoded.items():
        if isinstance(encoded, Integers) and (on := _as_stored(checkpoint, encoded)):
            found[key, None] = on
    grid, ends = grid_of(checkpoint), embedding_grid_of(checkpoint)
    if isinstance(grid, FloatGrid):
        raise UsageError(
            f"{checkpoint.path} has weights in {grid}, which a GGUF file would round once more; give the model that it "
            "was made from, or the format compressed-tensors"
        )
    if grid is not None:
        for matrix in model.matrices():
            if checkpoint.pruning.includes(matrix.block):
                of_it = checkpoint, matrix, grid
                found[matrix.entry] = TensorOnGrid(grid, partial(read_scales, *of_it), partial(bits_in, *of_it))
    if ends is not None:
        for key in embedding_keys(model):
            found[key, None] = TensorOnGrid(
                ends, partial(read_embedding_scales, checkpoint, key, ends), lambda: ends.bits
            )
    return found


def _as_stored(checkpoint: Checkpoint, encoded: Integers) -> TensorOnGrid | None:
    """How a matrix that another program has rounded is on a grid; None where no type has its groups or its zeros."""
    read, group = checkpoint.reader(encoded), encoded.group
    if not encoded.has_order(read):
        return None
    if bool((encoded.groups(read)[1] == 1 << (encoded.bits - 1)).all()):

        def scales() -> Tensor:
            s, _ = encoded.groups(read)
            return torch.where(s == 0, 1.0, s)

        return TensorOnGrid(Grid(encoded.bits, group), scales, lambda: encoded.bits)
    kind = next((BLOCK_TYPES[name] for name, bits in _WITH_ZEROS.items() if encoded.bits <= bits), None)
    if kind is None or group % GROUP:
        return None

    def scales_and_minima() -> Tensor:
        s, z = (each.float().repeat_interleave(group // GROUP, dim=1) for each in encoded.groups(read))
        ones = torch.ones_like(s)
        return kind.spread(torch.stack([s, ones, s * z, ones], dim=2)).half()

    return TensorOnGrid(BlockGrid(kind.bits, kind.name), scales_and_minima, lambda: encoded.bits)


#: By the names of formats.
KINDS: dict[ExportFormat, Kind] = {"gguf": "", "gguf-f16": "F16", "gguf-q8_0": "Q8_0", "gguf-q4_0": "Q4_0"}

#: By what the largest weight of a group is divided, which gives the scale.
_STEPS = {"Q8_0": 127, "Q5_0": 16, "Q4_0": 8}
_LARGEST = 65504.0  # in float16
#: How far all of a tensor may be from itself in float16, relative to its norm: that is 0.0005 at most where numbers
#: are not too small for it.
_FAR = 0.01
#: Routers and short convolutions, which llama.cpp takes in float32.
_PRECISE = ("ffn_gate_inp", "shortconv.conv", "ssm_conv1d")
#: How vectors of tokens become one of a text, in gguf.PoolingType.
_POOLINGS = {"mean": "MEAN", "cls": "CLS", "lasttoken": "LAST"}
#: Embeddings and head.
_ENDS = ("token_embd.weight", "output.weight")
_WITHOUT_TOWERS = (
    "of {} the file has the language model alone, without what reads images or sound; llama.cpp takes that from a file "
    "of its own, which niwaki does not write"
)
#: What the directory of a file has too: what the model is, how it was made, and what may be done with it.
_CARRIED = {"README.md", "README.base.md", "niwaki.json", "niwaki.base.json", RECIPE}
_LEGAL = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_OWN = "types of their own"
_CARD = """
# {title}, for llama.cpp

`{file}` is the model in the format GGUF, its matrices in {kind}: for llama.cpp and the programs that are built on it,
such as Ollama and LM Studio.

    llama-cli -m {file}
{notes}"""


class Gguf(Conversion):
    """A model, to be written as one file with its matrices in a ``kind`` of numbers.

    That is F16, or Q8_0 (8.5 bits a weight) or Q4_0 (4.5 bits) in groups of 32 with a scale; with Q4_0 embeddings and
    head are in Q8_0 unless they are on a grid of fewer bits, and what has rows that are no multiples of 32 is in F16.
    All else is float32. Weights on a grid that the kind of numbers has are the same there; others are rounded to the
    nearest by the package ``gguf``. Zeros stay zeros, and take as much space as other weights. A tensor is in memory at
    a time.

    ``changes`` are those that stages to come make to config.json. UnsupportedModelError where llama.cpp computes
    something else than transformers, as far as niwaki knows; :meth:`write` raises it for weights beyond what the format
    holds.
    """

    def __init__(self, checkpoint: Checkpoint, kind: Kind, changes: Mapping[str, Any], progress: Progress) -> None:
        super().__init__(checkpoint, progress)
        self._gguf, self._kind, self.size = package(), kind, checkpoint.size
        path = checkpoint.path
        with refusals(path / "config.json"):
            whole = read_config(path)
            stored = whole if whole.model_type in ARCHITECTURES else config_of_text(whole)
        if stored.model_type not in ARCHITECTURES or checkpoint.config.get("quantization_config") is not None:
            raise UnsupportedModelError(
                f"{path} ({whole.model_type}) cannot be exported to GGUF; niwaki knows {', '.join(ARCHITECTURES)}, in "
                "16 bits. 'niwaki pack' writes pruned and quantized models of all kinds"
            )
        self._architecture = architecture = ARCHITECTURES[stored.model_type]
        config = copy.copy(stored)
        for name, value in changes.items():
            setattr(config, name, value)
        check_configuration(config, architecture, path)
        self._positions = stretched(config, architecture, path)
        self._numbers = numbers(config, architecture, path) | self._positions.numbers
        if how := self._positions.stretch:
            self._numbers["add_rope_scaling_type"] = self._gguf.RopeScalingType(how)
        self._streamed = StreamedModel(checkpoint, "cpu", "float32")  # of which only names are asked for
        with raised_as(OutputError, "this version of gguf does not know", KeyError, "; pip install --upgrade gguf"):
            kind_of_model = self._gguf.MODEL_ARCH[architecture.name]
        names = self._gguf.get_tensor_name_map(kind_of_model, config.num_hidden_layers)
        pooling = pooling_of(self._streamed) if pipeline(path) else ""
        if pooling in _POOLINGS:
            self._numbers["add_pooling_type"] = self._gguf.PoolingType[_POOLINGS[pooling]]
        self.tensors = find_tensors(self._streamed, stored, architecture, names.get_name)
        self._tokenizer = Tokenizer(path, config.vocab_size, config.eos_token_id)
        self._notes = [
            context_length(config, architecture)[1],
            self._positions.note,
            _WITHOUT_TOWERS.format(whole.model_type) if stored is not whole else "",
            "llama.cpp has no vectors of texts by 'max', as this model has" if pooling == "max" else "",
            *_choose_kinds(self.tensors, kind),
        ]
        self._left: list[Source] = []  # those that are not on their grid any more
        self._lying = 0  # matrices that are on the grid of Q4_0 without saying so
        has_grids = bool(checkpoint.pruning.quantization or checkpoint.pruning.embeddings or checkpoint.encoded)
        self._on_grids = tensors_on_grids(self._streamed) if has_grids and kind != "F16" else {}

    def _follow_grids(self) -> str:
        """Stores what is on a grid of its own as the smallest numbers that hold it, or in the type that it has.

        In a file of 4 or 8 bits that are embeddings and head, and in one of 4 bits matrices of mixed bits or of 5: a
        format of 5 bits cannot be asked for. One of 8 can, so that fewer are meant where they are asked for.

        Returns what most matrices are in.
        """
        grid = grid_of(self.checkpoint)
        follows = not self._kind or (self._kind == "Q4_0" and grid is not None and (grid.is_mixed or grid.bits == 5))
        counts = Counter[str]()
        for tensor in self.tensors:
            of_it = [self._on_grids[one.entry] for one in tensor.sources if one.entry in self._on_grids]
            if not of_it or tensor.together % GROUP:
                continue
            types = [BLOCK_TYPES[one.type] for one in of_it if one.type]
            if tensor.name not in _ENDS and not (follows or types):
                continue
            if types:
                tensor.kind = max(types, key=attrgetter("bits")).name
            elif tensor.name in _ENDS or not self._kind:
                fitting = (kind for kind in BITS if all(one.fits(kind, tensor.shape[1]) for one in of_it))
                tensor.kind = next(fitting, "Q8_0")
            else:
                tensor.kind = next(kind for kind, each in BITS.items() if each >= max(one.bits for one in of_it))
            if tensor.name not in _ENDS:
                counts[tensor.kind] += 1
            elif tensor.kind != "Q8_0":
                self._notes.append(f"{tensor.name} is in {tensor.kind}")
        most = self._kind or (counts or Counter(["F16"])).most_common(1)[0][0]
        del counts[self._kind]
        if counts:
            which = ", ".join(f"{count:,} in {kind}" for kind, count in counts.most_common())
            self._notes.append(f"matrices with a type of their own: {which}")
        return most

    @property
    def file_name(self) -> str:
        """The name of the file, where a directory is written."""
        return f"model-{self._kind}.gguf" if self._kind else "model.gguf"

    @property
    def tokenizer_size(self) -> int:
        """Bytes of the file that the tokenizer takes."""
        return self._tokenizer.file_size

    def carries(self, name: Path) -> bool:
        """What tells people of the model; all that programs need is in the file."""
        is_recipe = EARLIER_RECIPE.fullmatch(str(name)) is not None
        return is_recipe or str(name) in _CARRIED or (len(name.parts) == 1 and name.name.startswith(_LEGAL))

    def check(self, name: str) -> None:
        """Looks for tensors that the file will not have; weights are looked at when they are written."""
        if extra := find_extra(self._streamed):
            self._notes.append(f"left out, as not in transformers' model either: {several(list(map(str, extra)))}")

    def write(self, directory: Path, name: str) -> list[str]:
        """Writes the file, and a model card, to ``directory``."""
        said = self.write_file(directory / self.file_name, name)
        notes = "".join(f"* {markdown(note)}\n" for note in said)
        title = ", ".join(filter(None, [markdown(name), _outcome(directory)]))
        text = _CARD.format(title=title, file=self.file_name, kind=self._kind or _OWN, notes=notes and f"\n{notes}")
        own, tags = "the card of the model that it was made from", {"niwaki", "gguf"}
        if self._is_rounded:
            own += f", and what it says was measured was so before rounding to {self._kind or _OWN}"
        write_card_of_form(directory, "gguf", tags, text, own, measured=not self._is_rounded)
        return said

    def write_file(self, file: Path, name: str) -> list[str]:
        """Writes the file; what there is to say of it, such as where llama.cpp differs."""
        gguf, tokenizer = self._gguf, self._tokenizer
        most = self._follow_grids()
        architecture = gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, self._architecture.name)]
        with (
            contextlib.closing(gguf.GGUFWriter(file, architecture)) as writer,
            np.errstate(all="ignore"),  # values are looked at before
        ):
            if known := tokenizer.name(name):
                writer.add_name(known)
            for add, number in self._numbers.items():
                (getattr(writer, add) if "." not in add else partial(writer.add_array, f"{architecture}.{add}"))(number)
            tokenizer.write(writer)
            writer.add_file_type(_file_type(gguf, most))
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            self._write_tensors(writer)
        return [note for note in (*self._notes, *self._rounding(), *tokenizer.notes) if note]

    @property
    def _is_rounded(self) -> bool:
        """Whether the file, once it is written, has other numbers than the model."""
        in_groups = (tensor for tensor in self.tensors if tensor.kind in BLOCK_TYPES)
        return bool(self._left) or not all(self._fits(tensor, one) for tensor in in_groups for one in tensor.sources)

    def _rounding(self) -> Iterator[str]:
        """What there is to say of the weights that were rounded."""
        on_grids, kind, left = self._on_grids, self._kind or _OWN, self._left
        groups = [(tensor, one) for tensor in self.tensors if tensor.kind in BLOCK_TYPES for one in tensor.sources]
        odd = [(tensor.kind, one) for tensor, one in groups if one.entry in on_grids and not self._fits(tensor, one)]
        for stored, one in odd[:1]:
            yield (
                f"weights on the grid {on_grids[one.entry].grid} are rounded to the nearest of {stored}, which does "
                f"not have its numbers; quantize onto int{BITS.get(stored, 8)}:{GROUP} for it"
            )
        in_blocks = [one for tensor, one in groups if tensor.name.startswith("blk.")]
        plain = [one.key for one in in_blocks if one.entry not in on_grids]
        if 0 < len(plain) < len(in_blocks):
            yield (
                f"{len(plain)} of {len(in_blocks)} matrices, such as {plain[0]!r}, are on no grid, and are rounded to "
                f"the nearest of {kind}"
            )
        elif plain and kind == "Q4_0" and self._lying:
            yield (
                f"{counted(self._lying, 'matrix', 'matrices')} of {len(plain)} are numbers of Q4_0 already, as after "
                "training with it, and stay the same; others are rounded to the nearest"
            )
        elif plain and kind == "Q4_0":
            yield (
                "weights are rounded to the nearest of Q4_0; the stage 'quantize int4:32' before the export makes up "
                "for much of what that changes"
            )
        if left:
            first, has = left[0], "has" if len(left) == 1 else "have"
            yield (
                f"{counted(len(left), 'tensor')}, such as {first.key!r}, {has} weights that are not on their grid "
                f"{on_grids[first.entry].grid} any more; they are rounded to the nearest of {kind}"
            )

    def _write_tensors(self, writer: Any) -> None:
        """Writes the header, and then the tensors one after the other."""
        gguf, factors = self._gguf, self._positions.tensors
        for name, values in factors.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        for tensor in self.tensors:
            stored = getattr(gguf.GGMLQuantizationType, tensor.kind)
            shape = tensor.whole_shape
            as_bytes = gguf.quant_shape_to_byte_shape(shape, stored) if tensor.kind in BLOCK_TYPES else shape
            dtype = np.dtype({"F32": np.float32, "F16": np.float16}.get(tensor.kind, np.uint8))
            writer.add_tensor_info(tensor.name, as_bytes, dtype, int(np.prod(as_bytes)) * dtype.itemsize, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in factors.values():
            writer.write_tensor_data(values)
        for number, tensor in enumerate(self.tensors, 1):
            self.progress.status("exporting, tensor", number, len(self.tensors))
            parts = [self._stored(tensor, source) for source in tensor.sources]
            writer.write_tensor_data(np.stack(parts) if len(tensor.whole_shape) > len(tensor.shape) else parts[0])

    def _stored(self, tensor: ExportedTensor, source: Source) -> np.ndarray[Any, Any]:
        """The part ``source`` of a tensor, as numbers or bytes of the file, with rows in the order that llama.cpp has.

        UnsupportedModelError for values that its form cannot hold.
        """
        key, W, stored = source.key, source.read(self.checkpoint), None
        if self._fits(tensor, source):
            on = self._on_grids[source.entry]
            scales = on.scales()
            # What other programs store as whole numbers is what they are, but for the rounding of its products.
            if key in self.checkpoint.encoded or on.grid.has(W.to(self.checkpoint.dtype(key)), scales):
                codes, scales = on.grid.codes(W, scales.float())[source.rows], scales[source.rows]
                _check_values(key, W[source.rows].numpy(), tensor.kind, scales.float().numpy())
                stored = bytes_of(codes, scales) if on.type else bytes_of_whole_numbers(codes, scales, tensor.kind)
            else:
                self._left.append(source)
        if stored is None and tensor.kind in WITH_Q4_0:
            stored = self._as_it_lies(key, W[source.rows].reshape(tensor.shape), tensor)
        if stored is None:
            W = W[source.rows].reshape(tensor.shape)
            value = (-W.exp() if tensor.name.endswith("ssm_a") else W + tensor.added).numpy()
            _check_values(key, value, tensor.kind)
            gguf = self._gguf
            if tensor.kind in BLOCK_TYPES and tensor.kind not in BITS:  # which the package does not round to
                grid = parse_grid(tensor.kind)
                rounded, scales = to_nearest(W.reshape(tensor.shape), grid, torch.float32)
                stored = bytes_of(grid.codes(rounded, scales), scales)
            else:
                stored = gguf.quants.quantize(value, getattr(gguf.GGMLQuantizationType, tensor.kind))
        return tensor.ordered(stored)

    def _as_it_lies(self, key: str, W: Tensor, tensor: ExportedTensor) -> np.ndarray[Any, Any] | None:
        """The bytes of a matrix that is on the grid of Q4_0 but for the rounding to its dtype; None of others."""
        if (scales := scales_of_q4_0(W, self.checkpoint.dtype(key))) is None:
            return None
        _check_values(key, W.numpy(), tensor.kind, scales.numpy())
        self._lying += tensor.name.startswith("blk.")
        return bytes_of_whole_numbers(Grid(BITS["Q4_0"], GROUP).codes(W, scales), scales, tensor.kind)

    def _fits(self, tensor: ExportedTensor, source: Source) -> bool:
        """Whether the form of ``tensor`` has the numbers of the grid that ``source`` is on, if it is on one."""
        on = self._on_grids.get(source.entry)
        return on is not None and on.fits(tensor.kind, tensor.shape[-1])


def write_gguf(form: Gguf, model: str | Path, out: str | Path) -> list[str]:
    """Writes ``model``, opened as ``form``, to the file ``out``; what there is to say of it.

    UsageError where ``out`` is there, is inside the model's directory, or is being written by another process. After an
    error nothing is left.
    """
    path = form.checkpoint.path
    file = check_place(out, [path, given_path(model)])
    check_space(file.parent, form.size)
    form.check(str(model))
    with new_file(file, lambda there: there.read(4) == b"GGUF") as temporary:
        return form.write_file(temporary, model_name(model, path))


def _file_type(gguf: Any, kind: str) -> int:
    """The number that llama.cpp has for a file with most matrices in ``kind``."""
    names = (f"MOSTLY_{kind}{ending}" for ending in ("", "_M", "_S"))
    found: int = next(number for name in names if (number := getattr(gguf.LlamaFileType, name, None)) is not None)
    return found


def package() -> Any:
    """The package ``gguf``; OutputError without it."""
    try:
        import gguf
    except ImportError as error:
        raise OutputError("files for llama.cpp need gguf: pip install gguf") from error
    return gguf


def check_place(out: str | Path, models: list[Path]) -> Path:
    """``out`` as an absolute path; UsageError where it is taken, cannot be a file, or is in one of ``models``."""
    file = given_path(out, 12).absolute()
    if file.exists() or file.is_symlink():
        raise UsageError(f"{out} exists; choose another name or remove it")
    if not file.parent.is_dir():
        raise UsageError(f"there is no directory {file.parent}")
    if any(file.parent.resolve().is_relative_to(each.resolve()) for each in models):
        raise UsageError(f"{out} is inside the model's own directory; choose another place")
    return file


def _choose_kinds(tensors: list[ExportedTensor], kind: Kind) -> list[str]:
    """Gives matrices the form they are stored in; what there is to say of it."""
    odd = []
    for tensor in tensors:
        if len(tensor.shape) != 2 or any(each in tensor.name for each in _PRECISE):  # norms, biases...
            continue
        tensor.kind = "Q8_0" if kind == "Q4_0" and tensor.name in _ENDS else kind or "F16"
        if tensor.kind != "F16" and tensor.together % GROUP:
            tensor.kind = "F16"
            odd.append(tensor)
    if not odd:
        return []
    return [
        f"{len(odd)} of {len(tensors)} tensors are in F16, such as {odd[0].sources[0].key!r}: {kind} needs rows of a "
        f"multiple of {GROUP}, and not of {odd[0].together}"
    ]


def _outcome(directory: Path) -> str:
    """What the model has become, by its record in ``directory``; "" where there is none."""
    try:
        return Record.load(directory / "niwaki.json").outcome
    except CheckpointError:
        return ""


def _check_values(key: str, value: np.ndarray[Any, Any], kind: str, scales: np.ndarray[Any, Any] | None = None) -> None:
    """UnsupportedModelError where weights, or the ``scales`` of groups, are too large or too small for float16.

    Scales are by default those of rounding to the nearest.

    A weight that is too large for that is so in all forms: llama.cpp has keys, values and what comes into matrices in
    float16 or less, so that what it makes of an input of 1 would be infinite.
    """
    if not np.isfinite(value).all():
        raise UnsupportedModelError(f"{key!r} has values beyond float32, which llama.cpp computes in")
    if kind == "F32":
        return
    largest = float(np.abs(value).max(initial=0.0))
    if largest > _LARGEST:
        raise UnsupportedModelError(
            f"{key!r} has a weight of {largest:.6g}, and llama.cpp computes in float16, up to 65,504; scale what comes "
            "before or after it"
        )
    numbers, what = value, "weights"
    if kind != "F16":
        what = "scales of groups"
        numbers = np.abs(value.reshape(-1, GROUP)).max(axis=1) / _STEPS.get(kind, 8) if scales is None else scales
    half, wide = numbers.astype(np.float16), numbers.astype(np.float64)
    if np.linalg.norm(half - wide) > _FAR * np.linalg.norm(wide):
        lost = int(((half == 0) & (numbers != 0)).sum())
        raise UnsupportedModelError(
            f"{key!r} has no weight above {largest:.6g}, too small for {kind}: {lost:,} of {numbers.size:,} {what} "
            "become 0, and others are far off; scale what comes before or after it"
        )
