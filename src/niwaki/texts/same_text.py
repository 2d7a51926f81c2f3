"""The same text as the tokens of two tokenizers: what one model reads in windows, for another with other tokens.

Perplexity is of tokens, and windows hold as many of these; where the tokens differ, so does the text. Here both have
the text of the first one's windows: what is given, and the bytes that are predicted, are the same.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from niwaki.errors import CalibrationError
from niwaki.windows import Windows

#: What stands for bytes that are no character, as at the edges of windows.
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The text of ``tokens``, without the bytes of characters that are cut at its ends."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text.strip(_NO_CHARACTER)


def with_bytes(windows: Windows, tokenizer: PreTrainedTokenizerBase) -> Windows:
    """``windows`` with the bytes of what is predicted in each, all but the first token, where they have text.

    Those that have them already, as pairs do, stay as they are.
    """
    if windows.bytes:
        return windows
    sizes = tuple(len(decoded(tokenizer, window[1:]).encode()) for window in windows.tokens.tolist())
    return dataclasses.replace(windows, bytes=sizes) if all(sizes) else windows


def same_text(
    windows: Windows, one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, bos: int | None, most: int | None
) -> tuple[Windows, Windows]:
    """The text of ``windows``, which are tokens of ``one``, as tokens of ``one`` and of ``other``.

    Given is the token before a text, ``bos`` in the ``other``, where windows begin with one; else the first tokens of
    each up to where both have an end. Predicted is the rest. Texts are cut where the ``other`` has more than ``most``
    tokens. CalibrationError where nothing is left.
    """
    own, others = list[_Tokenized](), list[_Tokenized]()
    first = windows.bos if windows.bos is not None and bool((windows.tokens[:, 0] == windows.bos).all()) else None
    for window in windows.tokens.tolist():
        text = decoded(one, window if first is None else window[1:])
        mine, its = _Tokenized.of(text, one, first), _Tokenized.of(text, other, bos if first is not None else None)
        if most is not None and len(its.ids) > most:
            text = text[: its.starts[most - 1]]
            mine, its = _Tokenized.of(text, one, first), _Tokenized.of(text, other, bos if first is not None else None)
        start = 0 if first is not None else min({*mine.starts[1:]} & {*its.starts[1:]}, default=len(text))
        if len(text[start:]):
            own.append(mine.after(text, start))
            others.append(its.after(text, start))
    if not own:
        raise CalibrationError(f"{windows.source} has nothing to measure on in its windows: they are too short")
    return _windows(own, windows, first), _windows(others, windows, bos if first is not None else None)


@dataclasses.dataclass(frozen=True)
class _Tokenized:
    """A text as tokens, with where each of them starts there, and how many of them are given before the ``bytes``."""

    ids: list[int]
    starts: list[int]
    given: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, text: str, tokenizer: PreTrainedTokenizerBase, bos: int | None) -> "_Tokenized":
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [first for first, _ in made["offset_mapping"]]
        before = [] if bos is None else [bos]
        return cls([*before, *made["input_ids"]], [0] * len(before) + starts)

    def after(self, text: str, start: int) -> "_Tokenized":
        """A copy, of which what is before the character ``start`` is given, or the token before the text."""
        return dataclasses.replace(
            self, given=bisect_left(self.starts, start) if start else 1, bytes=len(text[start:].encode())
        )


def _windows(encoded: Sequence[_Tokenized], like: Windows, bos: int | None) -> Windows:
    """``encoded`` texts as windows, the shorter ones with any token after their ends."""
    longest = max(len(each.ids) for each in encoded)
    tokens = torch.tensor([each.ids + each.ids[-1:] * (longest - len(each.ids)) for each in encoded])
    spans: Tensor = torch.tensor([[each.given, len(each.ids)] for each in encoded])
    return dataclasses.replace(like, tokens=tokens, bos=bos, spans=spans, bytes=tuple(each.bytes for each in encoded))
