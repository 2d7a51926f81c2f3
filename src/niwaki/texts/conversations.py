"""Conversations with images to calibrate on, as a model's own processor makes them into what the model receives."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor

from niwaki.checkpoints.tensors import raw_bytes
from niwaki.errors import CalibrationError, UsageError, first_line, named, panics_as_errors, raised_as
from niwaki.models.interface import Inputs
from niwaki.models.streamed import StreamedModel
from niwaki.options import USUAL_SAMPLES, Calibration
from niwaki.records.record import CalibrationRecord
from niwaki.texts.rows import ChatTemplate, refused_note, verbatim
from niwaki.texts.sources import Conversation, read_conversations

_TOKENS = "input_ids"
_EXTRA = "pip install pillow torchvision"


@dataclass(frozen=True)
class Conversations(Sequence[Inputs]):
    """Conversations with images: a sequence of what the model receives for each, which is made when it is asked for.

    Attributes:
        source: The file's name, as it was given.
        notes: What else a record should say of them.
    """

    source: str
    notes: tuple[str, ...]
    _conversations: list[Conversation]
    _processor: Any
    _longest: int
    _digest: str

    def __len__(self) -> int:
        return len(self._conversations)

    @overload
    def __getitem__(self, index: int) -> Inputs: ...

    @overload
    def __getitem__(self, index: slice | Tensor) -> Conversations: ...

    def __getitem__(self, index: int | slice | Tensor) -> Inputs | Conversations:
        """What the model receives for one of them; or some of them, by a slice or their numbers."""
        if isinstance(index, int):
            return _processed(self._processor, self._conversations[index])
        chosen = torch.arange(len(self))[index].tolist()
        return dataclasses.replace(self, _conversations=[self._conversations[i] for i in chosen])

    def described(self, seed: int) -> CalibrationRecord:
        """What a record has of them; ``seed`` is that of random windows."""
        return {
            "source": self.source,
            "samples": len(self),
            "images": sum(len(each.images) for each in self._conversations),
            "sequence_length": self._longest,
            "order": "first",
            "seed": seed,
            "tokens_sha256": self._digest,
        }

    def fingerprint(self) -> str:
        """SHA-256 of all that the model receives."""
        return self._digest


#: What blocks are calibrated on: (samples, length) int64 tokens of text, or conversations.
Samples: TypeAlias = Tensor | Conversations


def find_conversations(model: StreamedModel, calibration: Calibration) -> Conversations | None:
    """The conversations that ``calibration`` is; None where it is text.

    All are made into what the model receives once, so that errors show before the work: CalibrationError for files of
    images that are missing or cannot be read, a model without a processor of images, a missing extra, and conversations
    that are longer than the model's positions; UsageError for options that are for windows of text.
    """
    source, conversations = _with_images(calibration)
    if not conversations:
        return None
    if len(calibration.texts) > 1:
        raise UsageError(f"{source} has images, and cannot be combined with other texts; give it alone")
    usual = {
        "--length": calibration.length is None,
        "--order": calibration.order != "random",
        "--no-bos": calibration.bos,
    }
    for option, is_usual in usual.items():
        if not is_usual:
            raise UsageError(
                f"{option} is for windows of text; {source} has conversations with images, which are used as they are"
            )
    samples = calibration.samples or USUAL_SAMPLES
    conversations = conversations[:samples]
    processor = _load_processor(model.checkpoint.path, source)
    digest, lengths = hashlib.sha256(), []
    refused = list[str]()
    conversations = _with_texts(processor, conversations, refused)
    if not conversations:
        raise CalibrationError(refused[0])
    for each in conversations:
        inputs = _processed(processor, each)
        with named(each.where):
            model.check(inputs[_TOKENS])
        lengths.append(inputs[_TOKENS].shape[1])
        for name, value in sorted(inputs.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(raw_bytes(value))
    notes = [f"the conversations of {source} have {min(lengths):,} to {max(lengths):,} tokens, each on its own"]
    notes += refused_note(source, refused)
    if len(conversations) < samples:
        notes.append(f"{source} has {len(conversations):,} conversations, fewer than {samples:,} samples")
    return Conversations(source, tuple(notes), conversations, processor, max(lengths), digest.hexdigest())


def has_images(calibration: Calibration) -> bool:
    """Whether any of its texts has images."""
    return bool(_with_images(calibration)[1])


def _with_images(calibration: Calibration) -> tuple[str, list[Conversation]]:
    """The first of the texts that has images, and its conversations; ("", []) where none has, or a column is named."""
    for text in calibration.texts if calibration.field is None else ():
        if isinstance(text, str) and text and (found := read_conversations(text)):  # no name is refused elsewhere
            return text, found
    return "", []


def _load_processor(path: Path, source: str) -> Any:
    """The model's own processor of texts and images; CalibrationError where it has none, or an extra is missing."""
    if importlib.util.find_spec("PIL") is None:
        raise CalibrationError(f"images, as in {source}, need an extra: {_EXTRA}")
    from transformers import AutoProcessor

    with raised_as(CalibrationError, f"{path} has no processor of images that can be loaded"), panics_as_errors():
        try:
            processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
        except ImportError as error:
            raise CalibrationError(
                f"the processor of {path} needs something else ({first_line(error)}); install the extra: {_EXTRA}"
            ) from error
    if not hasattr(processor, "image_processor"):  # of a model of text that is its tokenizer
        raise CalibrationError(f"{path} has no processor of images, and {source} has some; calibrate on a text")
    return processor


def _with_texts(processor: Any, conversations: list[Conversation], refused: list[str]) -> list[Conversation]:
    """The conversations with their texts, without those that the chat template refuses, see :class:`ChatTemplate`."""
    template = getattr(processor, "chat_template", None)
    if isinstance(template, dict):  # of several by name
        template = template.get("default")
    if not isinstance(template, str):
        return conversations
    special = getattr(getattr(processor, "tokenizer", None), "special_tokens_map", {})
    wheres, messages = [each.where for each in conversations], [each.messages for each in conversations]
    texts = ChatTemplate(template, special, bos="").texts(wheres, messages, refused)
    both = zip(conversations, texts, strict=True)
    return [dataclasses.replace(each, text=text) for each, text in both if text is not None]


def _processed(processor: Any, conversation: Conversation) -> dict[str, Tensor]:
    """What the model receives; CalibrationError, which names the line, where the processor fails."""
    # The template itself is run with limits alone.
    text = {} if conversation.text is None else {"chat_template": verbatim(conversation.text)}
    with raised_as(CalibrationError, f"{conversation.where}: the model's processor fails"), panics_as_errors():
        inputs = processor.apply_chat_template(
            conversation.messages, tokenize=True, return_dict=True, return_tensors="pt", **text
        )
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
