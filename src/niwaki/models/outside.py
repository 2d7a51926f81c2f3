"""What is outside a model's blocks in its files: token embeddings and the head, and what transformers does not have."""

import functools
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from niwaki.checkpoints.tensors import read_json
from niwaki.errors import UnsupportedModelError
from niwaki.files import replace_file
from niwaki.layer.problem import Gram
from niwaki.models.gram_capture import InputGrams
from niwaki.models.hidden_states import HiddenStates, pieces
from niwaki.models.layout import Matrix, check_dtypes
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import is_draft, is_in_tower
from niwaki.records.wording import counted, kind, several, size

_ALONE = World()


def embedding_keys(model: StreamedModel) -> list[str]:
    """The keys of the token embeddings and the head, of which one is both where they are tied.

    UnsupportedModelError where they are not matrices of the checkpoint with a row for each token.
    """
    whole = model.model
    parts = {"embeddings": whole.get_input_embeddings(), "head": whole.get_output_embeddings()}
    found = dict[str, None]()
    for what, module in parts.items():
        if module is None:
            continue
        names = [name for name, each in whole.named_modules(remove_duplicate=False) if each is module]
        keys = [key for name in names for key in model.layout.keys(f"{name}.weight")]
        if not isinstance(module, nn.Embedding | nn.Linear) or len({*keys}) != 1:
            raise UnsupportedModelError(
                f"the {what} of {model.checkpoint.path} are {type(module).__name__}, and not one matrix of its "
                "files; they cannot be put on a grid"
            )
        found[keys[0]] = None
    check_dtypes(model.checkpoint, found)
    return list(found)


@torch.no_grad()
def head_gram(model: StreamedModel, states: HiddenStates, world: World = _ALONE) -> Gram:
    """The Gram matrix of the head's inputs, over all processes, by ``states`` after the last block.

    UnsupportedModelError as of :func:`embedding_keys`, NumericalError for inputs that are NaN or infinite.
    """
    key = embedding_keys(model)[-1]
    rows, columns = model.checkpoint.entries[key].shape
    matrix = Matrix(len(model.blocks), "the head", key, (rows, columns), "weight")
    with model.head() as head:
        weight = model.model.get_output_embeddings().weight  # it is linear, as its key was found
        grams = InputGrams([matrix], {"weight": weight})
        for batch, ends in zip(states.tokens, states.hidden, strict=True):
            for tokens, hidden in pieces(min(model.tokens_at_a_time(), batch.shape[1]), batch, ends):
                grams.watch(functools.partial(head, hidden, tokens))
    return grams.finish(world)[0].gram(shared=True)


# Tensors that files have and transformers' model has not: draft layers, blocks too many, and what is unknown.

#: Names of what transformers computes, and old files have as well: masks of attention, frequencies, positions.
_COMPUTED = re.compile(r"(.*\.)?((original_)?inv_freq|(attn|attention|self_attention)\.(masked_)?bias|position_ids)")
#: Names of the entries of configurations that say how many draft layers there are.
DRAFT_COUNTS = (
    *("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_modules"),
    *("num_mtp", "n_mtp_layers", "nextn_predict_layers", "num_draft_layers"),
)
#: The file that says how models write text, and its entry for doing so with draft layers.
GENERATION, _USES_DRAFTS = "generation_config.json", "use_mtp"


@dataclass(frozen=True)
class ExtraTensors:
    """The tensors ``keys`` of the files, of ``size`` bytes, whose keys begin with ``name``.

    Those that follow the blocks (``follows``) have their sizes and numbers: they fit no model with fewer of these.
    """

    name: str  # with * for the numbers of blocks that the model has
    what: str
    keys: tuple[str, ...]
    size: int
    follows: bool
    is_draft: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.what}), {counted(len(self.keys), 'tensor')}, {size(self.size)}"


def find_extra(model: StreamedModel) -> list[ExtraTensors]:
    """The extra tensors of a model's files, in their order, without what transformers computes itself."""
    entries, unused = model.checkpoint.entries, set(model.layout.unused)
    known = {prefix for key in entries if key not in unused for prefix in _prefixes(key)}
    groups: dict[str, list[str]] = {}
    for key in model.layout.unused:
        first = next((prefix for prefix in _prefixes(key) if prefix not in known), key)
        above, dot, last = first.rpartition(".")
        groups.setdefault(f"{kind(above)}{dot}{last}", []).append(key)
    return [
        _described(model, name, keys, sum(entries[key].size for key in keys))
        for name, keys in groups.items()
        if not all(map(_COMPUTED.fullmatch, keys))
    ]


def _prefixes(key: str) -> list[str]:
    return [*itertools.accumulate(key.split("."), lambda start, part: f"{start}.{part}")]


def _described(model: StreamedModel, name: str, keys: list[str], size: int) -> ExtraTensors:
    list_of_blocks, depth = model.places[-1].split(".")[-3], len(model.blocks)
    above, _, last = name.rpartition(".")
    number = int(last) if last.isdigit() and above.rpartition(".")[2] == list_of_blocks else -1
    counts = (getattr(model.config, count, None) for count in DRAFT_COUNTS)
    drafts = max((count for count in counts if isinstance(count, int)), default=0)
    # Of a model without a head for words it may be that head.
    what = "unknown to transformers" if model.has_head else "not of its vectors or scores"
    drafting = any(map(is_draft, keys)) or depth <= number < depth + drafts
    if drafting:
        what = "draft layer for several tokens"
    elif number >= depth:
        what = f"beyond the model's {counted(depth, 'block')}"
    elif is_in_tower(name):
        what = "not of the language model"
    inside = f".{list_of_blocks}.*." in f".{name}" and not is_in_tower(name)
    follows = drafting or number >= depth or inside
    return ExtraTensors(name, what, tuple(keys), size, follows, drafting)


def drafts_in_generation(directory: Path) -> dict[str, Any]:
    """What ``generation_config.json`` says, if that is to use draft layers; else nothing."""
    file = directory / GENERATION
    values = read_json(file) if file.is_file() else {}
    return values if values.get(_USES_DRAFTS) else {}


def generation_without_drafts(directory: Path) -> None:
    """Makes ``generation_config.json`` say that draft layers are not used, where it says that they are."""
    if values := drafts_in_generation(directory):
        replace_file(directory / GENERATION, json.dumps({**values, _USES_DRAFTS: False}, indent=2) + "\n")


def notes_of(model: StreamedModel, is_smaller: bool = False) -> list[str]:
    """What the record is to say of them; the files of a model that ``is_smaller`` are without those that follow."""
    extra = find_extra(model)
    left = [each for each in extra if each.follows and is_smaller]
    notes = list[str]()
    if left:
        none = ""
        if any(each.is_draft for each in left):
            none = "; config.json says that there are no draft layers"
            if drafts_in_generation(model.checkpoint.path):
                none += f", and {GENERATION} not to use them ({_USES_DRAFTS} false)"
        notes.append(f"left out, because they only fit the model that was given: {several(list(map(str, left)))}{none}")
    if stay := [str(each) for each in extra if each not in left]:
        notes.append(f"not in transformers' model, and stay in the files as they are: {several(stay)}")
    return notes
