"""A model written in another form, as by ``niwaki export``: all of the output, or nothing of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from niwaki.checkpoints.reading import Checkpoint
from niwaki.files import given_path
from niwaki.records.progress import Progress
from niwaki.runs.card import extend_recipe
from niwaki.runs.carried import CarriedFiles, check_claims, find_carried
from niwaki.runs.workplace import check_output, new_directory


class Conversion(ABC):
    """A model, ``checkpoint``, that is opened to be written in another form.

    What shows in its configuration, its tokenizer and the places of its tensors has been checked by then.
    """

    #: Bytes that its weights take there, or 0 where that shows only when they are written.
    size = 0
    #: Names of files with tensors beside those of the checkpoint that the output has too.
    kept: tuple[str, ...] = ()

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        self.checkpoint, self.progress = checkpoint, progress or Progress()

    def carries(self, name: Path) -> bool:
        """Whether the output has this file of the model, which is none of its weights."""
        return True

    @abstractmethod
    def check(self, name: str) -> None:
        """NiwakiError, which calls the model ``name``, where its weights are not sound, or none for this form."""

    @abstractmethod
    def write(self, directory: Path, name: str) -> list[str]:
        """Writes the model, called ``name``, to ``directory``, which has the files that are carried over.

        What there is to say of it, a sentence each, is returned. NiwakiError where it cannot be written.
        """


def convert(form: Conversion, model: str | Path, out: str | Path, stage: str, **parameters: str) -> list[str]:
    """Writes ``model``, opened as ``form``, to the directory ``out``, new or empty; what there is to say of it.

    After an error nothing is left. Where only the move into place was missing to an earlier call, which was asked for
    the same ``stage`` with the same ``parameters``, nothing is left to write, or to say.
    """
    path = form.checkpoint.path
    target = check_output(path, out)
    check_claims(form.checkpoint)
    carried = find_carried(form.checkpoint, target, form.size, form.kept)
    form.check(str(model))
    said: list[str] = []
    with new_directory(target, {" ".join([stage, *parameters.values()]): form.checkpoint.fingerprint()}) as directory:
        if directory:
            said = write_form(form, carried, directory, model_name(model, path))
            extend_recipe(directory, stage, **parameters)
    return said


def write_form(form: Conversion, carried: CarriedFiles, directory: Path, name: str) -> list[str]:
    """Writes ``form`` and those of the files ``carried`` over that it has too, to the empty ``directory``."""
    carried.only(form.carries).copy(directory)
    return form.write(directory, name)


def model_name(model: str | Path, path: Path) -> str:
    """What to call ``model``, which is in the directory ``path``: that of a hub id is a folder of the cache."""
    return (path.resolve() if path == given_path(model) else Path(model)).name
