"""Kept zeros for the trainers of transformers, TRL and others that take callbacks of transformers."""

import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from niwaki.errors import NiwakiError
from niwaki.finetuning.zeros import KeptZeros, keep_zeros


class KeepZeros(TrainerCallback):
    """Keeps the zeros of the model that a trainer trains: see :func:`niwaki.keep_zeros`.

    For ``Trainer`` of transformers, ``SFTTrainer`` and ``DPOTrainer`` of TRL, and any other that takes callbacks:
    ``Trainer(..., callbacks=[KeepZeros()])``. Each checkpoint that is saved is checked; a warning says where it lacks
    zeros.

    Attributes:
        zeros: From the beginning of training: what keeps them.
    """

    def __init__(self) -> None:
        self.zeros: KeptZeros | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begins to keep them, once the trainer has made of the model what it trains."""
        if self.zeros:
            self.zeros.remove()
        self.zeros = keep_zeros(model)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Checks the checkpoint."""
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.zeros and state.is_world_process_zero:
            try:
                self.zeros.check_saved(directory)
            except NiwakiError as error:
                warnings.warn(str(error), stacklevel=2)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Checks the model, whose zeros stay kept, and whose adapters stay masked."""
        if self.zeros:
            self.zeros.check()
