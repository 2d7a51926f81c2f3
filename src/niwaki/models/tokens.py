"""A model's tokenizer: texts to tokens, the token before a text, and windows."""

import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from niwaki.errors import CalibrationError, UsageError, first_line, panics_as_errors, raised_as

#: Characters that become tokens at once, which takes about 300 bytes for each, and by how many two such parts overlap.
_AT_ONCE, _OVERLAP = 1 << 18, 1 << 12
#: Where this many tokens of both are the same, in the middle of the overlap, one part ends and the next begins.
_SAME = 32
#: The file of all of a tokenizer; classes of transformers name others, of which this one is made.
_WHOLE = "tokenizer.json"
#: Of a tokenizer whose files are missing.
_MISSING = "neither tokenizer.json nor files that one can be made from are there; is the download complete?"
#: What shows which tokens a tokenizer puts around a text, and whether it keeps the text.
_SAMPLE = "A text of 7 words, and no more."
_log = logging.getLogger(__name__)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; CalibrationError where there is none, or it needs code from there."""
    # Texts are longer than any context; without this each one would be warned about.
    how: dict[str, Any] = {"trust_remote_code": False, "model_max_length": sys.maxsize}
    try:
        with panics_as_errors():
            made = AutoTokenizer.from_pretrained(path, **how)
            names = set(made.vocab_files_names.values())  # without any of which some are made that know nothing
            if not names or any(file.name in (*names, _WHOLE) or file.suffix == ".model" for file in path.iterdir()):
                return made if _keeps_text(made) else _as_written(path, made, how)
        reason = _MISSING
    except Exception as error:  # a broken tokenizer.json surfaces as nearly anything
        reason = first_line(error).rstrip()
        if reason.endswith(":"):  # a list of what there could be instead follows
            reason = _MISSING
        raise CalibrationError(f"{path} has no tokenizer that can be loaded: {reason}") from error
    raise CalibrationError(f"{path} has no tokenizer that can be loaded: {reason}")


def _as_written(path: Path, made: PreTrainedTokenizerBase, how: dict[str, Any]) -> PreTrainedTokenizerBase:
    """``made``, or what tokenizer.json says where that keeps texts of which ``made`` loses something.

    Some classes of transformers take tokens from it and have their own way of splitting and joining, such as that of
    LLaMA 2, which loses the spaces of a byte-level tokenizer.
    """
    if not (path / _WHOLE).is_file():
        return made
    other: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(path, **how)
    if not _keeps_text(other):
        return made
    _log.warning(
        f"{path}: as {type(made).__name__} in transformers its tokenizer loses parts of texts, so it is taken as "
        f"{_WHOLE} says; with tokenizer_class TokenizersBackend in tokenizer_config.json other programs do so too"
    )
    return other


def _keeps_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    with contextlib.suppress(Exception):  # some want other texts, or what their vocabulary lacks: whoever reads says so
        ids = tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
        return bool(tokenizer.decode(ids, clean_up_tokenization_spaces=False) == _SAMPLE)
    return True


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    """The tokens of a text; CalibrationError where the tokenizer fails."""
    # Whatever fails: the tokenizers library, or any one of hundreds of tokenizers.
    with raised_as(CalibrationError, "the model's tokenizer fails on this text"), panics_as_errors():
        if len(text) > _AT_ONCE and not special and getattr(tokenizer, "is_fast", False):
            return _encode_in_parts(tokenizer, text)
        ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids


def find_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The one token that the tokenizer itself puts before a text; None where it puts none, or several.

    Found by making tokens of a text both ways: names and flags of tokenizers do not tell. What it puts after a text is
    not asked for.
    """
    with contextlib.suppress(CalibrationError):  # of a tokenizer that knows other characters only
        plain, whole = (encode(tokenizer, _SAMPLE, special) for special in (False, True))
        if plain and whole[: len(plain)] != plain and whole[1 : 1 + len(plain)] == plain:
            return whole[0]
    return None


def in_windows(ids: Tensor, count: int, length: int, bos: int | None) -> Tensor:
    """(``count``, ``length``) windows of running text (tokens,), each after the token ``bos`` where there is one."""
    if bos is None:
        return ids[: count * length].view(count, length)
    text = ids[: count * (length - 1)].view(count, length - 1)
    return torch.nn.functional.pad(text, (1, 0), value=bos)


def _encode_in_parts(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of ``text`` in less memory than at once: what a token is depends only on the characters around it."""

    def part(start: int) -> tuple[list[int], list[int]]:
        """(tokens, where in ``text`` each one starts)."""
        made = tokenizer(text[start : start + _AT_ONCE], add_special_tokens=False, return_offsets_mapping=True)
        return made["input_ids"], [start + first for first, _ in made["offset_mapping"]]

    ids: list[int] = []
    these, starts = part(0)
    for start in range(_AT_ONCE - _OVERLAP, len(text) - _OVERLAP, _AT_ONCE - _OVERLAP):
        following, places = part(start)
        first_at = {place: i for i, place in reversed([*enumerate(starts)])}
        for j, place in enumerate(places):
            i = first_at.get(place)
            if place < start + _OVERLAP // 2 or i is None or places[j - 1] == place:
                continue
            if these[i : i + _SAME] == following[j : j + _SAME]:
                ids += these[:i]
                these, starts = following[j:], places[j:]
                break
        else:
            whole: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            return whole
    return ids + these


def check_known(ids: list[int], tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Raises CalibrationError where all tokens stand for something unknown."""
    if ids and {*ids} == {tokenizer.unk_token_id}:
        raise CalibrationError(f"the model's tokenizer knows nothing of {text}")


def room_for_prompt(given: int, tokens: int, longest: float) -> float:
    """How many tokens of a prompt, the last ones, a model reads that has ``longest`` positions for them and an answer.

    UsageError where the ``tokens`` of the answer leave none; a warning in the log where the ``given`` ones are more.
    """
    if tokens >= longest:
        raise UsageError(f"{tokens} tokens are more than the {longest} positions of the model have room for")
    room = longest - tokens
    if given > room:
        read = f"of the {given} tokens of the prompt the last {room} are read"
        _log.warning(f"{read}: the model has room for {longest}, and {tokens} are to be written")
    return room


def check_tokens(tokens: Tensor, config: PreTrainedConfig) -> None:
    """Raises UsageError where a model with this configuration has no embedding for one of the tokens."""
    check_known_tokens(tokens, config.get_text_config().vocab_size)


def check_known_tokens(tokens: Tensor, known: int) -> None:
    """Raises UsageError where there are embeddings for so many tokens, and none for one of these."""
    if tokens.numel() and (tokens.min() < 0 or tokens.max() >= known):
        those = f"tokens go from 0 to {known - 1:,} here, and these from {int(tokens.min()):,} to {int(tokens.max()):,}"
        raise UsageError(f"{those}; is it the model's own tokenizer?")
