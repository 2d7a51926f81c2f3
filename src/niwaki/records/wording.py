"""Words for people."""

from __future__ import annotations


def counted(count: int | str, noun: str, plural: str = "") -> str:
    """``"1 window"``, ``"2,048 windows"``; ``plural`` is for nouns that need more than an s."""
    shown = f"{count:,}" if isinstance(count, int) else count
    return f"{shown} {noun if shown == '1' else plural or noun + 's'}"
