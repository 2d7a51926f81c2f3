"""The token embeddings and the head of a model, as matrices of its files."""

import functools

import torch
from torch import nn

from niwaki.errors import UnsupportedModelError
from niwaki.layer.problem import Gram
from niwaki.models.gram_capture import InputGrams
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix, check_dtypes
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel

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
    """Of the head's inputs, over all processes, by ``states`` after the last block.

    UnsupportedModelError as of :func:`embedding_keys`, NumericalError for inputs that are NaN or infinite.
    """
    key = embedding_keys(model)[-1]
    rows, columns = model.checkpoint.entries[key].shape
    matrix = Matrix(len(model.blocks), "the head", key, (rows, columns), "weight")
    with model.head() as head:
        weight = model.model.get_output_embeddings().weight  # it is linear, as its key was found
        grams = InputGrams([matrix], {"weight": weight})
        for batch, ends in zip(states.tokens, states.hidden, strict=True):
            for tokens, hidden in zip(batch.split(1), ends.split(1), strict=True):
                grams.watch(functools.partial(head, hidden, tokens))
    return grams.finish(world)[0].gram(shared=True)
