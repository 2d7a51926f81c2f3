"""Sentences of a text, for models that make vectors of them."""

import contextlib
import re

from torch import Tensor, tensor

from niwaki.errors import CalibrationError
from niwaki.models.streamed import StreamedModel
from niwaki.windows import Windows

#: Where one ends: at a full stop before a space, one of Chinese or Japanese, or the end of a line.
_END = re.compile("(?<=[.!?\u2026])\\s+|(?<=[\u3002\uff01\uff1f])\\s*|\n+")
#: Sentences at most, and tokens that each has at least, with those that the tokenizer adds.
_MOST, _SHORTEST = 1_000, 8


def sentences_of(model: StreamedModel, windows: Windows) -> list[Tensor]:
    """Tokens (length,) int64 of each sentence in the text of ``windows``, as the model's tokenizer gives them alone.

    They are at most as long as a window. Where the model has no tokenizer, or the text has fewer sentences than
    windows, it is the windows themselves.
    """
    with contextlib.suppress(CalibrationError):  # a model may come without one
        tokenizer, longest = model.tokenizer, windows.tokens.shape[1]
        text = str(tokenizer.decode(windows.tokens.flatten().tolist(), skip_special_tokens=True))
        parts = list(dict.fromkeys(each.strip() for each in _END.split(text)))[:_MOST]
        if parts:
            tokens = tokenizer(parts, truncation=True, max_length=longest)["input_ids"]
            found = [tensor(each) for each in tokens if len(each) >= min(_SHORTEST, longest)]
            if len(found) > len(windows.tokens):
                return found
    return list(windows.tokens)
