"""What has to be true of a pruned and a dense model before one is trained towards the other."""

import contextlib
from pathlib import Path

from niwaki.errors import CalibrationError, UsageError
from niwaki.files import input_errors
from niwaki.healing.translation import Translation
from niwaki.models.formats import zeros_of
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import load_tokenizer
from niwaki.records.record import Record
from niwaki.runs.carried import BASE

#: By how much the fraction of zeros may differ from what a record says.
_OFF = 1e-3


def base_record(path: Path) -> Record | None:
    """How a model was pruned, where niwaki did that; of a healed one how it was before."""
    for name in (BASE, "niwaki.json"):
        if (path / name).is_file():
            return Record.load(path / name)
    return None


def find_translation(model: StreamedModel, teacher: StreamedModel) -> Translation | None:
    """From the tokens of the teacher to those of the model, where these are fewer; None where they are the same.

    UsageError where the two do not mean the same by a token.
    """
    sizes = teacher.config.vocab_size, model.config.vocab_size
    paths = teacher.checkpoint.path, model.checkpoint.path
    tokenizers = []
    with contextlib.suppress(CalibrationError):  # a model may come without one
        tokenizers = [load_tokenizer(path) for path in paths]
    if len(tokenizers) < 2:
        if sizes[0] == sizes[1]:
            return None
        raise UsageError(
            f"{paths[0]} has a vocabulary of {sizes[0]:,} tokens and {paths[1]} one of {sizes[1]:,}, and without "
            "tokenizer.json in both it is not known which these are"
        )
    one, other = tokenizers
    words, own = one.get_vocab(), other.get_vocab()
    if sizes[0] == sizes[1]:
        if words == own:
            return None
        raise UsageError(
            f"{paths[0]} and {paths[1]} have vocabularies of the same size and with other words; give the model that "
            "it was pruned from"
        )
    if one.is_fast and other.is_fast and own.keys() < words.keys():
        return Translation(one, other, sizes)
    raise UsageError(
        f"{paths[0]} has a vocabulary of {sizes[0]:,} tokens and {paths[1]} another, of {sizes[1]:,}; give the model "
        "that it was pruned from"
    )


def check_zeros(model: StreamedModel, dense: StreamedModel, record: Record | None) -> None:
    """UsageError where nothing of the model was pruned, or not what ``record``, of how it was pruned, says."""
    path, matrices = model.checkpoint.path, model.matrices()
    with input_errors(path):
        is_same = dense.checkpoint.path.samefile(path)
    if is_same:
        raise UsageError(f"{path} cannot teach itself; --teacher is the dense model that it was pruned from")
    zeros = {matrix.place: zeros_of(matrix, model.checkpoint) for matrix in matrices}
    solved = record.matrices if record and record.method != "shrink" else []
    said = {(matrix.block, matrix.name) for matrix in solved}
    pruned = [matrix for matrix in matrices if matrix.place in said]
    if record and pruned:
        sparsity = sum(zeros[matrix.place] for matrix in pruned) / sum(matrix.size for matrix in pruned)
        if abs(sparsity - record.sparsity) > _OFF:
            raise UsageError(
                f"{path} has {100 * sparsity:.2f} % zeros and its record says {100 * record.sparsity:.2f} %; was it "
                "trained without its mask? Prune it again, or remove the record, niwaki.json"
            )
    is_smaller = [matrix.shape for matrix in matrices] != [matrix.shape for matrix in dense.matrices()]
    is_smaller |= model.config.vocab_size < dense.config.vocab_size
    is_as_dense = sum(zeros.values()) < _OFF * sum(matrix.size for matrix in matrices)
    if is_as_dense and not is_smaller and not model.checkpoint.pruning.quantization:
        raise UsageError(
            f"{path} has no zeros and the shape of {dense.checkpoint.path}: nothing of it was pruned; the pruned model "
            "comes first, and the dense one is its --teacher"
        )
