"""Numbers of tokens in the files beside the tokenizer's own: configurations name some, and others say how many."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from niwaki.errors import UnsupportedModelError

#: Files of a model directory that name tokens by their numbers.
FILES = (
    *("config.json", "generation_config.json", "processor_config.json", "preprocessor_config.json"),
    "video_preprocessor_config.json",
)
_SIZE = "vocab_size"
#: The part of a configuration that is of the language model, where it has others too.
_TEXT = "text_config"
#: Names of entries with a number, a list of numbers, or lists of them.
_NUMBERS = re.compile(r"(.*_)?token_(id|ids|index)|(begin_)?suppress_tokens|(bad|force)_words_ids")
#: Names of entries that have to do with tokens in a way that is not known here; segments of a text are no tokens.
_UNKNOWN = re.compile(
    r"(?!type_vocab_size).*vocab.*|forced_decoder_ids|sequence_bias|no_timestamps_token.*|token_healing|.*token_map.*"
)
#: What these have where they do nothing.
_NOTHING: tuple[Any, ...] = (None, False, [], {})


def named(values: Mapping[str, Any], where: Path) -> Iterator[int]:
    """All numbers of tokens in a configuration; UnsupportedModelError for entries that are not known."""

    def found(number: int) -> int:
        numbers.append(number)
        return number

    numbers = list[int]()
    mapped(values, found, 1, where)
    yield from numbers


def mapped(
    values: Mapping[str, Any], new: Callable[[int], int], size: int, where: Path, is_text: bool = True
) -> dict[str, Any]:
    """A configuration with the ``new`` numbers of its tokens, of a vocabulary of ``size``.

    ``is_text`` is whether its size of a vocabulary is that of the language model. UnsupportedModelError for entries
    that are not known.
    """
    made: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name not in ("sequence_bias", "pruning_config", "quantization_config"):
            made[name] = mapped(value, new, size, where, is_text=name == _TEXT)
        elif name == _SIZE and is_text and isinstance(value, int):
            made[name] = size
        elif _NUMBERS.fullmatch(name):
            made[name] = _each(value, new, name, where)
        elif _UNKNOWN.fullmatch(name) and value not in _NOTHING:
            raise UnsupportedModelError(
                f"{where} has {name} {str(value)[:60]}, and what becomes of that with fewer tokens is not known; no "
                "tokens of this model can be removed"
            )
        else:
            made[name] = value
    return made


def _each(value: Any, new: Callable[[int], int], name: str, where: Path) -> Any:
    """``value`` with new numbers, a number or lists of such; those below 0 stand for none."""
    if isinstance(value, list):
        return [_each(one, new, name, where) for one in value]
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value < 0):
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedModelError(f"{where} has {name} {str(value)[:60]}, which is not a token id")
    return new(value)
