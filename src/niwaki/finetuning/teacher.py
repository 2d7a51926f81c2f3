"""The dense model's predictions as what a trainer trains towards, without the dense model in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.tensors import read_json
from niwaki.errors import CalibrationError, OutputError, UnsupportedModelError, UsageError
from niwaki.files import output_errors
from niwaki.healing.objective import Head, Logits, find_logits
from niwaki.healing.teacher import Lessons, teach
from niwaki.models.device import training_dtype
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.options import Compute
from niwaki.records.progress import Progress

#: Bytes of hidden states of the rows that are read at once.
_STATES = 1 << 30
#: In the directory: what the predictions are of.
_ASKED = "asked.json"
#: Rows of the head by which a model is known to be of the same origin.
_COMPARED = 256


class Teacher:
    """A dense model that reads a data set once, for training a pruned model towards its predictions (distillation).

    Use it to train on your own data, in your own loop or a ``Trainer``; the dense model is not in memory during
    training. The loss is the exact KL divergence of the next token's distribution. For each token, a vector as long as
    a hidden state and a number are stored (2 bytes each; see docs/healing.md). The dense model is read one block at a
    time. The head, and the embeddings if they are tied to it, are those of the dense model and are not trained.

    Args:
        model: The dense model: a directory with config.json and safetensors, or a Hugging Face hub id.
        directory: Where the predictions are stored; existing ones are reused.
        compute: The device, and the dtype of the blocks.
        progress: Receives the progress of reading.

    Raises:
        NiwakiError: the model cannot be read, does not predict the next token, or has logits that are not simply
            products with its head.
    """

    def __init__(
        self,
        model: str | Path,
        directory: str | Path,
        *,
        compute: Compute | str = Compute(),
        progress: Progress | None = None,
    ) -> None:
        compute, checkpoint = Compute.of(compute), Checkpoint(locate_model(str(model)))
        dtype = training_dtype(compute.dtype, compute.device, checkpoint)
        self._dense = StreamedModel(checkpoint, compute.device, dtype)
        if self._dense.sees_ahead:
            raise UnsupportedModelError(f"{model} predicts no next token, and cannot teach")
        self._dense.check_head()
        logits = find_logits(self._dense)
        assert isinstance(logits, Logits)
        self._logits = logits
        self._directory, self._progress = Path(directory), progress or Progress()
        self._numbers: dict[bytes, int] = {}
        self._lessons: Lessons | None = None

    def read(self, rows: Iterable[Sequence[int]]) -> None:
        """Reads a data set: the tokens of each row, as the trainer will give them to the model, without padding.

        Raises:
            CalibrationError: there are no rows, or one has tokens that the model does not know.
            OutputError: there is no space, or the directory has predictions for other rows or of another model.
        """
        known = {_digest(row): list(row) for row in rows if len(row) > 1}
        if not known:
            raise CalibrationError("there is nothing to read: each row is the tokens of a text, at least two")
        longest = max(map(len, known.values()))
        # What follows a row does not change what is predicted in it.
        tokens = torch.tensor([row + row[-1:] * (longest - len(row)) for row in known.values()])
        self._dense.check(tokens)
        with self._dense.head():
            head = self._head(self._dense.model, self._dense.dtype, copy=True)
        self._first = head.weight[:_COMPARED].to("cpu", copy=True)
        self._check_directory(tokens)
        lessons = Lessons(self._directory, tokens, head)
        together = max(1, _STATES // (4 * head.weight.shape[1] * longest))
        for start in range(0, len(tokens), together):
            some = range(start, min(len(tokens), start + together))
            if not lessons.has(some):
                teach(self._dense, head, lessons, some, self._progress)
                lessons.keep(some)
        self._numbers, self._lessons = {digest: number for number, digest in enumerate(known)}, lessons

    def loss(self, model: nn.Module) -> Callable[..., Tensor]:
        """The loss for ``Trainer(..., compute_loss_func=teacher.loss(model))``, or for your own training loop.

        Call ``loss(outputs, labels)`` right after ``outputs = model(...)``. The result is the mean KL divergence in
        nats, over the tokens whose label is not -100, or over all that are not padding if there are no labels. From now
        on the head of ``model``, and the embeddings if they are tied to it, are not trained.

        Raises:
            UsageError: nothing has been read, or the head is not the dense model's; later, a row has not been read.
        """
        lessons = self._lessons
        if lessons is None:
            raise UsageError("the teacher has read nothing yet; call read with the tokens of the data set")
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        first = self._first
        if head.weight.shape[1:] != first.shape[1:] or not torch.equal(
            head.weight[: len(first)].detach().to("cpu", first.dtype), first
        ):
            raise UsageError("the model has another head than the dense model; give one that was pruned from it")
        head.requires_grad_(False)
        seen: dict[str, Any] = {}

        def watch(_module: nn.Module, _args: Any, given: dict[str, Any]) -> None:
            seen.update(tokens=given.get("input_ids"), mask=given.get("attention_mask"))

        model.register_forward_pre_hook(watch, with_kwargs=True)
        head.register_forward_pre_hook(lambda _module, inputs: seen.update(states=inputs[0]))

        def loss(outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None) -> Tensor:
            states, tokens, mask = (seen.pop(name, None) for name in ("states", "tokens", "mask"))
            if tokens is None or states is None or states.shape[:2] != tokens.shape:
                raise UsageError("the loss follows a pass of the model with input_ids, of which all logits are asked")
            counted = torch.zeros_like(tokens, dtype=torch.bool)
            of_lessons = torch.zeros_like(tokens)
            for i, row in enumerate(tokens):
                places = torch.arange(len(row), device=row.device) if mask is None else mask[i].nonzero().flatten()
                number = self._numbers.get(_digest(row[places].tolist()))
                if number is None:
                    raise UsageError(
                        f"the teacher has not read a row of {len(places):,} tokens; read the tokens as the trainer "
                        "cuts them (max_length), without packing"
                    )
                predicting = places[:-1]  # what follows the last one is not in the row
                counted[i, predicting] = True if labels is None else labels[i, places[1:]] != -100
                of_lessons[i, predicting] = number * lessons.tokens.shape[1] + torch.arange(
                    len(predicting), device=row.device
                )
            at = of_lessons[counted].cpu()
            kept = [part.flatten(0, 1)[at].to(states.device) for part in lessons.parts]
            kept = [part.float() if part.is_floating_point() else part for part in kept]
            made = self._head(model, states.dtype)
            losses: Tensor = _KnownGradient.apply(states[counted], made, *kept)  # type: ignore[no-untyped-call]
            return losses.sum() / (num_items_in_batch if num_items_in_batch is not None else max(1, len(losses)))

        return loss

    def _head(self, model: Any, dtype: torch.dtype, copy: bool = False) -> Head:
        """The head of a model, in a dtype; a ``copy`` of it where its weights will not stay."""
        output = model.get_output_embeddings()
        if isinstance(output.weight, DTensor):
            raise UnsupportedModelError("the head is split over processes (FSDP); the loss is for whole models, or DDP")
        return self._logits.of(model, dtype, copy)

    def _check_directory(self, tokens: Tensor) -> None:
        """OutputError where it has something else; else it says from now on what it has."""
        asked = {
            "model": self._dense.checkpoint.fingerprint(),
            "dtype": str(self._dense.dtype),
            "rows": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        }
        file = self._directory / _ASKED
        with output_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            if file.exists():
                if read_json(file) == asked:
                    return
                raise OutputError(
                    f"{self._directory} has the predictions of another model, or of other rows; give another "
                    "directory, or remove it"
                )
            file.write_text(json.dumps(asked))


class _KnownGradient(torch.autograd.Function):
    """KL(dense | model) of each token, by the model's states before the head."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Head, *kept: Tensor) -> Tensor:
        losses, gradient = head.divergence(states.detach(), *kept)
        ctx.save_for_backward(gradient.to(states.dtype))
        ctx.others = 1 + len(kept)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradients[0].unsqueeze(1).to(gradient.dtype) * gradient, *[None] * ctx.others


def _digest(row: Sequence[int]) -> bytes:
    """Two rows are the same if this is."""
    return hashlib.blake2b(json.dumps(list(map(int, row))).encode(), digest_size=16).digest()
