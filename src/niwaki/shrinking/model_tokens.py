"""The tokens of a model of which some can be removed: which have to stay, and what has a row for each of them."""

from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from niwaki.checkpoints.tensors import read_json
from niwaki.errors import CheckpointError, UnsupportedModelError
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import encode, find_bos
from niwaki.shrinking.token_choice import Size, choose, renumbered
from niwaki.shrinking.token_ids import FILES, named
from niwaki.shrinking.tokenizer_file import TokenizerFile
from niwaki.shrinking.tokenizer_files import added_in, load_smaller
from niwaki.texts.chat_templates import TemplateError, rendered
from niwaki.texts.rows import ChatTemplate

#: Conversations that show which tokens a chat template needs; some take no system message, or begin with a question.
_CONVERSATION = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "a"},
]


class ModelTokens:
    """The tokens of a model, of which the least needed can be removed.

    Attributes:
        rows: How many the model has.
        keys: The tensors with a row for each of them.
        file: The tokenizer's file.

    Raises:
        UnsupportedModelError: tokens of this model cannot be removed.
        CheckpointError: its files make no sense.
    """

    def __init__(self, model: StreamedModel) -> None:
        if model.pairs is not None:
            raise UnsupportedModelError(
                f"{model.checkpoint.path} is an encoder with a decoder; removing tokens is not supported"
            )
        self._model, self._directory = model, model.checkpoint.path
        self.rows: int = model.config.vocab_size
        self.keys = _keys_of_rows(model)
        self.file = TokenizerFile(self._directory)
        self._named = _named_tokens(self._directory)

    @property
    def weights(self) -> int:
        """How many weights go with each token."""
        entries = self._model.checkpoint.stored.entries
        return sum(prod(entries[key].shape[1:]) for key in self.keys)

    @property
    def unused(self) -> int:
        """How many of them the tokenizer does not have, and nothing names."""
        known = {*self.file.tokens.values(), *self.file.added.values(), *self._always}
        return self.rows - sum(number < self.rows for number in known)

    def choose(self, shares: Tensor, size: Size) -> Mapping[int, int]:
        """By the number of each token that stays its new one; ``shares`` (tokens,) are those of a text.

        UsageError where the ``size`` is less than what has to stay, or all there is.
        """
        return renumbered(choose(self.file, shares, size, self._always))

    def tokenizer(self, new: Mapping[int, int]) -> PreTrainedTokenizerBase:
        """The tokenizer with these tokens alone."""
        return load_smaller(self._directory, self.file, new)

    @cached_property
    def _always(self) -> set[int]:
        """Tokens that stay beside those that the tokenizer cannot do without: named in files, and of chat templates."""
        tokenizer = self._model.tokenizer
        tokens = {*self.file.tokens.values(), *self.file.added.values()}
        for number, where in self._named.items():
            if number >= self.rows and number not in tokens:
                raise CheckpointError(
                    f"{where} names the token {number:,}, and the model has {self.rows:,}; correct or remove that"
                )
        special = {number for number in tokenizer.all_special_ids if number in tokens}
        return {*self._named, *special, *added_in(self._directory), *_of_template(tokenizer)}


def _named_tokens(directory: Path) -> dict[int, Path]:
    """The numbers of tokens that configurations of a model name, each with a file that does."""
    files = [directory / name for name in FILES if (directory / name).is_file()]
    return {number: file for file in files for number in named(read_json(file), file)}


def _of_template(tokenizer: Any) -> set[int]:
    """The tokens that the chat template puts around what is said, if there is one and it can be rendered."""
    if (template := ChatTemplate.of(tokenizer, find_bos(tokenizer))) is None:
        return set()
    for first in range(2):
        try:
            (text,) = rendered(template.template, [_CONVERSATION[first:]], template.special, ask=True)
            return {*encode(tokenizer, text)}
        except TemplateError:
            continue
    return set()


def _keys_of_rows(model: StreamedModel) -> set[str]:
    """The keys of all tensors with a row for each token; UnsupportedModelError where one is not known to have them."""
    checkpoint, rows = model.checkpoint.stored, model.config.vocab_size
    parts = [model.model.get_input_embeddings(), model.model.get_output_embeddings()]
    names = [
        f"{path}.{own}"
        for path, module in model.model.named_modules(remove_duplicate=False)
        if any(module is part for part in parts)
        for own, _ in module.named_parameters(recurse=False)
    ]
    known = {key for name in names for key in [*model.layout.keys(name), name] if key in checkpoint.entries}
    found = {key for key, entry in checkpoint.entries.items() if rows in entry.shape}
    wrong = sorted(found - known) or sorted(key for key in known if checkpoint.entries[key].shape[:1] != (rows,))
    if wrong:
        entry = checkpoint.entries[wrong[0]]
        raise UnsupportedModelError(
            f"{checkpoint.path} has {wrong[0]!r} of the shape {entry.shape}, and whether it has a row for each of the "
            f"{rows:,} tokens is not known; no tokens of this model can be removed"
        )
    return known
