"""Text that the model writes itself, to calibrate on: conversations in which it answers prompts, or whatever it draws.

For a model that follows instructions, what it is calibrated on matters more than by which method it is pruned: with its
own answers a model keeps most of its skills where it loses half of them with web text (arXiv 2509.12464).
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from niwaki.checkpoints.tensors import read_json
from niwaki.errors import CalibrationError, CheckpointError, NiwakiError, UnsupportedModelError, first_line
from niwaki.files import cached_directory, read_cached, write_cached
from niwaki.layer.linalg import products
from niwaki.models.generation import Sampling, at_a_time, continued, device_memory, for_writing
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import check_known, encode, find_bos, in_windows
from niwaki.options import OWN_ANSWERS, Calibration, Measurement
from niwaki.records.progress import Progress
from niwaki.records.record import versions
from niwaki.texts.rows import ChatTemplate, Messages, refused_note
from niwaki.texts.sources import read_prompts
from niwaki.texts.texts import Texts, usual_size
from niwaki.windows import Windows

#: Answers that are written together.
_TOGETHER = 32
#: For models that do not say how to draw from them; small ones that draw from all tokens soon write nonsense.
USUAL_SAMPLING = Sampling(temperature=0.7, top_p=0.95)


def with_answers(
    model: StreamedModel,
    calibration: Calibration,
    budget: int | None,
    world: World,
    progress: Progress,
    *,
    measurement: Measurement = Measurement(samples=0),
    usual: int | None = None,
    fewer: bool = False,
    writes: bool = True,
) -> Calibration:
    """``calibration`` with windows of conversations in the place of prompts; the same where no answers are asked for.

    All other texts are read before the first answer is written, as :meth:`.Texts.read` reads them with ``measurement``,
    ``usual`` and ``fewer``, so that errors show then; unless it ``writes``, windows of nothing stand for answers.

    The dense model writes the answers until there are enough windows, drawn as its ``generation_config.json`` says, or
    with temperature 0.7 and top-p 0.95; where there are fewer prompts than that takes, each is answered several times.
    A window begins with a conversation, and the last one in it is cut off. Answers are kept with what transformers
    keeps on disk (``HF_HOME``), so that a run that is repeated, or goes on, has them.

    The whole model with its keys and values takes up to ``budget`` bytes, by default the device's memory.

    Raises:
        NiwakiError: as of :meth:`.Texts.read`.
        CalibrationError: there are no prompts in the file, the model has no chat template or one that fails, a prompt
            is longer than a window, the model does not fit in memory, or it answers nothing.
        UnsupportedModelError: transformers cannot generate text with this model.
    """
    if not any(calibration.answered):
        return calibration
    samples, length = usual_size(model, calibration)
    every = [*zip(calibration.texts, calibration.shares(samples), calibration.answered, strict=True)]
    asked = {str(text): _Prompts.of(model, str(text), length) for text, _, answered in every if answered}
    nothing = [torch.zeros(share, length, dtype=torch.int64) if answered else text for text, share, answered in every]
    blank = dataclasses.replace(calibration, text=nothing, answers=None)
    Texts.read(model, blank, measurement, usual, fewer)
    if not writes:
        return blank
    texts = [
        _answered(model, asked[str(text)], share, calibration, budget, world, progress) if answered else text
        for text, share, answered in every
    ]
    return dataclasses.replace(calibration, text=texts, answers=None)


@dataclass(frozen=True)
class _Prompts:
    """The prompts of ``source``, as tokens for windows of a ``length``; so many conversations were ``answered``."""

    source: str
    prompts: list[list[int]]
    length: int
    answered: int
    refused: list[str]  # why the chat template refuses some

    @classmethod
    def of(cls, model: StreamedModel, source: str, length: int) -> "_Prompts":
        """CalibrationError where there are no prompts, or the model cannot answer them."""
        (found, answered), refused = read_prompts(source), list[str]()
        return cls(source, _prompts(model, found, source, length, refused), length, answered, refused)


def _answered(
    model: StreamedModel,
    asked: _Prompts,
    samples: int,
    calibration: Calibration,
    budget: int | None,
    world: World,
    progress: Progress,
) -> Windows:
    """So many windows of conversations that begin with prompts which are ``asked``, for ``calibration``.

    They say which token texts of the model begin with, if one does and that is wanted.
    """
    source, length = asked.source, asked.length
    writer = _Writer(for_writing(model), asked.prompts, length, calibration.seed)
    writer.find_room(source, budget, world)
    windows, answers = _joined(writer, samples, source, world, progress)
    notes = [*writer.notes, *refused_note(source, asked.refused)]
    if asked.answered:
        notes.append(
            f"{asked.answered:,} of the {len(asked.prompts) + len(asked.refused):,} conversations in {source} end with "
            "an answer, in place of which the model writes its own; without --answers they are read as they are"
        )
    for what, number in (
        (f"had not ended at {length:,} tokens and were cut off", sum(not answer.ended for answer in answers)),
        ("are empty", sum(not answer.length for answer in answers)),
    ):
        if number:
            notes.append(f"{number:,} of the {len(answers):,} answers that the model wrote {what}")
    origin = (
        f"{len(answers):,} answers of the dense model to {source} in its chat template, drawn with {writer.sampling}; "
        "a window begins with one"
    )
    name = "own answers" if source == OWN_ANSWERS else f"own answers to {source}"
    bos = find_bos(model.tokenizer) if calibration.bos else None
    return Windows(torch.tensor(windows, dtype=torch.int64), name, origin=origin, notes=tuple(notes), bos=bos)


def _prompts(
    model: StreamedModel, conversations: list[Messages], source: str, length: int, refused: list[str]
) -> list[list[int]]:
    """The tokens of each of ``conversations``, up to where the model's answer begins, in windows of ``length``.

    Why the chat template refuses some goes to ``refused``; CalibrationError where it refuses all.
    """
    tokenizer, path = model.tokenizer, model.checkpoint.path
    if (template := ChatTemplate.of(tokenizer, bos=None)) is None:
        raise CalibrationError(
            f"{path} has no chat template, so its model cannot be asked; calibrate on a text, without --answers"
        )
    wheres = [f"prompt {number} of {source}" for number in range(1, len(conversations) + 1)]
    texts = template.texts(wheres, conversations, refused, ask=True)
    made = {where: text for where, text in zip(wheres, texts, strict=True) if text is not None}
    if not made:
        raise CalibrationError(refused[0])
    prompts = [encode(tokenizer, text) for text in made.values()]
    if not all(prompts):
        raise CalibrationError(f"the model's chat template makes nothing of the prompts of {source}")
    check_known([token for prompt in prompts for token in prompt], tokenizer, source)
    longest = max(prompts, key=len)
    if len(longest) > length // 2:
        raise CalibrationError(
            f"{[*made][prompts.index(longest)]} has {len(longest):,} tokens, more than half of a window "
            f"of {length:,}; use longer windows (--length) or shorter prompts"
        )
    return prompts


def _joined(
    writer: "_Writer", samples: int, source: str, world: World, progress: Progress
) -> tuple[list[list[int]], list["_Answer"]]:
    """(``samples`` windows of conversations one after the other, all answers that were written for them)."""
    windows, window, answers = [], list[int](), list[_Answer]()
    with writer:
        for batch in writer.batches(world, progress):
            answers += batch
            for answer in batch:
                window += [*writer.prompts[answer.prompt], *answer.tokens]
                if len(window) >= writer.length:
                    windows.append(window[: writer.length])
                    window = []
            if not any(answer.length for answer in answers):
                raise CalibrationError(f"the model answers none of the prompts of {source}; calibrate on a text")
            if len(windows) >= samples:
                break
    return windows[:samples], answers


@dataclass(frozen=True)
class _Answer:
    prompt: int
    tokens: list[int]  # with the one that ends it
    ended: bool

    @property
    def length(self) -> int:
        """Tokens that say something."""
        return len(self.tokens) - self.ended


@dataclass
class _Writer(contextlib.ExitStack):
    """Writes batches of answers, each always the same, whichever process does it; holds the whole model."""

    model: StreamedModel
    prompts: list[list[int]]
    length: int  # of windows, and of a prompt with its answer
    seed: int

    def __post_init__(self) -> None:
        super().__init__()
        settings = _own_settings(self.model)
        self.ends, self.sampling = _ends(settings, self.model.tokenizer), _sampling(settings)
        self.notes: list[str] = []
        self._together = 0
        self._whole: PreTrainedModel | None = None
        self._place: Path | None = None

    def find_room(self, source: str, budget: int | None, world: World) -> None:
        """Finds how many answers to write together, and where they are kept; CalibrationError where none fits."""
        longest = self.length + self.length // 2
        self._together = min(world.collected(at_a_time(self.model, longest, budget, _TOGETHER)))
        if not self._together:
            raise CalibrationError(
                f"the model's {self.model.size / 2**30:,.1f} GiB do not fit in memory, so it cannot answer "
                f"{source}; calibrate on a text"
            )
        model = [self.model.checkpoint.fingerprint(), str(self.model.dtype), self.model.device.type, versions()]
        asked = [self.prompts, self.length, self._together, self.seed, self.ends, str(self.sampling), model]
        try:
            self._place = cached_directory("answers", asked)
        except (OSError, ValueError) as error:
            self._unkept(error)

    def batches(self, world: World, progress: Progress) -> Iterator[list[_Answer]]:
        """One after the other, without end; each process writes every ``world.size``-th."""
        first = 0
        while True:
            own = self._batch(first + world.rank, progress)
            yield from world.collected(own)
            first += world.size

    def _batch(self, number: int, progress: Progress) -> list[_Answer]:
        which = [(number * self._together + i) % len(self.prompts) for i in range(self._together)]
        kept = self._kept(number, which)
        if kept is None:
            kept = self._written(number, [self.prompts[i] for i in which], progress)
            if self._place:
                try:
                    write_cached(self._place / f"{number}.json", kept)
                except NiwakiError as error:  # answers that are not kept are written again some time
                    self._unkept(error)
        return [
            _Answer(i, tokens, bool(tokens) and tokens[-1] in self.ends) for i, tokens in zip(which, kept, strict=True)
        ]

    def _kept(self, number: int, which: list[int]) -> list[list[int]] | None:
        """The answers of an earlier run, where they are what this one writes there."""
        known = self.model.config.get_text_config().vocab_size
        answers: Any = read_cached(self._place / f"{number}.json", list[list[int]]) if self._place else None
        if answers is None or len(answers) != len(which):
            return None
        fit = all(len(answer) <= self.length and all(0 <= t < known for t in answer) for answer in answers)
        return answers if fit else None

    def _written(self, number: int, prompts: list[list[int]], progress: Progress) -> list[list[int]]:
        width = max(map(len, prompts))
        # On the left, where the model does not see it.
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device, steps = self.model.device, 0
        length = self.length + width - min(map(len, prompts))  # for the shortest

        def done() -> None:
            nonlocal steps
            steps += 1
            progress.status("writing answers, token", steps, length - width)

        if self._whole is None:
            self._whole = self.enter_context(self.model.whole())
        with products(tf32=False), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(1_000_003 * (self.seed + 1) + number)
            text = continued(self._whole, padded.to(device), length, done, mask.to(device), self.ends, self.sampling)
        answers = text[:, width:].tolist()
        rooms = [self.length - len(prompt) for prompt in prompts]
        ends = [next((i + 1 for i, token in enumerate(each) if token in self.ends), self.length) for each in answers]
        return [each[: min(room, end)] for each, room, end in zip(answers, rooms, ends, strict=True)]

    def _unkept(self, error: Exception) -> None:
        self._place = None
        self.notes.append(f"the model's answers could not be saved for another run: {first_line(error)}")


def _own_settings(model: StreamedModel) -> dict[str, Any]:
    """What the model's maker says about drawing from it, unchecked."""
    with contextlib.suppress(CheckpointError):
        return read_json(model.checkpoint.path / "generation_config.json")
    return {}


