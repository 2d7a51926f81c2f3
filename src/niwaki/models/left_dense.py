"""What of a decoder's weights is not pruned, and why not."""

from collections import Counter
from collections.abc import Collection, Iterable

from torch import nn

from niwaki.models.families import choice, is_cross_attention, is_in_tower, is_reached
from niwaki.models.layout import Layout, Matrix
from niwaki.models.structure import Parts
from niwaki.records.record import LeftDense
from niwaki.records.wording import kind

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
