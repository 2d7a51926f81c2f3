"""The command line: the real command for its main uses, its function in this process for what goes wrong."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
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
from support.runs import SMALL


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
    record = Record.load(out / "niwaki.json")
    assert (record.method, record.pattern) == ("continuation", "2:4")
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
    method = "admm-grad:iterations=5:sparsification_steps=4:schedule=cubic:rho=0.5"
    ran = niwaki_(
        *("prune", model, tmp_path / "out", "--solver", method),
        *("--sparsity", "0.25", "--calibration", "demo", "--samples", "3", "--length", "24"),
        *("--order", "random", "--seed", "7", "--text", "demo-held", "--text-samples", "5"),
        *("--dtype", "bfloat16", "--device", "cpu", "--tf32", "always"),
    )
    assert (ran.code, ran.err) == (0, "")
    assert "--tf32 always has no effect: cpu has no TF32" in ran.out
    record = Record.load(tmp_path / "out" / "niwaki.json")
    given = {"iterations": 5, "sparsification_steps": 4, "schedule": "cubic", "rho": 0.5}
    assert record.solver == {"name": "admm-grad", **given, "damping": 0.1}
    assert record.method == method
    assert (record.pattern, record.calibration["order"]) == ("unstructured:0.25", "random")
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
    assert (rows[start + 1][0], rows[start + 2][0]) == ("1", "zeros")
    rows = [line.split() for line in niwaki_("inspect", tmp_path / "out").out.splitlines()]
    assert ["0", *["0.00"] * 7] in rows
    assert ["1", *["50.00"] * 7] in rows
    assert "25.00" in next(row for row in rows if row[:2] == ["q_proj", "32x32"])


@pytest.mark.slow
def test_starting_over(model: Path, tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["prune", model, tmp_path / "out", "--sparsity", "0.5", *SMALL, "--effort", "fast"]
    real = DecoderBlock.input_grams

    def interrupt(block: DecoderBlock, *args: Any, **others: Any) -> Any:
        if block.index == 1:
            raise KeyboardInterrupt
        return real(block, *args, **others)

    with monkeypatch.context() as changed:
        changed.setattr(DecoderBlock, "input_grams", interrupt)
        ran = niwaki_(*command)
    assert ran.code not in (0, 2)
    assert ran.err.splitlines()[0] == "1 of 2 blocks are done and kept; repeat the command to resume after them"
    assert len(ran.err.splitlines()) <= 2
    ran = niwaki_(*command, "--solver", "wanda")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "has an unfinished run (1 blocks done) that differs in solver (" in ran.err
    assert "start over with --restart" in ran.err
    ran = niwaki_(*command, "--solver", "wanda", "--restart")
    assert (ran.code, ran.err) == (0, "")
    assert Record.load(tmp_path / "out" / "niwaki.json").resumed == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.slow
def test_a_grid_and_an_export(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    out, packed = tmp_path / "out", tmp_path / "packed"
    command = ["prune", model, out, "--sparsity", "0.5", "--effort", "fast", "--quantize", "int4:16", *SMALL]
    ran = niwaki_(*command, "--text-samples", "0", "--max-memory", "1KB")
    assert (ran.code, ran.err) == (0, "")
    assert "MiB of hidden states were spilled to disk (memory limit reached)" in ran.out
    assert re.search(r"^grid of the weights +int4:16: error 0\.\d+ before rounding, 0\.\d+ after; ", ran.out, re.M)
    assert not re.search("^perplexity", ran.out, re.M)
    assert Record.load(out / "niwaki.json").perplexity == {}
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
def test_masks_from_elsewhere(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    """The screen says where they are from, as the record does."""
    a = tmp_path / "a"
    assert niwaki_("prune", model, a, "--solver", "wanda", "--pattern", "2:4", *SMALL).code == 0
    for number, (source, options, said) in enumerate(
        (
            (a, "--solver admm1", f"the mask of {a}"),
            ("magnitude", "--solver admm1 --sparsity 0.5", "magnitude"),
            (a, "--solver exact --pattern 2:4", f"the mask of {a}, within 2:4"),
            (a, "--solver wanda --pattern 1:4", "to satisfy it"),
        )
    ):
        out = tmp_path / str(number)
        ran = niwaki_("prune", model, out, "--mask-from", source, *options.split(), *SMALL)
        assert (ran.code, ran.err) == (0, "")
        assert Record.load(out / "niwaki.json").mask_from == str(source)
        assert said.lower() in ran.out.lower()


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


@pytest.mark.slow
def test_names_are_shown_as_they_are(tmp_path: Path, niwaki_: Command) -> None:
    home = tmp_path / "[bold] [" / "bold] a [link=x] :m: naïve 日本"
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
    assert niwaki_("eval", home / "nowhere").err == f"error: there is no directory {home / 'nowhere'}\n"


@pytest.mark.slow
def test_version_and_help(niwaki_: Command) -> None:
    """As options, and as commands too."""
    version, helped, of_prune = (niwaki_(*words) for words in (["--version"], ["--help"], ["prune", "--help"]))
    assert version == Result(0, f"niwaki {niwaki.__version__}\n", "")
    assert [each.code for each in (helped, of_prune)] == [0, 0]
    assert [niwaki_(*words) for words in (["version"], ["help"], ["help", "prune"])] == [version, helped, of_prune]
    for command in ("prune", "eval", "inspect", "compare", "demo"):
        assert re.search(rf"\b{command}\b", helped.out)
    options = niwaki_("prune", "--help-all").out
    assert all(solver in options for solver in SOLVERS)


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