def _ends(settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end an answer."""
    own = settings.get("eos_token_id")
    ends = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    return tuple(sorted({end for end in ends if type(end) is int}))


def _sampling(settings: dict[str, Any]) -> Sampling:
    """How the model's maker wants it to be drawn from, as far as that is said and makes sense."""
    if settings.get("do_sample") is not True:
        return USUAL_SAMPLING
    said = Sampling()
    for name, least, most in (("temperature", 0.01, 10), ("top_p", 0.01, 1), ("top_k", 0, 1e6)):
        usual, value = getattr(said, name), settings.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            said = dataclasses.replace(said, **{name: type(usual)(value)})
    return said


# Text that the dense model writes itself, to prune and to fit to in addition to the given text.

#: Tokens of one text, at most: its time goes with their number, and so much says what kind of text it is.
_LONGEST = 128
#: The most texts at a time: more are hardly faster.
_TEXTS_TOGETHER = 256


def synthesize(
    model: StreamedModel,
    count: int,
    length: int,
    budget: int | None,
    world: World,
    progress: Progress,
    seed: int = 0,
    bos: int | None = None,
) -> Tensor:
    """(``count``, ``length``) int64: texts drawn from the dense model, token by token from its own probabilities.

    Each begins with a token that is drawn from all, so that they are of as many kinds as the model knows (Liu et al.
    2023, arXiv 2305.17888), and after the end of a text another one follows. They are short, and joined to windows. All
    processes have the same; another ``seed`` gives other texts. Where the model's texts begin with a token ``bos``,
    these are written after it, and each window begins with it.

    The whole model with its keys and values takes up to ``budget`` bytes of each process, by default half of the
    device's, because the usual effort does this unasked.

    Cost: a pass of the whole model for each position of a text and each batch of texts, a step for ``progress``.

    Why: a fit to more text holds better on unseen text, and the model's own is nearly as good for that as real text; on
    text unlike the given text it is better (docs/effort.md). Williams et al. 2024, arXiv 2410.17170, calibrate pruning
    on such text alone.

    Raises UnsupportedModelError where the model does not fit or transformers cannot generate text with it.
    """
    if model.sees_ahead:
        raise UnsupportedModelError("it is an encoder, which writes no text")
    if model.pairs is not None:
        raise UnsupportedModelError("it is an encoder with a decoder, which needs a source to write anything")
    model = for_writing(model)
    budget = device_memory(model.device) // 2 if budget is None else budget
    own = bos is not None  # tokens before each text and in each window that are not of a text
    short = max(min(length, _LONGEST), 2 + own)
    drawing = torch.Generator().manual_seed(seed)
    known = model.config.get_text_config().vocab_size
    first = torch.randint(known, (math.ceil(count * (length - own) / (short - own)), 1), generator=drawing)
    if bos is not None:
        first = torch.nn.functional.pad(first, (1, 0), value=bos)
    together = min(world.collected(at_a_time(model, short, budget, _TEXTS_TOGETHER)))
    if not together:
        raise UnsupportedModelError(f"its {model.size / 2**30:,.1f} GiB do not fit in memory")
    parts = world.share(first).split(together)
    progress.stage(0, "synthesis", len(parts) * (short - 1 - own))
    drawn: list[Tensor] = []
    cuda = [model.device] if model.device.type == "cuda" else []
    with model.whole() as whole, torch.random.fork_rng(cuda):
        for turn, part in enumerate(parts):
            torch.manual_seed(1_000_003 * world.rank + turn + 1_000_000_007 * seed)
            drawn.append(continued(whole, part.to(model.device), short, progress.step))
    return in_windows(torch.cat(world.collected(torch.cat(drawn)))[:, own:].flatten(), count, length, bos)
