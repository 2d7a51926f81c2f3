"""The real command, for its main uses."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import niwaki
from niwaki import Calibration
from niwaki.cli import main
from niwaki.evaluation import bench as measuring
from niwaki.evaluation.compare import compare
from niwaki.layer.solvers import SOLVERS
from niwaki.models.block import DecoderBlock
from niwaki.records.comparison import METHODS, Comparison
from niwaki.records.record import Record
from niwaki.records.speed import SpeedRecord
from niwaki.reports.page import report
from support.command import Command, Result, without_sign_of_life
from support.covering import FULL
from support.forks import Ended, begun, forked
from support.models import reference, save_model_with_tokenizer
from support.runs import SMALL, files, listing

NIWAKI = Path(sys.executable).with_name("niwaki")


def ended(script: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What becomes of a shell's script, in which $niwaki is the command."""
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**environment, "niwaki": str(NIWAKI), "HF_HUB_OFFLINE": "1"},
        cwd=directory,
        check=False,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model_with_tokenizer(tmp_path / "model")


# The real command


@pytest.mark.slow
def test_prune_as_a_user_does(tmp_path: Path) -> None:
    ran = ended(
        "$niwaki prune demo out --calibration demo --samples 8 --length 64 --sparsity 0.5 --solver wanda "
        "--text-samples 4 --record run.json",
        tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == "pruning demo\n"
    assert "\x1b" not in ran.stdout
    assert "\r" not in ran.stdout
    for part in ("demo: 6 blocks with 42 matrices, per-row:0.5", "\nwanda\n", "8 x 64 tokens", "50.00 % of 42"):
        assert part in ran.stdout
    assert ran.stdout.rstrip().endswith("written to out")
    assert len(ran.stdout.splitlines()) < 25
    record = Record.from_json((tmp_path / "run.json").read_text())
    assert record == Record.load(tmp_path / "out" / "niwaki.json")
    assert record.command.startswith("niwaki prune demo out --calibration demo --samples 8")
    assert (record.method, record.calibration["sequence_length"], record.sparsity) == ("wanda", 64, 0.5)
    before, after = (record.perplexity[name].value for name in ("before", "after"))
    assert 30 < before < after < 2 * before
    # Wanda's are the two products that measure the error.
    flops = sum(2 * 2 * rows * columns**2 for rows, columns in (matrix.shape for matrix in record.matrices))
    assert record.flops == flops
    assert f"perplexity after   {after:.2f} ± " in ran.stdout
    assert torch.isfinite(reference(tmp_path / "out")(torch.arange(50)[None]).logits).all()


@pytest.mark.slow
def test_help_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['niwaki', *sys.argv[1:]]\n"
        "import niwaki.cli.main\n"
        "try: niwaki.cli.main.main()\n"
        "except SystemExit as e: print('exit', e.code)\n"
        "print('loaded', [m for m in ('torch', 'transformers', 'datasets', 'numpy') if m in sys.modules])\n"
    )
    for arguments in (["--help"], ["prune", "-h"], ["--version"]):
        command = [sys.executable, "-c", code, *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert "loaded []" in ran.stdout
        assert "exit 0" in ran.stdout or arguments == ["--version"]
        assert ran.stderr == ""
    assert niwaki.__version__ in ran.stdout


def mount(directory: Path) -> None:
    """A disk of 2 MB that this process alone sees, and that goes away with it; exit code 77 where it may not."""
    library = ctypes.CDLL(None)
    new_user, new_mounts = 0x10000000, 0x20000
    if library.unshare(new_user | new_mounts) or library.mount(b"none", bytes(directory), b"tmpfs", 0, b"size=2m"):
        sys.exit(77)
    os.chdir(directory)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs namespaces of Linux")
def test_no_space_left_on_a_real_disk(tmp_path: Path) -> None:
    def work() -> None:
        mount(tmp_path)
        sys.argv = ["niwaki", "prune", "demo", "out", "--sparsity", "0.5", "--solver", "wanda", *SMALL]
        try:
            main.main()
        finally:
            sys.stdout.write(f"left: {os.listdir()}")

    ran = forked(work)
    if ran.code == 77:
        pytest.skip("no mounts allowed here")
    assert ran.code == 1
    assert len(without_sign_of_life(ran.err).splitlines()) == 1
    assert "no space left on disk" in ran.err
    assert ran.out == "left: []"


def stopped(
    arguments: list[str], directory: Path, name: str, reached: Callable[[], bool], later: float = 0.0
) -> list[str]:
    """The lines of its errors, from a command that gets a signal some seconds ``later`` than something is reached."""
    running, deadline = begun(arguments, directory), time.monotonic() + 300
    while not reached():
        assert not os.waitpid(running.process, os.WNOHANG)[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(later)
    os.kill(running.process, signal.Signals[name])
    ended = running.ended()
    assert ended.code == 128 + signal.Signals[name]
    assert "Traceback" not in ended.err
    return ended.err.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no forks")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"] if FULL else ["SIGHUP"])
