"""Windows of tokens: what every text becomes before a model reads it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.choices import Order


@dataclass(frozen=True)
class Windows:
    """Token windows and where they come from.

    Attributes:
        tokens: (windows, length) int64.
        source: The text's name, as it was given.
        order: ``first`` or ``random``.
        origin: What text it is, how it became tokens, and which windows of it, in words; "" for given tokens.
        notes: What else a record should say of them.
        bos: The token that texts of the model begin with; None where they begin with none, or that is not known.
        spans: (windows, 2) int64, of texts that are not all as long: the first token of each that is predicted, and
            where its tokens end; what follows stands for nothing. None where all are predicted but the first.
        bytes: UTF-8 bytes of what is predicted in each window; none where they were not counted.
        digest: SHA-256 of what tokens are the numbers of, such as sounds; "" where they are tokens alone.
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
        """Those with these ``numbers`` (int64), from 0."""
        spans = None if self.spans is None else self.spans[numbers]
        sizes = tuple(self.bytes[number] for number in numbers.tolist()) if self.bytes else ()
        return replace(self, tokens=self.tokens[numbers], spans=spans, bytes=sizes)

    def fingerprint(self) -> str:
        """SHA-256 of the tokens: whether two runs saw the same text."""
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes() + self.digest.encode()).hexdigest()
