"""Results on the hub: what is listed is what is there, with a card that it takes and a recipe that makes it again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import niwaki
from niwaki import Compute, Publication, Recipe
from niwaki.errors import CheckpointError, OutputError, UsageError
from support.command import Command, niwaki_  # noqa: F401 - a fixture
from support.covering import some
from support.hub import Hub, hub  # noqa: F401 - a fixture
from support.models import message
from support.runs import files

BASE = "owner/dense"
# How the hub's own library sends files to its client library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with zeros."""
    out = tmp_path_factory.mktemp("push") / "pruned"
    text = niwaki.Calibration("demo", samples=2, length=32)
    niwaki.prune("demo", out, "2:4", effort="fast", calibration=text, measurement=niwaki.Measurement(samples=2))
    return out


@pytest.fixture
def copy(result: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(result, tmp_path / "copy")


def card(hub: Hub, name: str) -> Any:  # noqa: F811
    """What is at the top of the card that a model has on the hub, as its own library reads it."""
    return ModelCard(hub.models[name]["README.md"].decode()).data


def test_all_that_is_listed_and_nothing_else_is_uploaded(result: Path, hub: Hub) -> None:  # noqa: F811
    before = files(result)
    listed = Publication(result, "me/small", BASE)
    assert not hub.asked
    assert niwaki.push(result, "me/small", base_model=BASE, private=True) == f"{hub.address}/me/small"
    assert hub.private == {"me/small"}
    there = hub.models["me/small"]
    assert {path: len(content) for path, content in there.items() if path != ".gitattributes"} == {
        file.path: file.size for file in listed.files
    }
    same = set(there) - {".gitattributes", "README.md", "recipe.toml"}
    assert {path: there[path] for path in same} == {path: (result / path).read_bytes() for path in same}
    assert files(result) == before
    assert sum("/commit/" in each for each in hub.asked) == 1


def test_the_card_on_the_hub(result: Path, hub: Hub) -> None:  # noqa: F811
    niwaki.push(result, "me/small", base_model=BASE)
    data = card(hub, "me/small")
    assert (data.base_model, data.base_model_relation, data.library_name) == (BASE, "finetune", "transformers")
    assert {"niwaki", "pruned", "sparse"} <= set(data.tags)
    (found,) = data.eval_results
    record = niwaki.Record.from_json((result / "niwaki.json").read_text())
    assert data.model_name == "small"
    assert (found.metric_type, found.metric_value) == ("perplexity", round(record.perplexity["after"].value, 4))


def test_a_stranger_makes_it_again(result: Path, hub: Hub, tmp_path: Path) -> None:  # noqa: F811
    niwaki.push(result, "me/small", base_model=BASE)
    (tmp_path / "recipe.toml").write_bytes(hub.models["me/small"]["recipe.toml"])
    recipe = Recipe.read(tmp_path / "recipe.toml")
    assert recipe.model == {"name": BASE}
    assert f"niwaki run {BASE} OUT --recipe recipe.toml" in (tmp_path / "recipe.toml").read_text()
    assert "it is the same model" in niwaki.run("demo", tmp_path / "again", recipe).notes[-1]
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (result / "model.safetensors").read_bytes()


def test_what_was_made_from_nothing_on_the_hub(result: Path, hub: Hub) -> None:  # noqa: F811
    niwaki.push(result, "me/own", base_model="none")
    assert not {"base_model", "base_model_relation"} & card(hub, "me/own").to_dict().keys()


def test_an_upload_that_failed_is_repeated(result: Path, hub: Hub) -> None:  # noqa: F811
    hub.breaks_at = "/commit/"
    with pytest.raises(OutputError, match="nothing was published"):
        niwaki.push(result, "me/small", base_model=BASE)
    assert hub.models["me/small"].keys() == {".gitattributes"}
    hub.breaks_at = ""
    niwaki.push(result, "me/small", base_model=BASE)
    assert "model.safetensors" in hub.models["me/small"]


def test_what_is_there_stays(result: Path, hub: Hub) -> None:  # noqa: F811
    hub.models["me/small"] = {"README.md": b"mine"}
    with pytest.raises(UsageError, match="me/small is on the hub already"):
        niwaki.push(result, "me/small", base_model=BASE)
    assert hub.models["me/small"] == {"README.md": b"mine"}


def test_without_a_login(result: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the hub does not accept the login" in message(lambda: niwaki.push(result, "me/small", base_model=BASE))
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "there is no login to the hub" in message(lambda: niwaki.push(result, "me/small", base_model=BASE))
    assert not hub.models


def test_a_card_that_the_hub_refuses(copy: Path, hub: Hub) -> None:  # noqa: F811
    readme = copy / "README.md"
    readme.write_text(readme.read_text().replace("---\n", "---\nlicense: unheard-of\n", 1))
    assert "the hub refuses the card" in message(lambda: niwaki.push(copy, "me/small", base_model=BASE))
    assert not hub.models
    readme.write_text("---\nmodel-index: 3\n---\n")
    with pytest.raises(CheckpointError, match="is not a model card"):
        niwaki.push(copy, "me/small", base_model=BASE)


@pytest.mark.parametrize(
    ("name", "base", "said"),
    [
        ("me/a b", BASE, "cannot be called 'me/a b'"),
        ("me/small", None, "--base-model OWNER/NAME"),
        ("me/small", "dense", "the base model is given as OWNER/NAME; got 'dense'"),
    ],
)
def test_names(result: Path, name: str, base: str | None, said: str) -> None:
    assert said in message(lambda: Publication(result, name, base))


def test_directories(copy: Path, tmp_path: Path) -> None:
    assert "is not what niwaki wrote" in message(lambda: Publication(tmp_path, "me/small", BASE))
    (copy / ".hidden").write_text("mine")
    (copy / "folder").mkdir()
    (copy / "folder" / "kept.txt").write_text("")
    listed = [file.path for file in Publication(copy, "me/small", BASE).files]
    assert listed[0] == "README.md"
    assert ".hidden" not in listed
    assert "folder/kept.txt" in listed
    (tmp_path / "secret").write_text("")
    (copy / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="is a link to something outside"):
        Publication(copy, "me/small", BASE)
    for aim in ("link", "."):
        (copy / "link").unlink()
        (copy / "link").symlink_to(aim)
        with pytest.raises(CheckpointError, match="is not a file, and cannot be uploaded"):
            Publication(copy, "me/small", BASE)


def test_what_the_owner_should_know(copy: Path) -> None:
    said = " ".join(Publication(copy, "me/small", BASE).notes)
    assert "the card names no license" in said
    assert "recipe.toml" not in said
    (copy / "recipe.toml").unlink()
    values = json.loads((copy / "niwaki.json").read_text())
    (copy / "niwaki.json").write_text(json.dumps({**values, "command": "niwaki prune /home/me/model out"}))
    said = " ".join(Publication(copy, "me/small", BASE).notes)
    assert "there is no recipe.toml" in said
    assert "/home/me/model" in said
    assert "keys or passwords" not in said
    for name in ("added_tokens.json", "hf_token.txt", "server.pem"):
        (copy / name).write_text("{}")
    said = " ".join(Publication(copy, "me/small", BASE).notes)
    assert "by their names these may be keys or passwords: hf_token.txt, server.pem; remove" in said


def test_the_command(result: Path, hub: Hub, niwaki_: Command) -> None:  # noqa: F811
    dry = niwaki_("push", result, "me/small", "--base-model", BASE, "--dry-run")
    assert (dry.code, hub.asked) == (0, [])
    assert "model.safetensors" in dry.out
    done = niwaki_("push", result, "me/small", "--base-model", BASE)
    assert f"published at {hub.address}/me/small" in done.out
    assert dry.out in done.out


@pytest.mark.parametrize("form", some(["gguf-f16", "packed"], 1))
def test_other_formats(result: Path, hub: Hub, tmp_path: Path, form: str) -> None:  # noqa: F811
    out = tmp_path / "other"
    niwaki.export(result, out, form)  # type: ignore[arg-type]
    niwaki.push(out, "me/other", base_model=BASE)
    assert card(hub, "me/other").base_model == BASE
    recipe = Recipe.read(out)
    assert recipe.stages[-1] == {"stage": "export", "format": form}
    record = niwaki.run("demo", tmp_path / "again", recipe, compute=Compute("cpu"))
    # A GGUF file has the name of the directory that it was made from.
    assert bool(recipe.result) == (form == "packed")
    assert Recipe.read(tmp_path / "again").result.items() >= recipe.result.items()
    assert record.pattern == "2:4"
