"""Windows of tokens: what every text becomes before a model reads it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.choices import Order


@dataclass(frozen=True)
class Windows:
    """Windows of tokens, and where they come from: what every text becomes before a model reads it.

    Attributes:
        tokens: (windows, length) int64.
        source: Name of the text, as it was given.
        order: ``first`` or ``random``.
        origin: In words, which text it is, how it was tokenized and which of its windows these are; "" for given
            tokens.
        notes: Further notes for the record.
        bos: The token that texts begin with in this model; None if there is none, or if it is not known.
        spans: (windows, 2) int64, for texts that differ in length: the first token of each that is predicted, and the
            end of its tokens; the rest is padding. None if all tokens are predicted except the first.
        bytes: UTF-8 bytes of the predicted text in each window; empty if they were not counted.
        digest: SHA-256 of other inputs that the tokens stand for, such as sounds; "" if there are tokens alone.
    """

    tokens: Tensor
    source: str
    order: Order = "first"
    origin: str = ""
    notes: tuple[str, ...] = ()
    bos: int | None = None
    spans: Tensor | None = None
    bytes: tuple[int, ...] = ()
    digest: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def of(self, numbers: Tensor) -> Windows:
        """The windows with these ``numbers`` (int64), counted from 0."""
        spans = None if self.spans is None else self.spans[numbers]
        sizes = tuple(self.bytes[number] for number in numbers.tolist()) if self.bytes else ()
        return replace(self, tokens=self.tokens[numbers], spans=spans, bytes=sizes)

    def fingerprint(self) -> str:
        """SHA-256 of the tokens, which shows whether two runs saw the same text."""
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes() + self.digest.encode()).hexdigest()
