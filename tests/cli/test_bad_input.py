"""Bad input of the command line: one line, and nothing left behind."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import niwaki
from niwaki import Record
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import UsageError
from niwaki.packed.pack import pack
from support.command import Command
from support.covering import in_turns
from support.models import edit_json, message, reference, save_model_with_tokenizer, weight
from support.runs import SMALL, listing, run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model_with_tokenizer(tmp_path / "model")


def _remove_shard(model: Path) -> None:
    whole = reference(model)
    (model / "model.safetensors").unlink()
    whole.save_pretrained(model, max_shard_size="100KB")
    next(iter(sorted(model.glob("model-00002-*")))).unlink()


def _truncate(model: Path) -> None:
    path = model / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def _spoil(path: str, value: float) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        whole = reference(model)
        weight(whole, path)[3, 3] = value
        whole.save_pretrained(model)

    return spoil


def _enlarge(model: Path) -> None:
    whole = reference(model)
    weight(whole, "model.layers.1.mlp.up_proj").mul_(1e38)
    whole.save_pretrained(model)


def _edit(**changes: object) -> Callable[[Path], None]:
    return lambda model: edit_json(model / "config.json", **changes)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_remove_shard, "lacks the shard model-00002-of"),
        (_truncate, "model.safetensors is truncated"),
        (lambda model: (model / "model.safetensors").write_bytes(b"junk junk junk"), "not a safetensors file"),
        (_spoil("model.layers.1.mlp.gate_proj", float("nan")), "'model.layers.1.mlp.gate_proj.weight' has NaN"),
        (_spoil("model.layers.0.self_attn.q_proj", float("inf")), "has NaN or infinite values"),
        (_spoil("model.embed_tokens", float("nan")), "'model.embed_tokens.weight' has NaN"),
        (_enlarge, "block 1: the inputs of mlp.down_proj are NaN or infinite"),
        (lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"), "pickled weights"),
        (lambda model: (model / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (_edit(model_type="gpt2", architectures=["GPT2LMHeadModel"]), "lacks 'transformer."),
        (_edit(model_type="t5", architectures=["T5Model"], is_encoder_decoder=True), "lacks 'shared.weight'"),
        (_edit(quantization_config={"quant_method": "gptq"}), "is quantized"),
        (_edit(num_hidden_layers=4), "lacks 'model.layers.2."),
        (_edit(intermediate_size=64), "has shape (48, 32)"),
        (_edit(hidden_act="sillu"), "sillu"),
        (lambda model: (model / "config.json").unlink(), "has no config.json"),
        (lambda model: (model / "config.json").write_text("{"), "config.json cannot be read as JSON"),
        (lambda model: (model / "tokenizer.json").unlink(), "has no tokenizer"),
    ],
)
@pytest.mark.parametrize("command", ["prune", "eval", "inspect"])
@pytest.mark.slow
def test_broken_models(
    model: Path, tmp_path: Path, niwaki_: Command, command: str, damage: Callable[[Path], Any], said: str
) -> None:
    damage(model)
    before = listing(tmp_path)
    if command == "prune":
        ran = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5", *SMALL)
    elif command == "eval":
        ran = niwaki_("eval", model, "--text", "demo", "--length", "32", "--samples", "4")
        if "are NaN or infinite" in said:
            return  # the norms make finite losses of this; see test_evaluate for those that are not
    else:
        ran = niwaki_("inspect", model)
        if "no tokenizer" in said or "embed_tokens" in said or "are NaN or infinite" in said:
            assert (ran.code, ran.err) == (0, "")  # neither is needed to look at the matrices
            return
    assert ran.code == 1, ran
    *stays, error = ran.err.splitlines()
    assert error.startswith("error: ")
    assert said in error
    # What was done before that is kept, and only that.
    kept = [name for name in listing(tmp_path) if name.startswith(".out.partial")]
    assert bool(stays) == bool(kept)
    assert stays in ([], ["1 of 2 blocks are done and kept; repeat the command to resume after them"])
    assert [name for name in listing(tmp_path) if name not in kept] == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "asks for num_hidden_layers 1,000,000,000"),
        ({"num_hidden_layers": 0}, "no list of 0 decoder blocks"),
        ({"max_position_embeddings": -1}, "-1 positions"),
        ({"vocab_size": "many"}, "is refused by transformers"),
        ({"deep": json.loads("[" * 900 + "]" * 900)}, "is refused by transformers"),
        ({"pruning_config": ["odd"], "return_dict": False, "output_hidden_states": True}, ""),
        ({"quantization_config": None}, ""),
    ],
)
@pytest.mark.slow
def test_odd_configurations(model: Path, tmp_path: Path, niwaki_: Command, changes: dict[str, Any], said: str) -> None:
    edit_json(model / "config.json", **changes)
    ran = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5", "--solver", "wanda", *SMALL)
    assert ran.code == bool(said), ran
    assert said in ran.err
    assert (tmp_path / "out").exists() != bool(said)


PATHS = ["", "~nosuch/m", "a" * 300, "loop", "b/" * 3000]
WITH_A_PATH = [
    *("prune PATH out --sparsity 0.5", "shrink PATH out --blocks 1", "eval PATH", "inspect PATH", "bench PATH"),
    *("generate PATH x", "pack PATH out", "unpack PATH out", "export PATH out", "compare PATH -o out", "report PATH"),
    *("prune demo PATH --sparsity 0.5", "shrink demo PATH --blocks 1", "pack demo PATH", "compare demo -o PATH"),
    *("heal PATH out --teacher demo", "heal demo out --teacher PATH", "heal demo PATH --teacher demo"),
    *("eval demo --text demo --record PATH", "demo --record PATH", "bench demo --record PATH"),
    *("prune demo out --sparsity 0.5 --calibration PATH", "eval demo --text PATH"),
    *("prune demo out --sparsity 0.5 --mask-from PATH", "prune demo out --sparsity 0.5 --record PATH"),
]


@pytest.mark.parametrize(("command", "path"), in_turns(WITH_A_PATH, PATHS))
@pytest.mark.slow
def test_paths_that_cannot_be(
    tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch, command: str, path: str
) -> None:
    """Each of them by some of the commands; that they are none, in all ways, is in test_files.py."""
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    ran = niwaki_(*(path if word == "PATH" else word for word in command.split()))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
    assert "cannot be used as a path" in ran.err or "the name of a text is empty" in ran.err
    assert listing(tmp_path) == ["loop"]


def test_data_sets_without_their_library(
    model: Path, tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is a data set, which a text that ships with niwaki takes the place of."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    ran = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5", "--calibration", "ptb")
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1
    assert "pip install datasets" in ran.err
    assert not (tmp_path / "out").exists()
    ran = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5", "--effort", "fast")
    assert ran.code == 0
    assert "pip install datasets" in ran.out
    record = Record.load(tmp_path / "out" / "niwaki.json")
    assert record.calibration["source"] == "demo"
    assert 'text = "demo"' in (tmp_path / "out" / "recipe.toml").read_text()
    assert "after" in record.perplexity
    healed = niwaki_("heal", tmp_path / "out", tmp_path / "healed", "--teacher", model)  # which needs more text
    assert healed.code == 1
    assert "pip install datasets" in healed.err


@pytest.mark.slow
def test_the_hub_cannot_be_reached(tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host\nfor many reasons")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    for command in (["prune", "some/model", tmp_path / "out", "--sparsity", "0.5"], ["inspect", "some/model"]):
        ran = niwaki_(*command)
        assert ran.code == 2  # as of a directory that is not there
        assert len(ran.err.splitlines()) == 1
        assert "there is no directory some/model, and the Hugging Face hub cannot be reached" in ran.err
    assert message(lambda: niwaki.bench("some/model"), UsageError).endswith("hub cannot be reached")
    assert listing(tmp_path) == []


def test_records_that_cannot_be_written(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    """It shows before the work: none of these has a model, a text or a table to say anything of."""
    (tmp_path / "file").write_text("keep me")
    before = listing(tmp_path)
    for command in (
        ("eval", "demo", "--text", "demo"),
        ("eval", "demo", "--tasks", "which-follows"),
        ("bench", "demo"),
        ("demo", "--samples", "1"),
    ):
        for record in (tmp_path / "file" / "record.json", tmp_path):
            ran = niwaki_(*command, "--record", record)
            assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
            assert f"{record} cannot be the record's file" in ran.err
    assert listing(tmp_path) == before


def test_records_replace_only_records(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    """Of the same command; nothing else that has the name, before the work."""
    text = ("--text", "demo", "--length", "32", "--samples", "1")
    record = tmp_path / "new.json"
    record.touch()
    for _ in range(2):
        assert niwaki_("eval", model, *text, "--record", record).code == 0
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deep.json").write_text('{"a":' * 100_000)
    (tmp_path / "speed.json").write_text(json.dumps({"model": "m", "command": "niwaki bench m", "speeds": []}))
    files = [tmp_path / name for name in ("list.json", "deep.json", "speed.json")]
    files += [model / name for name in ("config.json", "model.safetensors", "tokenizer.json")]
    before = {file: file.read_bytes() for file in [*files, record]}
    commands: list[tuple[Any, ...]] = [
        ("prune", model, tmp_path / "out", "--sparsity", "0.5", *SMALL),
        ("demo", "--samples", "1"),
    ]
    for command, taken in (
        *[(("eval", model, *text), file) for file in files],
        *[(command, record) for command in [*commands, ("bench", model)]],
    ):
        ran = niwaki_(*command, "--record", taken)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert f"{taken} exists and is not a record that this command wrote" in ran.err
    assert {file: file.read_bytes() for file in before} == before
    assert not (tmp_path / "out").exists()


def test_a_library_that_cannot_be_imported(
    model: Path, tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over SOURCE_DATE_EPOCH, which one reads when it is imported."""
    (tmp_path / "datasets.py").write_text("int('x')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    ran = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5", "--calibration", "wikitext2-train")
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "a library cannot be loaded: ValueError: invalid literal for int() with base 10: 'x'; does an" in ran.err