def test_a_run_that_is_stopped(tmp_path: Path, name: str) -> None:
    """In its first block, of which nothing stays, and it says so if it has come to that."""
    command = ["prune", "demo", "out", "--sparsity", "0.5", "--calibration", "demo", "--samples", "200"]
    err = stopped(command, tmp_path, name, lambda: any(tmp_path.iterdir()), later=0.5)
    assert not err[1:] or "nothing was written" in err[1]
    assert len(err) <= 2
    assert listing(tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no forks")
def test_a_run_that_is_stopped_and_goes_on(tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first block by one signal, and (where all cases are run) after its second by the other."""
    command = [
        *("prune", "demo", "out", "--sparsity", "0.5", "--solver", "sparsegpt"),
        *("--calibration", "demo", "--samples", "16", "--length", "64", "--text-samples", "4"),
    ]
    journal, done = tmp_path / ".out.partial.json", 0

    def reached() -> bool:
        return journal.exists() and len(json.loads(journal.read_text())["digests"]) >= done

    stops = ["SIGINT", "SIGTERM"] if FULL else ["SIGTERM"]
    for done, name in enumerate(stops, 1):
        err = stopped(command, tmp_path, name, reached)
        said, *rest = without_sign_of_life("\n".join(err)).splitlines()
        assert said == f"{done} of 6 blocks are done and kept; repeat the command to resume after them"
        assert len(rest) <= 1
    monkeypatch.chdir(tmp_path)
    ran = niwaki_(*command)  # in this process, which has all loaded
    assert (ran.code, ran.err) == (0, "")
    assert f"note: resuming after the first {len(stops)} of 6 blocks, where an earlier run stopped" in ran.out
    rows = [line.split() for line in ran.out.splitlines()]
    blocks = [row[0] for row in rows if len(row) == 9 and row[0].isdigit()]
    assert blocks == ["1", "2", "3", "4", "5"][len(stops) - 1 :]
    assert listing(tmp_path)[0] == "out"


# How it ends


LOST = "error: standard output cannot be written: No space left on device\n"
NOWHERE = "error: there is no directory ./nowhere; give one that niwaki wrote\n"


STREAMS = [
    ("$niwaki --help >/dev/full", 1, LOST),
    ("$niwaki --help >&-", 0, ""),
    ("PYTHONUTF8=0 LC_ALL=POSIX $niwaki inspect demo >/dev/null", 0, "reading demo\n"),
    ("$niwaki report ./nowhere 2>&1 >&- <&- | tail -1 >&2", 2, NOWHERE),
    ("$niwaki report ./nowhere 2>/dev/full", 2, ""),
    ("WORLD_SIZE=2 RANK=1 $niwaki report ./nowhere", 2, NOWHERE.replace("error", "error in process 1")),
]
MORE_STREAMS = [
    ("$niwaki solvers >&-", 0, ""),
    ("$niwaki solvers | true", 1, ""),
    ("$niwaki solvers >/dev/full", 1, LOST),
    ("$niwaki prune --help | true", 1, ""),
    ("$niwaki report ./nowhere 2>&-", 2, ""),
    ("$niwaki report ./nowhere 2> >(true); exit $?", 2, ""),
    ("$niwaki solvers >/dev/full 2>/dev/full", 1, ""),
    ("$niwaki solvers 2>/dev/full <&- | grep -c wanda >/dev/null", 0, ""),
    ("PYTHONIOENCODING=ascii $niwaki solvers >/dev/null", 0, ""),
]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize(("script", "code", "err"), STREAMS + MORE_STREAMS * FULL)
@pytest.mark.slow
def test_streams_that_are_closed_or_full(script: str, code: int, err: str) -> None:
    ran = ended(script)
    assert (ran.returncode, without_sign_of_life(ran.stderr)) == (code, without_sign_of_life(err))


@pytest.mark.skipif(sys.platform == "win32", reason="has no forks")
def test_nobody_reads_what_is_printed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    running = begun(["solvers"], out=writer)
    os.close(writer)
    assert running.ended() == Ended(1, "", "")


def test_nobody_reads_the_end_of_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich ends the command by itself where nobody reads the beginning; what comes behind it raises."""
    silenced: list[object] = []
    monkeypatch.setattr("niwaki.cli.common.silence", silenced.append)
    assert main._ending(BrokenPipeError(errno.EPIPE, "Broken pipe"), signal.SIGINT) == (1, "")
    assert silenced == [sys.stdout]


def test_a_signal_that_a_library_takes_for_a_failed_import() -> None:
    """transformers loads its modules late, and says of whatever ends that only that they cannot be imported."""
    failed = ModuleNotFoundError("Could not import module 'PreTrainedModel'")
    assert main._ending(failed, signal.SIGTERM) == (128 + signal.SIGTERM, "")
    assert main._ending(failed, 0)[0] == 1


@pytest.mark.skipif(sys.platform == "win32", reason="has no signals to send")
@pytest.mark.slow
def test_ctrl_c_while_libraries_are_imported() -> None:
    def heed() -> None:  # also where these tests run in the background, which ignores it, and so would the command
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for delay in (0.3, 0.9, 1.7):
        with subprocess.Popen(
            [NIWAKI, "inspect", "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed
        ) as process:
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert "Traceback" not in err
        assert process.returncode in (130, -signal.SIGINT, 0)  # 0: the machine is fast


def test_ctrl_c_while_torch_is_made_of_its_parts() -> None:
    """An exception there, in what C++ calls, would end the process by an abort."""
    code = (
        "import signal, sys, types\n"
        "from niwaki.cli.main import _Stop\n"
        "sys.modules['torch'] = torch = types.ModuleType('torch')\n"
        "torch.__spec__ = types.SimpleNamespace(_initializing=True)\n"
        "_Stop()(signal.SIGTERM, None)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGTERM, "stopped before anything was done\n")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, niwaki_: Command) -> Callable[[BaseException], Result]:
    """``niwaki inspect demo``, in which something is raised."""

    def run(error: BaseException) -> Result:
        def opened(model: str) -> None:
            raise error

        monkeypatch.setattr("niwaki.evaluation.inspect.opened", opened)
        return niwaki_("inspect", "demo")

    return run


def test_what_nobody_foresaw(failing: Callable[[BaseException], Result], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = failing(KeyError("a\nb"))
    file = Path(ran.err.split()[-1])
    said = f"error: this is a bug in niwaki: KeyError: 'a\\nb'; please report it with the file {file}\n"
    assert (ran.code, ran.out, ran.err) == (70, "", said)
    kept = file.read_text()
    file.unlink()
    assert "Traceback (most recent call last)" in kept
    assert "['niwaki', 'inspect', 'demo']" in kept

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    ran = failing(EOFError())
    assert ran.code == 70
    assert ran.err.endswith("EOFError: EOFError; its traceback could not be saved\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemoryError(), 1, "error: there is not enough memory: MemoryError; docs/troubleshooting.md lists"),
        (RuntimeError("can't allocate memory: you\nto"), 1, "not enough memory: can't allocate memory: you;"),
        (ImportError("libtorch: failed to map"), 1, "error: a library cannot be loaded: libtorch: failed to map; "),
        (KeyboardInterrupt(), 130, "stopped before the result: nothing was written"),
        (SystemExit(3), 3, ""),
    ],
)
def test_other_ends(failing: Callable[[BaseException], Result], error: BaseException, code: int, said: str) -> None:
    ran = failing(error)
    assert ran.code == code
    assert said in ran.err
    assert ran.err.count("\n") == bool(said)


# Comparisons


@pytest.mark.slow
def test_compare(tmp_path: Path, model: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by Ctrl-C in its second run, gone on with, and added to."""
    out = tmp_path / "out"
    command = ["compare", model, "-o", out, *SMALL, "--text", "demo-held", "--text", "demo", "--keep"]
    real, runs = DecoderBlock.input_grams, []

    def interrupt(self: DecoderBlock, *arguments: Any, **named: Any) -> Any:
        runs.append(self.index)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return real(self, *arguments, **named)

    with monkeypatch.context() as changed:
        changed.setattr(DecoderBlock, "input_grams", interrupt)
        ran = niwaki_(*command, "--solvers", "wanda, magnitude", "--sparsity", "0.5")
    assert ran.code not in (0, 2)
    assert "1 of 2 runs are done and kept, and 1 of 2 blocks of the current one; repeat the command" in ran.err
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


# The demonstration


@pytest.mark.slow
def test_demo(tmp_path: Path, niwaki_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of the embedded model's six blocks, which takes a sixth of the time, and with three methods."""
    methods = METHODS if FULL else ("magnitude", "wanda", "continuation")
    assert set(methods) <= set(METHODS)
    small = tmp_path / "small"
    niwaki.shrink("demo", small, blocks=5, calibration=Calibration("demo", samples=4, length=64), measurement=None)

    def of_small(model: str, **others: Any) -> Comparison:
        assert model == "demo"
        assert "solvers" not in others
        return compare(small, solvers=methods, **others)

    monkeypatch.setattr("niwaki.evaluation.compare.compare", of_small)
    patterns = ["50 %", "60 %", "70 %", "80 %", "2:4"]
    to = tmp_path / "demo.json"
    ran = niwaki_("demo", "--samples", "8", "--text-samples", "4", "--record", to)
    assert (ran.code, ran.err) == (0, "")
    assert "\x1b" not in ran.out
    table = ran.out.split("Nats a token")[0]
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line.strip()}
    heading = re.sub(r" %", "%", next(line for line in ran.out.splitlines() if "method" in line)).split()
    assert heading == ["method", "50%", "60%", "70%", "80%", "2:4", "seconds"]
    cells = json.loads(to.read_text())["cells"]
    found = {(cell["method"], cell["pattern"]): cell["perplexity"]["demo-held"] for cell in cells}
    assert set(found) == {("dense", ""), *((method, pattern) for method in methods for pattern in patterns)}
    assert {measured["tokens"] for measured in found.values()} == {4 * 255}
    dense = found["dense", ""]["value"]
    assert float(rows["dense"][1]) == pytest.approx(dense, abs=0.005)
    for method in methods:
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


@pytest.mark.slow
def test_pack_and_unpack(niwaki_: Command, tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path / "model")
    pruned, packed, again = tmp_path / "pruned", tmp_path / "packed", tmp_path / "again"
    assert niwaki_("prune", model, pruned, "--solver", "magnitude", "--sparsity", "0.7", *SMALL).code == 0
    said = niwaki_("pack", pruned, packed)
    assert said.code == 0
    assert f"written to {packed}" in said.out
    assert re.search(r"packed matrices: [\d.]+ MiB became [\d.]+ \(0\.\d+\)", said.out)
    assert niwaki_("unpack", packed, again).code == 0
    assert (again / "model.safetensors").read_bytes() == (pruned / "model.safetensors").read_bytes()
    said = niwaki_("pack", model, tmp_path / "other")
    assert (said.code, said.err.count("\n")) == (2, 1)
    text = niwaki_("generate", packed, "The old man", "--tokens", "5")
    assert text.code == 0
    assert text.out.startswith("The old man")
    assert text.out == niwaki_("generate", pruned, "The old man", "--tokens", "5").out
    assert niwaki_("inspect", packed).out == niwaki_("inspect", pruned).out


@pytest.mark.slow
def test_bench(niwaki_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms, whichever is given, each in a process of its own; the report has the table."""
    monkeypatch.setattr(measuring, "measure", None)
    model, pruned, packed = (tmp_path / name for name in ("model", "pruned", "packed"))
    save_model_with_tokenizer(model)
    assert niwaki_("prune", model, pruned, "--solver", "magnitude", "--sparsity", "0.7", *SMALL).code == 0
    assert niwaki_("pack", pruned, packed).code == 0
    short = ("--prompt-tokens", "8", "--tokens", "3", "--repeats", "1", "--device", "cpu")
    for directory in (pruned, packed):
        if directory == packed:  # again, and in this process, which has all loaded
            monkeypatch.undo()
            monkeypatch.setattr(measuring, "measured", measuring.measure)
            before = files(directory)
            assert niwaki_("bench", directory, *short).code == 0
            assert files(directory) == before  # nobody asked for anything there
        said = niwaki_("bench", directory, *short, "--record", directory / "niwaki-bench.json")
        assert said.code == 0, said.err
        found = SpeedRecord.from_json((directory / "niwaki-bench.json").read_text())
        assert [(speed.weights, speed.dtype) for speed in found.speeds] == [("dense", "float32"), ("packed", "float32")]
        dense, small = found.speeds
        assert small.disk == sum(file.stat().st_size for file in packed.glob("*.safetensors"))
        assert dense.disk == (pruned / "model.safetensors").stat().st_size
        if directory == pruned:
            assert small.resident < dense.resident < dense.peak
        assert min(small.tokens_per_second, dense.tokens_per_second, small.first_token, small.load) > 0
    page = report(packed, prompts=[]).read_text()
    assert "Speed and size" in page
    assert all(f"<td>{text}</td>" in page for row in found.table()[1:] for text in row[1:])
    said = niwaki_("bench", model, *short)  # of which niwaki has no record, and a report nothing to say
    assert said.code == 0, said.err
    assert "note: only the dense model is measured" in said.out
    assert [line.split()[0] for line in said.out.splitlines()[1:3]] == ["weights", "dense"]
    said = niwaki_("bench", pruned, "--prompt-tokens", "200")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "128 positions" in said.err
