"""``niwaki push``: a result on the Hugging Face hub, with its model card, its record and its recipe."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from yaml import YAMLError

from niwaki.arguments import checked
from niwaki.errors import CheckpointError, OutputError, UsageError, first_line, raised_as
from niwaki.files import given_path, input_errors
from niwaki.records.recipe import RECIPE, Recipe
from niwaki.records.record import Record
from niwaki.records.wording import several
from niwaki.runs.card import earlier_recipes

_CARD, _RECORD = "README.md", "niwaki.json"
_RELATION = "base_model_relation"
#: What the hub puts into a repository that is new.
_OF_THE_HUB = {".gitattributes"}
#: Where a path begins in a command, and the path.
_LOCAL = re.compile(r"(?<![\w.])(/[^\s'\"/]+/[^\s'\"]*)")
#: Names of files that are likely to be keys or passwords, but for two of tokenizers.
_SECRET = re.compile(
    r"id_(rsa|dsa|ecdsa|ed25519)|.*\.(pem|key|p12|pfx|jks|kdbx)|.*(credential|secret|passw(or)?d|api_?key).*"
    r"|(?!special_tokens_map\.json|added_tokens\.json)(.*[^a-z])?tokens?([^a-z].*)?"
)
#: For models whose base is nowhere on the hub.
NO_BASE = "none"


@checked
def push(directory: str | Path, name: str, *, base_model: str | None = None, private: bool = False) -> str:
    """Publishes a directory that niwaki wrote as the model ``name`` on the Hugging Face hub, with the user's own login.

    All files are uploaded in one commit. The model card on the hub says which model the result was made from, what was
    done and what was measured; others can make the same model again from ``recipe.toml``. Use :class:`Publication` to
    see beforehand what would be uploaded.

    Args:
        directory: A directory that niwaki wrote, in any format.
        name: "OWNER/NAME" of a model that is not on the hub yet, or is empty.
        base_model: Hub id of the original model, for results whose card does not name it; "none" if it is not on the
            hub.
        private: Make the model private.

    Returns:
        The address of the model.

    Raises:
        UsageError: the directory has no result of niwaki, there is no login, the name is invalid or taken, or the
            original model is not known.
        CheckpointError: a file cannot be read, or is a link out of the directory.
        OutputError: the hub is out of reach or refuses the upload.
    """
    return Publication(directory, name, base_model).upload(private)


@dataclass(frozen=True)
class PublishedFile:
    """A file to upload: its path on the hub and its size in bytes."""

    path: str
    size: int


class Publication:
    """A result that is ready to be published, to look at before it is uploaded; ``files`` lists what would be uploaded.

    Arguments and errors are as for :func:`push`. Making one sends nothing.
    """

    def __init__(self, directory: str | Path, name: str, base_model: str | None = None) -> None:
        self.directory, self.name = given_path(directory), name
        if not self.directory.is_dir():
            raise UsageError(f"there is no directory {directory}; give one that niwaki wrote")
        _check_name(name, "the model to make")
        if not all((self.directory / each).is_file() for each in (_CARD, _RECORD)):
            raise UsageError(
                f"{directory} is not what niwaki wrote: it has no {_CARD} or no {_RECORD}. For other models there is "
                f"'hf upload {name} {directory}'"
            )
        self._paths, self._record = _paths(self.directory), Record.load(self.directory / _RECORD)
        #: Of files that say on the hub which model there this was made from.
        self._contents = {_CARD: _card(self.directory, name, base_model), **_recipes(self.directory, base_model)}
        with input_errors(self.directory):
            sizes = {path: (self.directory / path).stat().st_size for path in self._paths}
        sizes |= {path: len(content) for path, content in self._contents.items()}
        #: In the order in which a reader looks for them: the card first.
        self.files = [
            PublishedFile(path, sizes[path]) for path in sorted(sizes, key=lambda each: (each != _CARD, each))
        ]

    @property
    def notes(self) -> list[str]:
        """What the owner should know before others see the model."""
        said = []
        if secret := [path for path in self._paths if _SECRET.fullmatch(Path(path).name.lower())]:
            said.append(f"by their names these may be keys or passwords: {several(secret, 3)}; remove what is secret")
        if not ModelCard(self._contents[_CARD].decode()).data.get("license"):
            said.append("the card names no license; the base model's says which may be given")
        if RECIPE not in self._paths:
            said.append(f"there is no {RECIPE}, so nobody can make the model again")
        elif earlier := earlier_recipes(self.directory):
            said.append(f"{RECIPE} begins with what {earlier[-1]} makes: it was made by {len(earlier) + 1} commands")
        if paths := list(dict.fromkeys(_LOCAL.findall(self._record.command))):
            said.append(f"{_RECORD} has the command with paths of this machine: {several(paths, 3)}")
        return said

    def upload(self, private: bool = False) -> str:
        """Creates the model on the hub and uploads all ``files`` in one commit; returns the address of the model.

        After an error none of the files is there. The model itself may exist, empty, and the same call can be repeated.
        """
        api = HfApi()
        with (
            raised_as(OutputError, "the hub is out of reach"),  # also for errors of httpx and of the system
            raised_as(UsageError, "the hub does not accept the login", HfHubHTTPError, "; see 'hf auth login'"),
        ):
            try:
                api.whoami()
            except LocalTokenNotFoundError:
                raise UsageError(
                    "there is no login to the hub; log in with 'hf auth login', or set HF_TOKEN to a token that may "
                    "write"
                ) from None
        with (
            raised_as(UsageError, f"the hub refuses the card {_CARD}", ValueError),
            raised_as(OutputError, "the hub is out of reach", HfHubHTTPError),
        ):
            ModelCard(self._contents[_CARD].decode()).validate()
        with raised_as(OutputError, f"{self.name} cannot be made on the hub"):
            url = api.create_repo(self.name, private=private, exist_ok=True)
            taken = sorted({*api.list_repo_files(self.name)} - _OF_THE_HUB)
        if taken:
            raise UsageError(
                f"{self.name} is on the hub already, with {several(taken, 3)}; choose another name, or change it there "
                f"with 'hf upload {self.name} {self.directory}'"
            )
        operations = [
            CommitOperationAdd(file.path, self._contents.get(file.path, self.directory / file.path))
            for file in self.files
        ]
        with raised_as(OutputError, f"the upload to {self.name} failed, and nothing was published", reason=_reason):
            api.create_commit(self.name, operations, commit_message="Upload by niwaki push")
        return str(url)


def _reason(error: Exception) -> str:
    """What an error of an upload says, and what caused it."""
    return first_line(error) + (f" ({first_line(error.__cause__)})" if error.__cause__ else "")


def _check_name(name: str, what: str) -> None:
    """UsageError where ``name`` cannot be that of a model on the hub, with its owner."""
    with raised_as(UsageError, f"{what} cannot be called {name!r}", HFValidationError):
        validate_repo_id(name)
    if name.count("/") != 1:
        raise UsageError(f"{what} is given as OWNER/NAME; got {name!r}")


def _paths(directory: Path) -> list[str]:
    """All files of a directory, but hidden ones; CheckpointError for a link that leads out of it."""
    found, whole = [], directory.resolve()
    with input_errors(directory):
        for path in sorted(directory.rglob("*")):
            name = path.relative_to(directory)
            if any(part.startswith(".") for part in name.parts) or (path.is_dir() and not path.is_symlink()):
                continue
            if not Path(os.path.realpath(path)).is_relative_to(whole):  # which goes round no loop
                raise CheckpointError(f"{path} is a link to something outside of {directory}; put a copy in its place")
            if not path.is_file():
                raise CheckpointError(f"{path} is not a file, and cannot be uploaded; remove it")
            found.append(name.as_posix())
    return found


def _card(directory: Path, name: str, base_model: str | None) -> bytes:
    """The card for the hub: that of the directory with a base model that is there, and its results under ``name``."""
    readme = directory / _CARD
    with input_errors(readme), raised_as(CheckpointError, f"{readme} is not a model card", (ValueError, YAMLError)):
        card = ModelCard(readme.read_text(encoding="utf-8"))
    data = card.data
    assert isinstance(data, ModelCardData)
    if base_model is not None:
        data.base_model = None if base_model == NO_BASE else base_model
    if base_model != NO_BASE:
        try:
            for each in data.base_model if isinstance(data.base_model, list) else [data.base_model or ""]:
                _check_name(str(each), "the base model")
        except UsageError as error:
            hint = f"--base-model OWNER/NAME, or --base-model {NO_BASE} where it is not there"
            raise UsageError(f"say which model of the hub this was made from, with {hint} ({error})") from None
    else:
        setattr(data, _RELATION, None)  # to nothing
    if data.eval_results:
        data.model_name = name.split("/")[1]
    card.data = data
    return str(card).encode()


def _recipes(directory: Path, base_model: str | None) -> dict[str, bytes]:
    """Recipes in which the model that the card names has its name on the hub, by path."""
    names = [*earlier_recipes(directory), *([RECIPE] if (directory / RECIPE).exists() else [])]
    recipes = {name: Recipe.read(directory / name) for name in names}
    if not recipes or base_model is None or base_model == NO_BASE:
        return {}
    # Of a model that was made by several commands only the first began with the base; others may heal towards it.
    former = recipes[names[0]].model.get("name", "")
    return {name: recipe.renamed(former, base_model).toml().encode() for name, recipe in recipes.items()}