@pytest.mark.parametrize("command", ["prune --sparsity 0.5", "shrink --blocks 1"])
@pytest.mark.slow
def test_an_interruption(
    model: Path, tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Before anything is done that is kept: it says so."""
    monkeypatch.setattr(Checkpoint, "read", interrupt)
    before = listing(tmp_path)
    name, *options = command.split()
    ran = niwaki_(name, model, tmp_path / "out", *options, *SMALL)
    assert ran.code not in (0, 2)
    assert [line.partition(":")[0] for line in ran.err.splitlines()] == ["stopped"]
    assert "nothing was written" in ran.err
    assert listing(tmp_path) == before


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def written(model: Path, tmp_path: Path) -> dict[str, list[object]]:
    """By command, its arguments but for the output."""
    grid, packed = tmp_path / "grid", tmp_path / "packed"
    run(model, grid, sparsity=0.5, quantize="int4:16", measure="none")
    pack(grid, packed)
    return {"pack": [grid], "unpack": [packed], "export": [grid], "export gguf": [model, "--format", "gguf-f16"]}


@pytest.mark.parametrize("command", ["pack", "unpack", "export", "export gguf"])
@pytest.mark.slow
def test_an_interruption_of_what_is_all_or_nothing(
    written: dict[str, list[object]], tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """It says that nothing is kept, at the beginning and at the end of the work, unless it is."""
    before, (model, *options) = listing(tmp_path), written[command]
    arguments = [command.split()[0], model, tmp_path / ("out.gguf" if "gguf" in command else "out"), *options]
    at_end = "niwaki.files.set_usual_mode" if "gguf" in command else "niwaki.runs.workplace.Workplace.finish_stage"
    for place in ("niwaki.checkpoints.reading.Checkpoint.__init__", at_end):
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupt)
            ran = niwaki_(*arguments)
        assert ran.code == 130
        assert ran.err.splitlines() == ["stopped: nothing was written; repeat the command to start over"]
        assert listing(tmp_path) == before
    if "gguf" not in command:
        with monkeypatch.context() as patch:
            patch.setattr("niwaki.runs.workplace.Workplace.move", interrupt)
            ran = niwaki_(*arguments)
        assert ran.code == 130
        assert ran.err.splitlines() == ["stopped: what is done is kept; repeat the command to resume"]
        assert niwaki_(*arguments).code == 0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("prune demo out --sparsity 0.5", "nothing was written; repeat the command to start over"),
        ("eval demo --text demo", "stopped before the result: nothing was written"),
        ("bench demo", "stopped before the result: nothing was written"),
        ("inspect demo", "stopped before the result: nothing was written"),
        ("generate demo hello", "stopped"),
        ("compare demo -o out --calibration demo --text demo-held", "stopped before the result: nothing was written"),
        ("push packed owner/name", "stopped: nothing was published"),
        ("solvers", "stopped before anything was done"),
    ],
)
def test_each_command_says_something_when_it_is_stopped(
    tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch, command: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("packed").mkdir()
    for place in ("niwaki.cli.common.quiet_libraries", "niwaki.cli.measure.Table"):
        monkeypatch.setattr(place, interrupt)
    ran = niwaki_(*command.split())
    assert ran.code == 130
    assert ran.err.count("\n") == 1
    assert said in ran.err
    assert listing(tmp_path) == ["packed"]
