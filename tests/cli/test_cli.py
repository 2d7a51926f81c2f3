"""The command line: the real command for its main uses, its function in this process for what goes wrong."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import niwaki
from niwaki.cli import main as cli
from niwaki.evaluation import bench as measuring
from niwaki.layer.solvers import SOLVERS
from niwaki.models.block import DecoderBlock
from niwaki.models.checkpoint import Checkpoint
from niwaki.records.comparison import METHODS
from niwaki.records.record import Record
from niwaki.records.speed import SpeedRecord
from niwaki.reports.material import load
from niwaki.reports.page import render
from support.models import edit_json, reference, save_model_with_tokenizer, weight
from support.runs import SMALL

NIWAKI = Path(sys.executable).with_name("niwaki")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def niwaki_(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """``niwaki ARGUMENTS`` in this process."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["niwaki", *map(str, arguments)])
        capfd.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        captured = capfd.readouterr()
        # What is being done, which is said at once, has a test of its own.
        said = re.sub(
            r"\A(comparing|drawing|evaluating|exporting|loading|measuring|(un)?pack|prun|read|shrink).*\n",
            "",
            captured.err,
        )
        return Result(code, captured.out, said)

    return run


def subprocess_niwaki(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")}
    return subprocess.run(
        [NIWAKI, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        check=False,
        **options,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model_with_tokenizer(tmp_path / "model")


def listing(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


# The real command


def test_prune_as_a_user_does(tmp_path: Path) -> None:
    ran = subprocess_niwaki(
        *("prune", "demo", "out", "--calibration", "demo", "--samples", "8", "--seqlen", "64"),
        *("--sparsity", "0.5", "--solver", "wanda", "--text-samples", "4", "--record", "run.json"),
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert "\x1b" not in ran.stdout
    assert "\r" not in ran.stdout
    for part in ("demo: 6 blocks with 42 matrices, per-row:0.5", "Wanda()", "8 x 64 tokens", "50.00 % of 42"):
        assert part in ran.stdout
    assert ran.stdout.rstrip().endswith("written to out")
    assert len(ran.stdout.splitlines()) < 25
    record = Record.from_json((tmp_path / "run.json").read_text())
    assert record == Record.from_json((tmp_path / "out" / "niwaki.json").read_text())
    assert record.command.startswith("niwaki prune demo out --calibration demo --samples 8")
    assert record.method == "wanda"
    assert record.calibration["sequence_length"] == 64
    assert record.sparsity == 0.5
    before, after = (record.perplexity[name]["value"] for name in ("before", "after"))
    assert 30 < before < after < 2 * before
    # Wanda's are the two products that measure the error.
    flops = sum(2 * 2 * rows * columns**2 for rows, columns in (matrix.shape for matrix in record.matrices))
    assert record.flops == flops
    header = ran.stdout.split("relative error of each matrix")[0]
    assert f"solving: {flops / 1e9:.1f} Gflop\n" in header
    text = f"perplexity after   {after:.2f} ± "
    assert text in ran.stdout
    tokens = torch.arange(50)[None]
    assert torch.isfinite(reference(tmp_path / "out")(tokens).logits).all()


def test_help_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['niwaki', *sys.argv[1:]]\n"
        "import niwaki.cli.main\n"
        "try: niwaki.cli.main.main()\n"
        "except SystemExit as e: print('exit', e.code)\n"
        "print('loaded', [m for m in ('torch', 'transformers', 'datasets', 'numpy') if m in sys.modules])\n"
    )
    for arguments in (["--help"], ["prune", "-h"], ["--version"]):
        ran = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=60
        )
        assert "loaded []" in ran.stdout
        assert "exit 0" in ran.stdout or arguments == ["--version"]
        assert ran.stderr == ""
    assert niwaki.__version__ in ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs namespaces of Linux")
def test_no_space_left_on_a_real_disk(tmp_path: Path) -> None:
    # A mount of our own, seen by these processes only, that goes away with them.
    script = 'mount -t tmpfs -o size=2m none "$1" || exit 77; cd "$1"; shift; "$@"; code=$?; ls -A; exit $code'
    allowed = subprocess.run(
        ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none "$1"', "-", tmp_path],
        capture_output=True,
        check=False,
    )
    if allowed.returncode:
        pytest.skip("no mounts allowed here")
    ran = subprocess.run(
        [
            "unshare",
            "-rm",
            "sh",
            "-c",
            script,
            "-",
            tmp_path,
            NIWAKI,
            *["prune", "demo", "out", "--sparsity", "0.5"],
            *SMALL,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 1
    assert len(ran.stderr.splitlines()) == 1
    assert "no space left on disk" in ran.stderr
    assert ran.stdout.split() == []  # ls finds nothing that was left behind


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no signals to send")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])  # of a person, and of a scheduler
def test_a_run_that_is_stopped(tmp_path: Path, name: str) -> None:
    with subprocess.Popen(
        [NIWAKI, "prune", "demo", "out", "--sparsity", "0.5", "--calibration", "demo", "--samples", "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        deadline = time.monotonic() + 120
        while not any(tmp_path.iterdir()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.Signals[name])
        _, err = process.communicate(timeout=60)
    assert process.returncode not in (0, 2)
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 1
    assert listing(tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no signals to send")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_run_that_is_stopped_and_goes_on(tmp_path: Path, name: str) -> None:
    # Another text, so that the last blocks are not done at once.
    command = ["prune", "demo", "out", "--sparsity", "0.5", "--calibration", "demo", "--samples", "48"]
    with subprocess.Popen(
        [NIWAKI, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        deadline = time.monotonic() + 300
        while not (tmp_path / ".out.partial.json").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.Signals[name])
        _, err = process.communicate(timeout=60)
    assert process.returncode not in (0, 2)
    said, *rest = err.splitlines()
    assert said == "1 of 6 blocks are done and stay; the same command goes on behind them"
    assert len(rest) <= 1
    assert "Traceback" not in err
    ran = subprocess_niwaki(*command, cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "note: resuming after the first 1 of 6 blocks, where an earlier run was stopped" in ran.stdout
    rows = [line.split() for line in ran.stdout.splitlines()]
    assert [row[0] for row in rows if len(row) == 9 and row[0].isdigit()] == ["1", "2", "3", "4", "5"]
    assert listing(tmp_path)[0] == "out"


# In this process


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
        read = niwaki_("eval", path, "--text", "demo", "--seqlen", "32", samples, "6", "--record", to)
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
        *("prune", model, tmp_path / "out", "--solver", "admm-grad", "--set", "iterations=5"),
        *("--set", "sparsification_steps = 4", "--set", "schedule=cubic", "--set", "rho=0.5"),
        *("--sparsity", "0.25", "--calibration", "demo", "--samples", "3", "--seqlen", "24"),
        *("--windows", "random", "--seed", "7", "--text", "demo-held", "--text-samples", "5"),
        *("--dtype", "bfloat16", "--device", "cpu", "--tf32", "always"),
    )
    assert (ran.code, ran.err) == (0, "")
    assert "--tf32 always has no effect: cpu has no TF32" in ran.out
    record = Record.from_json((tmp_path / "out" / "niwaki.json").read_text())
    assert record.solver == ("ADMM(iterations=5, sparsification_steps=4, schedule='cubic', rho=0.5, damping=0.1)")
    assert record.method == "admm-grad"
    assert record.pattern == "unstructured:0.25"
    assert record.calibration["order"] == "random"
    assert record.calibration["seed"] == 7
    assert (record.calibration["samples"], record.calibration["sequence_length"]) == (3, 24)
    assert record.dtype == "bfloat16"
    for measured in record.perplexity.values():
        assert (measured["windows"], measured["context"], measured["text"]) == (5, 24, "demo-held")


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


def test_a_budget_of_memory(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    for name, options in {"a": [], "b": ["--memory", "1MB"], "c": ["--memory", "1 TiB"]}.items():
        ran = niwaki_("prune", model, tmp_path / name, "--sparsity", "0.5", *SMALL, *options)
        assert (ran.code, ran.err) == (0, "")
        assert ("MiB of hidden states are in a file, for want of memory" in ran.out) == (name == "b")
        assert (tmp_path / name / "model.safetensors").read_bytes() == (
            tmp_path / "a" / "model.safetensors"
        ).read_bytes()


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
    assert ran.err.splitlines()[0] == "1 of 2 blocks are done and stay; the same command goes on behind them"
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


def test_a_grid_and_an_export(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    out, packed = tmp_path / "out", tmp_path / "packed"
    ran = niwaki_("prune", model, out, "--sparsity", "0.5", "--quantize", "int4:16", *SMALL)
    assert (ran.code, ran.err) == (0, "")
    assert re.search(r"^grid +int4:16: error 0\.\d+ before rounding, 0\.\d+ after; ", ran.out, re.M)
    ran = niwaki_("export", out, packed)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split() == ["written", "to", str(packed)]
    assert "quantization_config" in (packed / "config.json").read_text()
    ran = niwaki_("inspect", packed)
    assert ran.code == 1
    assert "was exported for other programs" in ran.err
    ran = niwaki_("export", model, tmp_path / "other")
    assert (ran.code, ran.out) == (2, "")
    assert "has no weights on a grid; prune the dense model with --quantize int4:128" in ran.err


def test_no_perplexity(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    ran = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5", *SMALL, "--text-samples", "0")
    assert (ran.code, ran.err) == (0, "")
    assert Record.from_json((tmp_path / "out" / "niwaki.json").read_text()).perplexity == {}
    assert not re.search("^perplexity", ran.out, re.M)


def test_masks_from_elsewhere(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    assert niwaki_("prune", model, tmp_path / "a", "--solver", "wanda", "--pattern", "2:4", *SMALL).code == 0
    for number, (source, options) in enumerate([(str(tmp_path / "a"), []), ("magnitude", ["--sparsity", "0.5"])]):
        out = tmp_path / str(number)
        ran = niwaki_("prune", model, out, "--solver", "admm1", "--mask-from", source, *options, *SMALL)
        assert (ran.code, ran.err) == (0, "")
        assert Record.from_json((out / "niwaki.json").read_text()).mask_from == source
        # Who reads the screen should be told as well.
        assert source in ran.out.lower()


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
        ran = run("--solver", solver, "--pattern", "1:4")
        assert (ran.code, ran.out) == (2, "")
        assert len(ran.err.splitlines()) == 1
        assert f"q_proj.weight: the mask of {a} has 512 zeros of 1024 (50 %), and 1:4 asks for 768" in ran.err
        assert listing(tmp_path) == before
        ran = run("--solver", solver, "--pattern", "2:4")
        assert (ran.code, ran.err) == (0, "")
        assert f"the mask of {a}, within 2:4" in ran.out
        mask, start = (Checkpoint(path).read("model.layers.1.mlp.up_proj.weight") != 0 for path in (out, a))
        assert (mask.view(-1, 4).sum(dim=1) == 2).all()
        assert not torch.equal(mask, start)
        shutil.rmtree(out)


@pytest.mark.parametrize("odd", ["[bold]", "[/bold]", "a [link=x] :m:", "naïve 日本"])
def test_names_are_shown_as_they_are(tmp_path: Path, niwaki_: Command, odd: str) -> None:
    home = tmp_path / odd
    model = save_model_with_tokenizer(home / "model")
    shutil.copyfile(model / "tokenizer.json", home / "text.txt")  # is long enough
    out = home / "out"
    ran = niwaki_(
        *("prune", model, out, "--sparsity", "0.5", "--solver", "magnitude", "--samples", "4"),
        *("--seqlen", "16", "--text-samples", "2", "--calibration", home / "text.txt"),
    )
    assert (ran.code, ran.err) == (0, "")
    assert f"written to {out}" in ran.out
    assert f"tokens of {home / 'text.txt'}" in ran.out
    read = niwaki_("eval", out, "--text", home / "text.txt", "--seqlen", "16", "--samples", "2")
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
    options = niwaki_("prune", "--help").out
    for option in (
        "--solver",
        "--set",
        "--sparsity",
        "--pattern",
        "--mask-from",
        "--calibration",
        "--record",
        "--blocks",
        "--memory",
        "--restart",
    ):
        assert option in options
    for solver in SOLVERS:
        assert solver in options


def test_help_tells_defaults_that_depend(niwaki_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rich takes what is in square brackets for markup, and leaves it out.
    for command, hints in (
        ("prune", ["2048, or the model's positions if fewer", "more of that text"]),
        ("eval", ["2048, or the model's positions if fewer", "all"]),
    ):
        helped = re.sub(r"[\s│]+", " ", niwaki_(command, "--help").out)
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


# Bad input: one line, and nothing left behind


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--sparsity 1", "from 0 to below 1; got 1"),
        ("--sparsity 50", "got 50"),
        ("--sparsity=-0.5", "got -0.5"),
        ("--sparsity nan", "got nan"),
        ("--pattern 4:2", "4:2"),
        ("--pattern 2:5", "model.layers.0.self_attn.q_proj.weight: the pattern 2:5 needs"),
        ("--pattern half", "try 2:4, unstructured:0.6 or per-row:0.6"),
        ("--sparsity 0.5 --pattern 2:4", "not both"),
        ("", "--sparsity 0.6, or a pattern such as --pattern 2:4"),
        ("--sparsity 0.5 --solver sparsgpt", "no solver is called 'sparsgpt'; did you mean sparsegpt?"),
        ("--sparsity 0.5 --solver admm", "did you mean admm1"),
        ("--sparsity 0.5 --solver xyzzy", "known: magnitude, wanda, ria"),
        (
            "--sparsity 0.5 --solver admm1 --set roh=1",
            "no parameter of admm1 is called 'roh'; did you mean rho?",
        ),
        ("--sparsity 0.5 --set sweep=1", "did you mean sweeps"),
        ("--sparsity 0.5 --solver admm1 --set rho", "--set takes NAME=VALUE; got 'rho'"),
        ("--sparsity 0.5 --solver admm1 --set rho=big", "rho='big': admm1 wants float here"),
        ("--sparsity 0.5 --solver admm1 --set iterations=1.5", "admm1 wants int here"),
        ("--sparsity 0.5 --solver admm1 --set rho=-1", "rho must be above 0; got -1"),
        ("--sparsity 0.5 --solver admm1 --set rho=nan", "rho must be"),
        ("--sparsity 0.5 --solver admm1 --set damping=inf", "damping must be"),
        ("--sparsity 0.5 --solver admm-grad --set schedule=cubik", "constant, cubic, printed"),
        ("--sparsity 0.5 --solver wanda --set rho=1", "wanda has no parameters"),
        ("--sparsity 0.5 --mask-from wandaa", "did you mean wanda"),
        ("--sparsity 0.5 --mask-from ./nowhere", "./nowhere"),
        ("--sparsity 0.5 --seqlen 129", "129 is more than the model's 128 positions"),
        ("--sparsity 0.5 --seqlen 1", "at least 2 tokens"),
        ("--sparsity 0.5 --samples 0", "samples must be 1 or more; got 0"),
        ("--sparsity 0.5 --samples=-3", "got -3"),
        ("--sparsity 0.5 --text-samples=-1", "got -1"),
        ("--sparsity 0.5 --device quantum", "the device 'quantum' cannot be used"),
        ("--sparsity 0.5 --dtype float8", "got float8"),
        ("--sparsity 0.5 --memory much", "invalid memory size 'much'; try 8GiB or 500MB"),
        ("--sparsity 0.5 --memory 0", "invalid memory size '0'"),
        ("--sparsity 0.5 --memory=-1G", "invalid memory size '-1G'"),
        ("--sparsity 0.5 --blocks 1", "--blocks takes FROM:TO, such as 0:2 for the first two; got '1'"),
        ("--sparsity 0.5 --blocks=-1:1", "got '-1:1'"),
        ("--sparsity 0.5 --blocks :2", "got ':2'"),
        ("--sparsity 0.5 --blocks 0:1:2", "got '0:1:2'"),
        ("--sparsity 0.5 --blocks a:b", "got 'a:b'"),
        ("--sparsity 0.5 --blocks 0:3", "0:3 is no range of blocks here; the model's are 0:2"),
        ("--sparsity 0.5 --blocks 1:1", "1:1 is no range of blocks here"),
    ],
)
def test_usage_errors(model: Path, tmp_path: Path, niwaki_: Command, options: str, said: str) -> None:
    before = listing(tmp_path)
    ran = niwaki_("prune", model, tmp_path / "out", *SMALL, *options.split())
    assert ran.code == 2, ran
    assert ran.out == ""
    assert len(ran.err.splitlines()) == 1
    assert ran.err.startswith("error: ")
    assert said in ran.err
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        "prune",
        "prune demo",
        "prune demo out --sparsity half",
        "prune demo out --sparsty 0.5",
        "prune demo out --sparsity 0.5 --windows middle",
        "prune demo out --sparsity 0.5 --tf32 sometimes",
        "prune demo out extra --sparsity 0.5",
        "eval",
        "inspect",
        "purge",
        "demo --samples few",
        "compare demo",
        "compare demo -o out --keep yes",
    ],
)
def test_arguments_that_do_not_parse(
    tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = niwaki_(*arguments.split())
    assert ran.code == 2
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert "Usage: niwaki" in ran.err
    assert listing(tmp_path) == []


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
        (lambda model: (model / "model.safetensors").write_bytes(b"junk junk junk"), "no safetensors file"),
        (
            _spoil("model.layers.1.mlp.gate_proj", float("nan")),
            "'model.layers.1.mlp.gate_proj.weight' has NaN",
        ),
        (_spoil("model.layers.0.self_attn.q_proj", float("inf")), "has NaN or infinite values"),
        (_spoil("model.embed_tokens", float("nan")), "'model.embed_tokens.weight' has NaN"),
        (_enlarge, "block 1: the inputs of mlp.down_proj are NaN or infinite"),
        (lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"), "pickled weights"),
        (lambda model: (model / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (_edit(model_type="gpt2", architectures=["GPT2LMHeadModel"]), "lacks 'transformer."),
        (
            _edit(model_type="t5", architectures=["T5Model"], is_encoder_decoder=True),
            "encoder with a decoder (t5)",
        ),
        (_edit(quantization_config={"quant_method": "gptq"}), "is quantised"),
        (_edit(num_hidden_layers=4), "lacks 'model.layers.2."),
        (_edit(intermediate_size=64), "has shape (48, 32)"),
        (_edit(hidden_act="sillu"), "sillu"),
        (lambda model: (model / "config.json").unlink(), "has no config.json"),
        (lambda model: (model / "config.json").write_text("{"), "config.json cannot be read as JSON"),
        (lambda model: (model / "tokenizer.json").unlink(), "has no tokenizer"),
    ],
)
@pytest.mark.parametrize("command", ["prune", "eval", "inspect"])
def test_broken_models(
    model: Path, tmp_path: Path, niwaki_: Command, command: str, damage: Callable[[Path], Any], said: str
) -> None:
    damage(model)
    before = listing(tmp_path)
    if command == "prune":
        ran = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5", *SMALL)
    elif command == "eval":
        ran = niwaki_("eval", model, "--text", "demo", "--seqlen", "32", "--samples", "4")
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
    assert stays in ([], ["1 of 2 blocks are done and stay; the same command goes on behind them"])
    assert [name for name in listing(tmp_path) if name not in kept] == before


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.txt", None, "there is no file"),
        ("short.txt", b"not much", "are missing"),
        ("empty.txt", b"", "it has 0, 128 are missing"),
        ("binary.txt", b"\xff\xfe\x00\x01", "cannot be read as UTF-8 text"),
        ("bad.jsonl", b'{"text": "x"}\n{"no": "y"}\n', "line 2: not a JSON object with a field 'text'"),
        ("bad.gz", b"no gzip", "cannot be read as UTF-8 text"),
    ],
)
@pytest.mark.parametrize("option", ["--calibration", "--text"])
def test_bad_texts(
    model: Path, tmp_path: Path, niwaki_: Command, option: str, name: str, content: bytes | None, said: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    if option == "--text":
        said = said.replace("128", "32")
    before = listing(tmp_path)
    ran = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5", *SMALL, option, path)
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1
    assert str(path) in ran.err
    assert said in ran.err
    assert listing(tmp_path) == before


def test_data_sets_without_their_library(
    model: Path, tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    # The default is a data set, so that is what a new user meets first.
    ran = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5")
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1
    assert "pip install 'niwaki[datasets]'" in ran.err
    assert not (tmp_path / "out").exists()


def test_the_hub_cannot_be_reached(tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host\nfor many reasons")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    for command in (
        ["prune", "some/model", tmp_path / "out", "--sparsity", "0.5"],
        ["inspect", "some/model"],
    ):
        ran = niwaki_(*command)
        assert ran.code == 1
        assert len(ran.err.splitlines()) == 1
        assert "some/model is no directory here and could not be had from the hub: no route to host" in ran.err
    assert listing(tmp_path) == []


def test_records_that_cannot_be_written(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    """It shows before the work: none of these has a model, a text or a table to say anything of."""
    (tmp_path / "file").write_text("keep me")
    before = listing(tmp_path)
    for command in (
        ("eval", "./nowhere", "--text", "demo"),
        ("eval", "./nowhere", "--tasks", "which-follows"),
        ("bench", "./nowhere"),
        ("demo", "--samples", "0"),
    ):
        for record in (tmp_path / "file" / "record.json", tmp_path):
            ran = niwaki_(*command, "--record", record)
            assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
            assert f"{record} cannot be the record's file" in ran.err
    assert listing(tmp_path) == before


def test_outputs_that_are_taken(model: Path, tmp_path: Path, niwaki_: Command) -> None:
    (tmp_path / "file").write_text("keep me")
    before = listing(tmp_path)
    for out in (tmp_path, tmp_path / "file", model, model / "out"):
        ran = niwaki_("prune", model, out, "--sparsity", "0.5", *SMALL)
        assert ran.code == 2
        assert len(ran.err.splitlines()) == 1
        assert str(out) in ran.err
    assert niwaki_("inspect", tmp_path / "file").code == 2
    assert listing(tmp_path) == before


def test_no_space_left(model: Path, tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    before = listing(tmp_path)
    ran = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5", *SMALL)
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1
    assert "no space left on disk" in ran.err
    assert listing(tmp_path) == before


def test_an_interruption(model: Path, tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "read", interrupt)
    before = listing(tmp_path)
    ran = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5", *SMALL)
    assert ran.code not in (0, 2)
    assert len(ran.err.splitlines()) <= 1
    assert listing(tmp_path) == before


# Comparisons


def test_compare(tmp_path: Path, model: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by Ctrl-C in its second run, gone on with, and added to."""
    out = tmp_path / "out"
    command = ["compare", model, "-o", out, *SMALL, "--text", "demo-held", "--text", "demo", "--keep"]
    real, runs = DecoderBlock.input_grams, []

    def interrupt(self: DecoderBlock, *arguments: Any) -> Any:
        runs.append(self.index)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return real(self, *arguments)

    with monkeypatch.context() as changed:
        changed.setattr(DecoderBlock, "input_grams", interrupt)
        ran = niwaki_(*command, "--solvers", "wanda, magnitude", "--sparsity", "0.5")
    assert ran.code not in (0, 2)
    said = "1 of 2 runs are done and stay, and 1 of 2 blocks of the one that was on its way; the same command"
    assert said in ran.err
    ran = niwaki_(*command, "--solvers", "magnitude,wanda@best:epochs=1", "--sparsity", "50%,2:4")
    assert (ran.code, ran.err) == (0, "")
    there = json.loads((out / "compare.json").read_text())
    cells = [(cell["method"], cell["pattern"]) for cell in there["cells"]]
    again = [(method, pattern) for pattern in ("50 %", "2:4") for method in ("magnitude", "wanda@best:epochs=1")]
    assert cells == [("dense", ""), ("wanda", "50 %"), *again]
    assert there["command"].startswith(f"niwaki compare {model} -o {out}")
    for cell in there["cells"]:
        for text in ("demo-held", "demo"):
            shown = f"{cell['perplexity'][text]['value']:.2f} ±{cell['perplexity'][text]['standard_error']:.2f}"
            assert shown in ran.out
    assert f"written to {out}" in ran.out
    assert len(list((out / "models").iterdir())) == 5
    assert "\x1b" not in ran.out


def test_compare_that_makes_no_sense(tmp_path: Path, model: Path, niwaki_: Command) -> None:
    for arguments, said in (
        (["--budget", "soon"], "--budget takes a time such as 2h"),
        (["--solvers", ","], "which solvers"),
        (["--sparsity", "0.5,2:"], "'2:' is no pattern"),
        (["--memory", "much"], "invalid memory size"),
    ):
        ran = niwaki_("compare", model, "-o", tmp_path / "out", *SMALL, *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err
        assert len(ran.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


# The demonstration


@pytest.mark.slow
def test_demo(tmp_path: Path, niwaki_: Command) -> None:
    patterns = ["50 %", "60 %", "70 %", "80 %", "2:4"]
    to = tmp_path / "demo.json"
    ran = niwaki_("demo", "--samples", "8", "--text-samples", "4", "--record", to)
    assert (ran.code, ran.err) == (0, "")
    assert "\x1b" not in ran.out
    rows = {line.split()[0]: line.split() for line in ran.out.splitlines() if line.strip()}
    heading = re.sub(r" %", "%", next(line for line in ran.out.splitlines() if "method" in line)).split()
    assert heading == ["method", "50%", "60%", "70%", "80%", "2:4", "seconds"]
    cells = json.loads(to.read_text())["cells"]
    found = {(cell["method"], cell["pattern"]): cell["perplexity"]["demo-held"] for cell in cells}
    assert set(found) == {("dense", ""), *((method, pattern) for method in METHODS for pattern in patterns)}
    assert {measured["tokens"] for measured in found.values()} == {4 * 255}
    dense = found["dense", ""]["value"]
    assert float(rows["dense"][1]) == pytest.approx(dense, abs=0.005)
    for method in METHODS:
        values = [found[method, pattern]["value"] for pattern in patterns]
        # A standard error behind each.
        assert [float(shown) for shown in rows[method][1:11:2]] == pytest.approx(values, abs=0.005)
        assert dense < values[0] < values[1] < values[2] < values[3]
    for pattern in patterns:
        assert found["continuation", pattern]["value"] < found["magnitude", pattern]["value"]
        assert found["continuation", pattern]["value"] < found["wanda", pattern]["value"]


def test_solvers_are_listed_with_their_parameters(niwaki_: Command) -> None:
    listed = niwaki_("solvers")
    assert (listed.code, listed.err) == (0, "")
    rows = {line.split()[0]: line for line in listed.out.splitlines() if line.strip()}
    assert set(SOLVERS) <= set(rows)
    assert "damping=0.01, block_size=128" in rows["sparsegpt"]
    said = {name: re.split(" {2,}", rows[name])[1] for name in SOLVERS}
    assert len(set(said.values())) == len(SOLVERS)
    assert all(len(line) > 40 and line[0].isupper() for line in said.values())


def test_pack_and_unpack(niwaki_: Command, tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path / "model")
    pruned, packed, again = tmp_path / "pruned", tmp_path / "packed", tmp_path / "again"
    assert niwaki_("prune", model, pruned, "--solver", "magnitude", "--sparsity", "0.7", *SMALL).code == 0
    said = niwaki_("pack", pruned, packed)
    assert said.code == 0
    assert f"written to {packed}" in said.out
    assert re.search(r"pruned matrices: [\d.]+ MiB became [\d.]+ \(0\.\d+\)", said.out)
    assert niwaki_("unpack", packed, again).code == 0
    assert (again / "model.safetensors").read_bytes() == (pruned / "model.safetensors").read_bytes()
    said = niwaki_("pack", model, tmp_path / "other")
    assert (said.code, said.err.count("\n")) == (2, 1)
    text = niwaki_("generate", packed, "The old man", "--tokens", "5")
    assert text.code == 0
    assert text.out.startswith("The old man")
    assert text.out == niwaki_("generate", pruned, "The old man", "--tokens", "5").out
    assert niwaki_("inspect", packed).out == niwaki_("inspect", pruned).out


def test_bench(niwaki_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms, whichever is given, each in a process of its own; the report has the table."""
    monkeypatch.setattr(measuring, "measure", None)
    model, pruned, packed = (tmp_path / name for name in ("model", "pruned", "packed"))
    save_model_with_tokenizer(model)
    assert niwaki_("prune", model, pruned, "--solver", "magnitude", "--sparsity", "0.7", *SMALL).code == 0
    assert niwaki_("pack", pruned, packed).code == 0
    short = ("--prompt-tokens", "8", "--tokens", "3", "--repeats", "1", "--device", "cpu")
    for directory in (pruned, packed):
        said = niwaki_("bench", directory, *short)
        assert said.code == 0, said.err
        found = SpeedRecord.from_json((directory / "niwaki-bench.json").read_text())
        assert [(speed.weights, speed.dtype) for speed in found.speeds] == [
            ("dense", "float32"),
            ("packed", "float32"),
        ]
        dense, small = found.speeds
        assert small.disk == sum(file.stat().st_size for file in packed.glob("*.safetensors"))
        assert dense.disk == (pruned / "model.safetensors").stat().st_size
        assert small.resident < dense.resident < dense.peak
        assert min(small.tokens_per_second, dense.tokens_per_second, small.first_token, small.load) > 0
    page = render(load(packed))
    assert "Speed and size" in page
    assert all(f"<td>{text}</td>" in page for row in found.table()[1:] for text in row[1:])
    said = niwaki_("bench", pruned, "--prompt-tokens", "200")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "128 positions" in said.err
