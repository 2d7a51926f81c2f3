"""Kept zeros for the trainers of transformers, TRL and others that take callbacks of transformers."""

import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from niwaki.errors import NiwakiError
from niwaki.finetuning.zeros import KeptZeros, keep_zeros


class KeepZeros(TrainerCallback):
    """A callback for trainers that keeps the zeros of the model while it is trained: see :func:`niwaki.keep_zeros`.

    For ``Trainer`` of transformers, ``SFTTrainer`` and ``DPOTrainer`` of TRL, and any other trainer that takes
    callbacks: ``Trainer(..., callbacks=[KeepZeros()])``. Each saved checkpoint is checked, and a warning says if it
    lacks zeros.

    Attributes:
        zeros: The :class:`~niwaki.KeptZeros` of the model, from the beginning of training; None before.
    """

    def __init__(self) -> None:
        self.zeros: KeptZeros | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begins to keep the zeros, once the trainer has prepared the model."""
        if self.zeros:
            self.zeros.remove()
        self.zeros = keep_zeros(model)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Checks the saved checkpoint, and warns if it lacks zeros."""
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.zeros and state.is_world_process_zero:
            try:
                self.zeros.check_saved(directory)
            except NiwakiError as error:
                warnings.warn(str(error), stacklevel=2)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Checks the model; its zeros are still kept afterwards, and its adapters stay masked."""
        if self.zeros:
            self.zeros.check()
