"""The command line: the real command for its main uses, its function in this process for what goes wrong."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.cli.app import app
from niwaki.cli.options import first_sentence
from niwaki.layer.solvers import SOLVERS
from niwaki.models.block import DecoderBlock
from niwaki.records.record import Record
from support.command import Command, Result
from support.models import edit_json, save_model_with_tokenizer
from support.runs import SMALL, listing


def _commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model_with_tokenizer(tmp_path / "model")


@pytest.mark.slow
def test_prune_and_look_at_it(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    out = tmp_path / "out"
    ran = niwaki_("prune", model, out, "--pattern", "2:4", *SMALL)
    assert (ran.code, ran.err) == (0, "")
    record = Record.from_json((out / "niwaki.json").read_text())
    assert record.method == "continuation"
    assert record.pattern == "2:4"
    assert record.command.split() == ["niwaki", "prune", str(model), str(out), "--pattern", "2:4", *SMALL]

    looked = niwaki_("inspect", out)
    assert (looked.code, looked.err) == (0, "")
    assert "\x1b" not in looked.out
    rows = [line.split() for line in looked.out.splitlines()]
    for name, shape in (("q_proj", "32x32"), ("up_proj", "48x32"), ("down_proj", "32x48")):
        row = next(row for row in rows if row[:1] == [name])
        assert shape in row
        assert "50.00" in row
        assert row[-4:-2] == ["100.0", "%"]  # 2:4
    assert sum(row == [str(n), *["50.00"] * 7] for n in range(2) for row in rows) == 2

    for path, name, samples in ((model, "before", "--samples"), (out, "after", "--text-samples")):
        to = tmp_path / f"{name}.json"
        read = niwaki_("eval", path, "--text", "demo", "--length", "32", samples, "6", "--record", to)
        assert (read.code, read.err) == (0, "")
        values = json.loads(to.read_text())
        assert values["model"] == str(path)
        assert values["command"].startswith(f"niwaki eval {path}")
        found = values["perplexity"]
        assert (found["windows"], found["context"], found["tokens"]) == (6, 32, 6 * 31)
        assert found["text"] == "demo"
        assert f"perplexity {found['value']:.2f} ± {found['standard_error']:.2f}" in read.out
        assert "186 tokens of demo, context 32" in read.out
        assert read.out.splitlines()[1] == found["protocol"]
        assert "first windows; 6 non-overlapping windows of 32 tokens" in found["protocol"]
        assert len(read.out.splitlines()) == 2


def test_options_arrive(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    ran = niwaki_(
        *("prune", model, tmp_path / "out"),
        *("--solver", "admm-grad:iterations=5:sparsification_steps=4:schedule=cubic:rho=0.5"),
        *("--sparsity", "0.25", "--calibration", "demo", "--samples", "3", "--length", "24"),
        *("--order", "random", "--seed", "7", "--text", "demo-held", "--text-samples", "5"),
        *("--dtype", "bfloat16", "--device", "cpu", "--tf32", "always"),
    )
    assert (ran.code, ran.err) == (0, "")
    assert "--tf32 always has no effect: cpu has no TF32" in ran.out
    record = Record.from_json((tmp_path / "out" / "niwaki.json").read_text())
    assert record.solver == {
        "name": "admm-grad",
        "iterations": 5,
        "sparsification_steps": 4,
        "schedule": "cubic",
        "rho": 0.5,
        "damping": 0.1,
    }
    assert record.method == "admm-grad:iterations=5:sparsification_steps=4:schedule=cubic:rho=0.5"
    assert record.pattern == "unstructured:0.25"
    assert record.calibration["order"] == "random"
    assert record.calibration["seed"] == 7
    assert (record.calibration["samples"], record.calibration["sequence_length"]) == (3, 24)
    assert record.dtype == "bfloat16"
    for measured in record.perplexity.values():
        assert (measured.windows, measured.context, measured.text) == (5, 24, "demo-held")


def test_some_blocks_only(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    ran = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5", *SMALL, "--blocks", " 1:2", "--effort", "fast")
    assert (ran.code, ran.err) == (0, "")
    assert "note: only block 1 of 2, counted from 0: no other is pruned" in ran.out
    assert "50.00 % of 7 matrices" in ran.out
    rows = [line.split() for line in ran.out.splitlines()]
    start = next(i for i, row in enumerate(rows) if row[:2] == ["block", "seconds"])
    assert len(rows[start]) == 9
    assert rows[start + 1][0] == "1"
    assert rows[start + 2][0] == "zeros"
    looked = niwaki_("inspect", tmp_path / "out").out
    rows = [line.split() for line in looked.splitlines()]
    assert ["0", *["0.00"] * 7] in rows
    assert ["1", *["50.00"] * 7] in rows
    assert "25.00" in next(row for row in rows if row[:2] == ["q_proj", "32x32"])


@pytest.mark.slow
def test_a_budget_of_memory(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    for name, options in {"a": [], "b": ["--max-memory", "1MB"], "c": ["--max-memory", "1 TiB"]}.items():
        effort = ("--effort", "balanced:synthetic=0")  # without the whole model in memory
        ran = niwaki_("prune", model, tmp_path / name, "--sparsity", "0.5", *effort, *SMALL, *options)
        assert (ran.code, ran.err) == (0, "")
        assert ("MiB of hidden states were spilled to disk (memory limit reached)" in ran.out) == (name == "b")
        assert (tmp_path / name / "model.safetensors").read_bytes() == (
            tmp_path / "a" / "model.safetensors"
        ).read_bytes()


@pytest.mark.slow
def test_going_on_and_starting_over(
    model: Path, tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["prune", model, tmp_path / "out", "--sparsity", "0.5", *SMALL, "--effort", "fast"]

    def stop() -> Result:
        with monkeypatch.context() as changed:
            real = DecoderBlock.input_grams

            def interrupt(self: DecoderBlock, *args: Any, **others: Any) -> Any:
                if self.index == 1:
                    raise KeyboardInterrupt
                return real(self, *args, **others)

            changed.setattr(DecoderBlock, "input_grams", interrupt)
            return niwaki_(*command)

    ran = stop()
    assert ran.code not in (0, 2)
    assert ran.err.splitlines()[0] == "1 of 2 blocks are done and kept; repeat the command to resume after them"
    assert len(ran.err.splitlines()) <= 2
    ran = niwaki_(*command, "--solver", "wanda")
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1
    assert "has an unfinished run (1 blocks done) that differs in solver (" in ran.err
    assert "start over with --restart" in ran.err
    ran = niwaki_(*command)
    assert (ran.code, ran.err) == (0, "")
    assert "note: resuming after the first 1 of 2 blocks" in ran.out
    assert Record.from_json((tmp_path / "out" / "niwaki.json").read_text()).resumed == [1]
    shutil.rmtree(tmp_path / "out")
    stop()
    ran = niwaki_(*command, "--solver", "wanda", "--restart")
    assert (ran.code, ran.err) == (0, "")
    assert "going on" not in ran.out
    assert Record.from_json((tmp_path / "out" / "niwaki.json").read_text()).resumed == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.slow
def test_a_grid_and_an_export(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    out, packed = tmp_path / "out", tmp_path / "packed"
    ran = niwaki_("prune", model, out, "--sparsity", "0.5", "--effort", "fast", "--quantize", "int4:16", *SMALL)
    assert (ran.code, ran.err) == (0, "")
    assert re.search(r"^grid of the weights +int4:16: error 0\.\d+ before rounding, 0\.\d+ after; ", ran.out, re.M)
    ran = niwaki_("export", out, packed)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split()[-3:] == ["written", "to", str(packed)]
    assert "quantization_config" in (packed / "config.json").read_text()
    ran = niwaki_("inspect", packed)
    assert ran.code == 1
    assert "was exported for other programs" in ran.err
    ran = niwaki_("export", model, tmp_path / "other")
    assert (ran.code, ran.out) == (2, "")
    assert "has no weights on a grid, which compressed-tensors needs: quantize it first" in ran.err


@pytest.mark.slow
def test_no_perplexity(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    ran = niwaki_(
        "prune", model, tmp_path / "out", "--sparsity", "0.5", "--effort", "fast", *SMALL, "--text-samples", "0"
    )
    assert (ran.code, ran.err) == (0, "")
    assert Record.from_json((tmp_path / "out" / "niwaki.json").read_text()).perplexity == {}
    assert not re.search("^perplexity", ran.out, re.M)


@pytest.mark.slow
def test_masks_from_elsewhere(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    assert niwaki_("prune", model, tmp_path / "a", "--solver", "wanda", "--pattern", "2:4", *SMALL).code == 0
    for number, (source, options) in enumerate([(str(tmp_path / "a"), []), ("magnitude", ["--sparsity", "0.5"])]):
        out = tmp_path / str(number)
        ran = niwaki_("prune", model, out, "--solver", "admm1", "--mask-from", source, *options, *SMALL)
        assert (ran.code, ran.err) == (0, "")
        assert Record.from_json((out / "niwaki.json").read_text()).mask_from == source
        # Who reads the screen should be told as well.
        assert source in ran.out.lower()


@pytest.mark.slow
def test_masks_of_a_model_are_refined_within_a_pattern(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    a, out = tmp_path / "a", tmp_path / "out"
    assert niwaki_("prune", model, a, "--solver", "magnitude", "--pattern", "2:4", *SMALL).code == 0
    before = listing(tmp_path)

    def run(*options: str) -> Result:
        return niwaki_("prune", model, out, "--mask-from", a, *options, *SMALL)

    for solver in ("swaps", "dsnot"):
        ran = run("--solver", solver)
        assert ran.code == 2
        assert ran.err.startswith("error: model.layers.0.self_attn.q_proj.weight: ")
        assert "--pattern 2:4" in ran.err
        assert listing(tmp_path) == before
        ran = run("--solver", solver, "--pattern", "1:4")
        assert (ran.code, ran.err) == (0, "")
        assert "to satisfy it" in ran.out
        mask = Checkpoint(out).read("model.layers.1.mlp.up_proj.weight") != 0
        assert (mask.view(-1, 4).sum(dim=1) == 1).all()
        shutil.rmtree(out)
        ran = run("--solver", solver, "--pattern", "2:4")
        assert (ran.code, ran.err) == (0, "")
        assert f"the mask of {a}, within 2:4" in ran.out
        mask, start = (Checkpoint(path).read("model.layers.1.mlp.up_proj.weight") != 0 for path in (out, a))
        assert (mask.view(-1, 4).sum(dim=1) == 2).all()
        assert not torch.equal(mask, start)
        shutil.rmtree(out)


@pytest.mark.slow
def test_zeros_of_a_pruned_model(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    a = tmp_path / "a"
    assert niwaki_("prune", model, a, "--solver", "wanda", "--sparsity", "0.7", *SMALL).code == 0
    for name, options, said in (
        ("kept", (), "(70 %) were zero in the model that was given, and stay zero; --revive"),
        ("revived", ("--revive",), "weights that were zero in the model no longer are ("),
    ):
        ran = niwaki_("prune", a, tmp_path / name, "--solver", "sparsegpt", "--pattern", "2:4", *options, *SMALL)
        assert (ran.code, ran.err) == (0, "")
        assert said in ran.out
        assert said in (tmp_path / name / "README.md").read_text()
        before, after = (Checkpoint(each).read("model.layers.1.mlp.up_proj.weight") for each in (a, tmp_path / name))
        assert bool(after[before == 0].any()) == bool(options)


@pytest.mark.parametrize("odd", ["[bold]", "[/bold]", "a [link=x] :m:", "naïve 日本"])
@pytest.mark.slow
def test_names_are_shown_as_they_are(tmp_path: Path, niwaki_: Command, odd: str) -> None:
    home = tmp_path / odd
    model = save_model_with_tokenizer(home / "model")
    shutil.copyfile(model / "tokenizer.json", home / "text.txt")  # is long enough
    out = home / "out"
    ran = niwaki_(
        *("prune", model, out, "--sparsity", "0.5", "--solver", "magnitude", "--samples", "4"),
        *("--length", "16", "--text-samples", "2", "--calibration", home / "text.txt"),
    )
    assert (ran.code, ran.err) == (0, "")
    assert f"written to {out}" in ran.out
    assert f"tokens of {home / 'text.txt'}" in ran.out
    read = niwaki_("eval", out, "--text", home / "text.txt", "--length", "16", "--samples", "2")
    assert (read.code, read.err) == (0, "")
    assert str(home / "text.txt") in read.out
    bad = niwaki_("eval", home / "nowhere")
    assert bad.err == f"error: there is no directory {home / 'nowhere'}\n"


def test_version_and_help(niwaki_: Command) -> None:
    assert niwaki_("--version") == Result(0, f"niwaki {niwaki.__version__}\n", "")
    helped = niwaki_("--help")
    assert helped.code == 0
    for command in ("prune", "eval", "inspect", "compare", "demo"):
        assert re.search(rf"\b{command}\b", helped.out)
    options = niwaki_("prune", "--help-all").out
    for solver in SOLVERS:
        assert solver in options


@pytest.mark.parametrize(
    ("words", "options"),
    [(["help"], ["--help"]), (["help", "prune"], ["prune", "--help"]), (["version"], ["--version"])],
)
@pytest.mark.slow
def test_help_and_version_are_commands_too(niwaki_: Command, words: list[str], options: list[str]) -> None:
    ran = niwaki_(*words)
    assert (ran.code, ran.err) == (0, "")
    assert ran == niwaki_(*options)


@pytest.mark.parametrize("command", sorted(_commands()))
def test_help_is_a_screen_with_an_example(niwaki_: Command, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    helped = niwaki_(command, "--help").out
    assert len(helped.splitlines()) <= 45
    assert re.findall(r"Example: niwaki (\w+)", helped) == [command]
    everything = niwaki_(command, "--help-all").out
    for option in _commands()[command].params:
        assert (option.opts[0] if option.param_type_name == "option" else option.metavar) in everything
    assert set(re.findall(r" (--[a-z0-9-]+)", helped)) <= set(re.findall(r" (--[a-z0-9-]+)", everything))


def test_help_has_the_first_sentence_of_options() -> None:
    for text, first in (
        ("A file.", "A file."),
        ("A file, such as x.txt or 0.5. Not a directory.", "A file, such as x.txt or 0.5."),
        ("No stop", "No stop"),
        (r"A file. Of text. \[default: c4]", r"A file. \[default: c4]"),
        (r"A file. \[default: c4]", r"A file. \[default: c4]"),
        (r"cpu, cuda:1 ...; or auto \[default: a. b]", r"cpu, cuda:1 ...; or auto \[default: a. b]"),
    ):
        assert first_sentence(text) == first


def test_help_tells_defaults_that_depend(niwaki_: Command) -> None:
    # Rich takes what is in square brackets for markup, and leaves it out.
    length = "2048; fewer for models with fewer positions, and short texts"
    for command, asked, hints in (
        ("prune", "--help", ["the rest of the calibration text"]),
        ("prune", "--help-all", [length, "the rest of the calibration text"]),
        ("eval", "--help-all", [length, "all"]),
    ):
        helped = re.sub(r"[\s│]+", " ", niwaki_(command, asked).out)
        for hint in hints:
            assert f"default: {hint}" in helped


def test_help_calls_arguments_what_its_text_calls_them(niwaki_: Command) -> None:
    for command, usage in (
        ("prune", "MODEL OUT"),
        ("generate", "MODEL PROMPT"),
        ("unpack", "MODEL OUT"),
        ("export", "MODEL OUT"),
        ("inspect", "MODEL"),
    ):
        helped = niwaki_(command, "--help").out
        assert re.search(rf"Usage: niwaki {command} \[OPTIONS\] {usage}\s", re.sub("[{}]", "", helped)), helped


def test_libraries_keep_quiet(model: Path, niwaki_: Command) -> None:
    # The hub's client says each of its five retries on its own line, where one line is promised.
    assert niwaki_("inspect", model).code == 0
    for name in ("transformers", "huggingface_hub.utils._http", "datasets"):
        assert logging.getLogger(name).getEffectiveLevel() >= logging.ERROR, name
    edit_json(model / "config.json", use_return_dict=False)
    ran = niwaki_("inspect", model)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert re.search("config.json is refused by transformers: .*'use_return_dict'", ran.err)
