"""Several processes that prune one model: the result of one process, the same bytes each time, and clear ends."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from niwaki.models.processes import World
from niwaki.models.scales import FILE as SCALES
from niwaki.records.record import MatrixRecord, Record
from support import processes
from support.covering import FULL, some
from support.encoded import in_mxfp4
from support.models import (
    EMBEDDED,
    EMBEDDED_VOCABULARY,
    add_tokenizer,
    is_pruned,
    random_model,
    weight,
)

PROCESSES = Path(processes.__file__)


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


LENGTH = 96  # of windows
#: Numbers of processes beside one: two share the work evenly, three do not.
OTHERS = (2, 3) if FULL else (3,)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have libraries loaded"),
]


@dataclass(frozen=True)
class Result:
    """What became of one process."""

    code: int | None
    out: str
    err: str


#: Called with the arguments of each process, and with what happens to one of them.
Team = Callable[..., list[Result]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    home, number = tmp_path_factory.mktemp("processes"), itertools.count()
    with subprocess.Popen(
        [sys.executable, PROCESSES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as server:

        def run(*commands: list[str], hook: dict[str, Any] | None = None) -> list[Result]:
            assert server.stdin is not None
            assert server.stdout is not None
            directory = home / str(next(number))
            job = {"directory": str(directory), "commands": commands, "hook": hook}
            server.stdin.write(json.dumps(job) + "\n")
            server.stdin.flush()
            codes = json.loads(server.stdout.readline())
            printed = [
                [(directory / f"{rank}.{name}").read_text() for name in ("out", "err")] for rank in range(len(codes))
            ]
            # Without what the first process says before it has read anything.
            said = [
                (out, re.sub(r"\A(pruning|quantizing|healing|shrinking|running) .*\n", "", err)) for out, err in printed
            ]
            return [Result(code, out, err) for code, (out, err) in zip(codes, said, strict=True)]

        yield run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model("llama grouped", vocab_size=EMBEDDED_VOCABULARY).save_pretrained(path)  # 3 blocks of 7 matrices
    return add_tokenizer(path)


@functools.cache
def words() -> list[str]:
    """Those that are a token each, with the space before them."""
    vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(EMBEDDED).get_vocab()
    return sorted(token[1:] for token in vocabulary if token[0] == "Ġ" and re.fullmatch("[a-z]{2,}", token[1:]))


def chosen(among: list[str], count: int) -> str:
    """A text of so many words."""
    chance = random.Random(0)
    return "".join(" " + chance.choice(among) for _ in range(count))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(chosen(words(), 12 * LENGTH))
    return path


def command(model: Path, out: Path, text: Path, *others: str) -> list[str]:
    """Five windows to calibrate on and four to measure on: neither can be shared out evenly."""
    return [
        *("prune", str(model), str(out), "--calibration", str(text), "--samples", "5"),
        *("--length", str(LENGTH), "--effort", "fast"),
        *("--text-samples", "4", "--device", "cpu", "--sparsity", "0.5", *others),
    ]


#: Of runs in which something else than the solution is looked at: half of the time is the solver's.
QUICK = ("--solver", "wanda")


def prune(start: Team, size: int, arguments: list[str], hook: dict[str, Any] | None = None) -> Record:
    """What several processes with the same command come to, of which only the first one prints."""
    results = start(*[arguments] * size, hook=hook)
    assert [result.code for result in results] == [0] * size, results
    assert [result.err for result in results] == [""] * size
    out = Path(arguments[2])
    assert results[0].out.endswith(f"written to {out}\n")
    assert results[0].out.count("written to") == 1
    assert all(result.out == "" for result in results[1:])
    return Record.from_json((out / "niwaki.json").read_text())


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "niwaki.json"
    }


def matrices(directory: Path, case: str = "llama") -> dict[str, Tensor]:
    tensors = load_file(directory / "model.safetensors")
    return {key: value for key, value in tensors.items() if is_pruned(case, key)}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def by_name(record: Record) -> list[MatrixRecord]:
    """Experts are in the order in which the first process meets them."""
    return sorted(record.matrices, key=lambda matrix: (matrix.block, matrix.name))


def compare(found: Record, expected: Record, out: Path, alone: Path, case: str = "llama") -> None:
    """Rounding in sums is all that differs; later blocks build on what it has done to earlier ones."""
    assert [m.block for m in found.matrices] == [m.block for m in expected.matrices]
    for one, other in zip(by_name(found), by_name(expected), strict=True):
        assert (one.block, one.name, one.tokens) == (other.block, other.name, other.tokens)
        assert one.sparsity == other.sparsity
        assert one.error == pytest.approx(other.error, rel=1e-2 if one.block else 1e-3), one
    assert found.sparsity == expected.sparsity
    masks = {key: value != 0 for key, value in matrices(alone, case).items()}
    for key, value in matrices(out, case).items():
        if ".layers.0." in key:
            assert int(((value != 0) ^ masks[key]).sum()) <= 4, key
    for when, digits in {"before": 1e-5, "after": 1e-3}.items():
        one_, other_ = found.perplexity[when], expected.perplexity[when]
        assert one_.value == pytest.approx(other_.value, rel=digits)
        assert (one_.tokens, one_.windows) == (other_.tokens, other_.windows) == (4 * (LENGTH - 1), 4)


@pytest.fixture(scope="module")
def alone(start: Team, model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes."""
    out = tmp_path_factory.mktemp("alone") / "out"
    prune(start, 1, command(model, out, text))
    return out


@pytest.fixture(scope="module")
def quick(start: Team, model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes, by a quick solver."""
    out = tmp_path_factory.mktemp("quick") / "out"
    prune(start, 1, command(model, out, text, *QUICK))
    return out


def record_of(directory: Path) -> Record:
    return Record.from_json((directory / "niwaki.json").read_text())


# The result


@pytest.mark.parametrize("size", OTHERS)
def test_the_result_is_that_of_one_process(
    start: Team, model: Path, text: Path, alone: Path, tmp_path: Path, size: int
) -> None:
    record = prune(start, size, command(model, tmp_path / "a", text))
    compare(record, record_of(alone), tmp_path / "a", alone)
    assert record.device.startswith(f"{size} processes, the first on cpu")
    assert names(tmp_path) == ["a"]
    # And each time the same one, wherever hidden states are.
    again = prune(start, size, command(model, tmp_path / "b", text))
    assert files(tmp_path / "b") == files(tmp_path / "a")
    assert [m.error for m in again.matrices] == [m.error for m in record.matrices]
    assert again.perplexity == record.perplexity
    prune(start, size, command(model, tmp_path / "c", text, "--max-memory", "1B"))
    assert matrices(tmp_path / "c").keys() == matrices(tmp_path / "a").keys()
    for key, value in matrices(tmp_path / "c").items():
        assert torch.equal(value, matrices(tmp_path / "a")[key])


def test_what_needs_no_inputs_is_the_same_in_any_number(start: Team, model: Path, text: Path, tmp_path: Path) -> None:
    for size in (1, *OTHERS):
        prune(start, size, command(model, tmp_path / str(size), text, "--solver", "magnitude"))
    expected = (tmp_path / "1" / "model.safetensors").read_bytes()
    for size in OTHERS:
        assert (tmp_path / str(size) / "model.safetensors").read_bytes() == expected


def test_errors_are_printed_in_the_order_of_computation(start: Team, model: Path, text: Path, tmp_path: Path) -> None:
    results = start(*[command(model, tmp_path / "out", text)] * 2)
    expected = [
        "block",
        "seconds",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    assert next(line.split() for line in results[0].out.splitlines() if "seconds " in line) == expected
    assert [m.name.split(".")[1] for m in record_of(tmp_path / "out").matrices] == expected[2:] * 3


def test_only_some_blocks(start: Team, model: Path, text: Path, quick: Path, tmp_path: Path) -> None:
    record = prune(start, 2, command(model, tmp_path / "out", text, "--blocks", "0:1", *QUICK))
    assert [m.block for m in record.matrices] == [0] * 7
    for one, other in zip(record.matrices, record_of(quick).matrices[:7], strict=True):
        assert one.error == pytest.approx(other.error, rel=1e-3), one.name
    source = load_file(model / "model.safetensors")
    for key, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(value, source[key]) == (".layers.0." not in key or not is_pruned("llama", key))


def test_errors_of_masks_without_choices(start: Team, model: Path, text: Path, quick: Path, tmp_path: Path) -> None:
    """Where few things hang on rounding the errors are the same to more digits, in all blocks."""
    for size in OTHERS:
        record = prune(start, size, command(model, tmp_path / str(size), text, *QUICK))
        for one, other in zip(record.matrices, record_of(quick).matrices, strict=True):
            assert one.error == pytest.approx(other.error, rel=1e-4), one


# What is done to blocks besides


@pytest.mark.parametrize(
    ("effort", "case"),
    [
        (effort, case)
        for effort, cases in {
            "fast:epochs=2:batch=192:rate=0.001": ["mixtral", "llama grouped"],
            "fast:allocation=loss:importance=0.5:pilot=1": ["llama grouped", "mixtral"],
            **({"fast:allocation=error:pilot=1": ["zamba2", "llama grouped"]} if FULL else {}),
        }.items()
        for case in (cases if FULL else cases[:1])
    ],
)
def test_more_effort_in_two_processes(start: Team, tmp_path: Path, case: str, effort: str) -> None:
    """With windows in an order in which one process has in each batch what two have in their two."""
    path = tmp_path / "model"
    random_model(case, vocab_size=EMBEDDED_VOCABULARY).save_pretrained(path)
    add_tokenizer(path)
    all_words = chosen(words(), 12 * LENGTH).split()
    windows = [all_words[i : i + LENGTH] for i in range(0, len(all_words), LENGTH)]
    orders = {"one": [0, 4, 1, 5, 2, 6, 3, 7], "two": [0, 1, 2, 3, 4, 5, 6, 7]}
    if "allocation" in effort:  # labels are drawn for places in the order, and nothing is done batch by batch
        orders["one"] = orders["two"]

    def asked(name: str, out: str, *others: str) -> list[str]:
        chosen_ = [word for i in [*orders[name], 8, 9, 10, 11] for word in windows[i]]
        (tmp_path / name).write_text("".join(f" {word}" for word in chosen_))
        options = ("--samples", "8", "--solver", "wanda", "--effort", effort)
        return command(path, tmp_path / out, tmp_path / name, *options, *others)

    expected = prune(start, 1, asked("one", "alone"))
    record = prune(start, 2, asked("two", "out"))
    compare(record, expected, tmp_path / "out", tmp_path / "alone", case)
    assert len(record.fits) == len(expected.fits) == ("batch" in effort) * (record.matrices[-1].block + 1)
    for fit, other in zip(record.fits, expected.fits, strict=True):
        assert fit.before == pytest.approx(other.before, rel=1e-2)
        assert fit.after == pytest.approx(other.after, rel=1e-2)
        assert (fit.block, fit.epochs) == (other.block, 2)
    found, alone = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "alone"))
    for key, value in found.items():
        if ".layers.0." in key:  # behind it rounding may send a token to another expert
            assert (value - alone[key]).norm() < 0.01 * alone[key].norm(), key
    # The same bytes again, with little memory, and resumed after the first block.
    prune(start, 2, asked("two", "little", "--max-memory", "1B"))
    again = load_file(tmp_path / "little" / "model.safetensors")
    assert all(torch.equal(value, found[key]) for key, value in again.items())
    if "allocation" in effort:  # the hook would end it in block 1 of the look at the dense model
        return
    hook = {"rank": 1, "block": 1, "how": "error"}
    assert all(result.code for result in start(*[asked("two", "stopped")] * 2, hook=hook))
    assert prune(start, 2, asked("two", "stopped")).resumed == [1]
    again = load_file(tmp_path / "stopped" / "model.safetensors")
    assert all(torch.equal(value, found[key]) for key, value in again.items())


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose down_proj takes as long as all other matrices of a block."""
    path = tmp_path_factory.mktemp("wide")
    random_model("llama", vocab_size=EMBEDDED_VOCABULARY, intermediate_size=96).save_pretrained(path)
    return add_tokenizer(path)


def shapes(directory: Path, size: int) -> list[list[list[int]]]:
    """Those of the matrices that each process solved."""
    return [list(map(json.loads, (directory / str(rank)).read_text().splitlines())) for rank in range(size)]


# Matrices whose rows are solved in different processes


@pytest.mark.parametrize(
    "options",
    some([(), ("--solver", "sparsegpt", "--sparsity", "0.6"), ("--solver", "wanda+continuation")], 1),
    ids=str,
)
def test_rows_of_one_matrix_in_all_processes(
    start: Team, wide: Path, text: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    def asked(name: str) -> list[str]:
        return command(wide, tmp_path / name, text, *options)

    expected = prune(start, 1, asked("alone"))
    watched = tmp_path / "watched"
    watched.mkdir()
    record = prune(start, 3, asked("out"), {"how": "watch", "to": str(watched)})
    compare(record, expected, tmp_path / "out", tmp_path / "alone")
    assert [m.stats.keys() for m in record.matrices] == [m.stats.keys() for m in expected.matrices]
    solved = shapes(watched, 3)
    for rank, rows in enumerate((10, 11, 11)):
        # First of all in each of the two blocks, and in no process more of it.
        assert [shape for shape in solved[rank] if shape[1] == 96] == [[rows, 96]] * 2
        assert solved[rank][0] == [rows, 96]
    assert sorted(map(tuple, itertools.chain(*solved))) == sorted(
        2 * [(10, 96), *[(11, 96)] * 2, *[(96, 32)] * 2, *[(32, 32)] * 4]
    )
    again = prune(start, 3, asked("again"))
    assert files(tmp_path / "again") == files(tmp_path / "out")
    assert [m.error for m in again.matrices] == [m.error for m in record.matrices]


def test_zeros_that_are_there_already(start: Team, wide: Path, text: Path, tmp_path: Path) -> None:
    """Also of the matrix whose rows are shared out: each process has those of its own rows."""
    model = tmp_path / "model"
    shutil.copytree(wide, model)
    values, generator = load_file(model / "model.safetensors"), torch.Generator().manual_seed(0)
    for key, value in values.items():
        if is_pruned("llama", key):
            value[torch.rand(value.shape, generator=generator) < torch.linspace(0.2, 1.1, len(value))[:, None]] = 0
    save_file(values, model / "model.safetensors", {"format": "pt"})
    expected, record = (
        prune(start, size, command(model, tmp_path / str(size), text, "--solver", "sparsegpt")) for size in (1, 3)
    )
    compare(record, expected, tmp_path / "3", tmp_path / "1")
    for one, other in zip(by_name(record), by_name(expected), strict=True):
        for name in ("zeros_before", "revived"):
            assert one.stats[name] == other.stats[name]
        assert one.stats["revived"] == 0 < int(one.stats["zeros_before"])
    assert all(not value[values[key] == 0].any() for key, value in matrices(tmp_path / "3").items())
    assert [note for note in record.notes if "zero in the model" in note] == [
        note for note in expected.notes if "zero in the model" in note
    ]


@pytest.mark.parametrize("effort", ["fast", "fast:epochs=2:batch=192"] if FULL else ["fast:epochs=2:batch=192"])
def test_weights_on_a_grid(start: Team, wide: Path, text: Path, tmp_path: Path, effort: str) -> None:
    """Also of the matrix whose rows are shared out; that what is written is on the grid each run sees for itself."""

    def asked(name: str) -> list[str]:
        return command(wide, tmp_path / name, text, "--quantize", "int4:16", "--effort", effort)

    expected, record = prune(start, 1, asked("alone")), prune(start, 3, asked("out"))
    for one, other in zip(by_name(record), by_name(expected), strict=True):
        assert (one.block, one.name) == (other.block, other.name)
        assert one.error == pytest.approx(other.error, rel=0.05 if one.block else 1e-2), one
        assert one.sparsity == pytest.approx(other.sparsity, abs=0.02)
        assert one.stats.keys() == other.stats.keys()
    found, alone = (load_file(tmp_path / name / SCALES) for name in ("out", "alone"))
    assert found.keys() == alone.keys()
    for key, value in found.items():
        assert value.shape == alone[key].shape
        if ".layers.0." in key:  # a code that rounding changes changes the scales of its row
            assert (value.isclose(alone[key], rtol=1e-3)).double().mean() > 0.9, key
    # The same bytes again, and gone on with behind the first block.
    hook = {"rank": 1, "block": 1, "how": "error"}
    assert all(result.code for result in start(*[asked("again")] * 3, hook=hook))
    assert prune(start, 3, asked("again")).resumed == [1]
    assert files(tmp_path / "again") == files(tmp_path / "out")


def test_weights_rounded_to_the_nearest(start: Team, model: Path, text: Path, tmp_path: Path) -> None:
    """No window is calibrated on, so that there may be more processes than windows of that."""
    for size in (1, 2):
        out = tmp_path / str(size)
        given = ["quantize", str(model), str(out), "int8", "--text", str(text), "--length", str(LENGTH)]
        prune(start, size, [*given, "--text-samples", "4", "--device", "cpu"])
    assert files(tmp_path / "1").keys() == files(tmp_path / "2").keys()
    for name in ("model.safetensors", "quantization/scales.safetensors"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_a_format_that_is_kept(start: Team, text: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    in_mxfp4(model, vocab_size=EMBEDDED_VOCABULARY)
    add_tokenizer(model)

    def asked(name: str) -> list[str]:
        return command(model, tmp_path / name, text, "--keep-format", "--solver", "magnitude")

    for size in (1, 2):
        record = prune(start, size, asked(str(size)))
        assert record.kept_format == "MXFP4"
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("1", "2"))
    assert one == two
    hook = {"rank": 1, "block": 1, "how": "error"}
    assert all(result.code for result in start(*[asked("again")] * 2, hook=hook))
    assert prune(start, 2, asked("again")).resumed == [1]
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == one


def test_what_one_process_draws_is_no_question_to_the_others(
    start: Team, wide: Path, text: Path, tmp_path: Path
) -> None:
    """On a terminal the first one has solvers estimate errors on the way."""
    results = start(*[command(wide, tmp_path / "out", text, "--blocks", "0:1")] * 3, hook={"how": "draw"})
    assert [result.code for result in results] == [0] * 3, results
    assert "\x1b[" in results[0].out
    prune(start, 3, command(wide, tmp_path / "quiet", text, "--blocks", "0:1"))
    found, expected = (tmp_path / name / "model.safetensors" for name in ("out", "quiet"))
    assert found.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(
    "options",
    [("--solver", "ria"), ("--solver", "alps")],
    ids=str,
)
def test_rows_that_cannot_be_solved_apart(
    start: Team, wide: Path, text: Path, tmp_path: Path, options: tuple[str, str]
) -> None:
    given = command(wide, tmp_path / "out", text, "--blocks", "0:1")
    prune(start, 3, [*given, *options], {"how": "watch", "to": str(tmp_path)})
    assert sorted(map(tuple, itertools.chain(*shapes(tmp_path, 3)))) == sorted(
        [(32, 96), *[(96, 32)] * 2, *[(32, 32)] * 4]
    )


@pytest.mark.parametrize(("rank", "how"), [(1, "kill"), *[(0, "fail")] * FULL])
def test_a_process_that_ends_where_all_solve_one_matrix(
    start: Team, wide: Path, text: Path, tmp_path: Path, rank: int, how: str
) -> None:
    arguments = command(wide, tmp_path / "out", text)
    hook = {"rank": rank, "block": 1, "matrix": "mlp.down_proj", "how": how}
    results = start(*[arguments] * 3, hook=hook)
    for number, result in enumerate(results):
        if number != rank:
            assert result.code == 1
            assert "Traceback" not in result.err
            assert f"error in process {number}: another process of this run has ended" in result.err
    said = f"error in process {rank}: model.layers.1.mlp.down_proj.weight: this process is out of luck\n"
    assert (said in results[rank].err) == (how == "fail")
    assert results[rank].code not in (0, None)
    assert names(tmp_path) == [".out.partial", ".out.partial.json"]
    assert prune(start, 3, arguments).resumed == [1]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral whose last expert is for the words of the last windows of ``two_texts`` only."""
    whole, way = (
        random_model("mixtral", vocab_size=EMBEDDED_VOCABULARY, num_experts_per_tok=1),
        torch.randn(32),
    )
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    late = tokenizer("".join(f" {word}" for word in words()[1::2]), add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        rows = weight(whole, "model.embed_tokens").normal_().sub_(way)
        rows[late] += 2 * way
        for block in range(2):
            gate = weight(whole, f"model.layers.{block}.mlp.gate")
            gate[:3] -= way
            gate[3] += way
    path = tmp_path_factory.mktemp("mixtral")
    whole.save_pretrained(path)
    return add_tokenizer(path)


@pytest.fixture(scope="module")
def two_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three windows of one kind and two of another, and four to measure on."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    early, late = words()[::2], words()[1::2]
    path.write_text(chosen(early, 3 * LENGTH) + chosen(late, 2 * LENGTH) + chosen(early, 5 * LENGTH))
    return path


# Experts


@pytest.mark.parametrize("size", [2, 3] if FULL else [2])
def test_an_expert_that_one_process_sees(
    start: Team, experts: Path, two_texts: Path, tmp_path: Path, size: int
) -> None:
    expected = prune(start, 1, command(experts, tmp_path / "alone", two_texts))
    shares = World(0, size).share(torch.arange(5))
    # The first process has none of the windows that the last expert is for.
    record = prune(start, 1, command(experts, tmp_path / "first", two_texts, "--samples", str(len(shares))))
    assert {m.tokens for m in _of(record, "experts.3")} == {0}
    assert {m.tokens for m in _of(expected, "experts.3")} == {2 * LENGTH}
    record = prune(start, size, command(experts, tmp_path / "out", two_texts))
    compare(record, expected, tmp_path / "out", tmp_path / "alone", "mixtral")
    assert [note for note in record.notes if "stands in" in note] == [
        note for note in expected.notes if "stands in" in note
    ]


def _of(record: Record, part: str) -> list[MatrixRecord]:
    return [matrix for matrix in record.matrices if matrix.block == 0 and part in matrix.name]


# Processes that end


@pytest.mark.parametrize(
    ("size", "rank", "how"),
    [
        *((3, 1, "kill"), (2, 0, "fail"), (2, 0, "interrupt")),
        *[(2, 0, "kill"), (3, 2, "fail"), (2, 1, "unforeseen")] * FULL,
    ],
)
def test_a_process_that_ends_ends_the_run(
    start: Team, model: Path, text: Path, quick: Path, tmp_path: Path, size: int, rank: int, how: str
) -> None:
    arguments = command(model, tmp_path / "out", text, *QUICK)
    results = start(*[arguments] * size, hook={"rank": rank, "block": 1, "how": how})
    assert not (tmp_path / "out").exists()
    assert names(tmp_path) == [".out.partial", ".out.partial.json"]
    for number, result in enumerate(results):
        assert "written" not in result.out
        if number != rank:
            assert result.code == 1
            assert "Traceback" not in result.err
            assert f"error in process {number}: another process of this run has ended" in result.err
    said = {
        "kill": "",
        "fail": f"error in process {rank}: this process is out of luck\n",
        "unforeseen": f"error in process {rank}: this is a bug in niwaki: ZeroDivisionError: nobody thought of this; ",
        "interrupt": "",
    }[how]
    assert said in results[rank].err
    assert results[rank].code == {"kill": -9, "fail": 1, "unforeseen": 70, "interrupt": 130}[how]
    assert "Traceback" not in results[rank].err
    # Who can say so says what stays.
    stays = "1 of 3 blocks are done and kept; repeat the command to resume after them"
    assert (stays in results[0].err) == (rank != 0 or how != "kill")
    assert not any(stays in result.err for result in results[1:])
    # Others, in another number, go on.
    others = 5 - size
    record = prune(start, others, arguments)
    assert record.resumed == [1]
    assert record.device.startswith(f"{others} processes")
    compare(record, record_of(quick), tmp_path / "out", quick)
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("size", [2, 3] if FULL else [2])
def test_a_run_that_goes_on_gives_the_same_bytes(
    start: Team, model: Path, text: Path, tmp_path: Path, size: int
) -> None:
    prune(start, size, command(model, tmp_path / "whole", text, *QUICK))
    arguments = command(model, tmp_path / "out", text, *QUICK)
    for block in (1, 2):
        start(*[arguments] * size, hook={"rank": size - 1, "block": block, "how": "kill"})
    record = prune(start, size, arguments)
    assert record.resumed == [1, 2]
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert record.perplexity == record_of(tmp_path / "whole").perplexity


def test_one_process_goes_on_with_what_several_have_done(
    start: Team, model: Path, text: Path, quick: Path, tmp_path: Path
) -> None:
    arguments = command(model, tmp_path / "out", text, *QUICK)
    start(*[arguments] * 2, hook={"rank": 1, "block": 2, "how": "fail"})
    record = prune(start, 1, arguments)
    assert record.resumed == [2]
    assert "processes" not in record.device
    compare(record, record_of(quick), tmp_path / "out", quick)


def test_a_process_that_ends_before_a_block_is_done(start: Team, model: Path, text: Path, tmp_path: Path) -> None:
    results = start(*[command(model, tmp_path / "out", text)] * 2, hook={"rank": 1, "block": 0, "how": "fail"})
    assert [result.code for result in results] == [1, 1]
    assert results[0].err == "error in process 0: another process of this run has ended; see what it said\n"
    assert names(tmp_path) == []


def refused(results: list[Result], code: int = 2) -> list[str]:
    """What each of the processes says, in one line."""
    for result in results:
        assert result.code == code, result
        assert result.out == ""
        assert len(result.err.splitlines()) == 1, result.err
    return [result.err for result in results]


# What makes no sense


def test_more_processes_than_samples(start: Team, model: Path, text: Path, tmp_path: Path) -> None:
    for rank, said in enumerate(refused(start(*[command(model, tmp_path / "out", text)] * 6))):
        assert said.startswith(f"error in process {rank}: 5 samples cannot be shared out to 6 processes; start")
    # Of the text to measure on there are four.
    for said in refused(start(*[command(model, tmp_path / "out", text)] * 5)):
        assert "4 samples cannot be shared out to 5 processes" in said
    assert names(tmp_path) == []


def test_one_gpu_for_all(start: Team, model: Path, text: Path, tmp_path: Path) -> None:
    arguments = command(model, tmp_path / "out", text, "--device", "cuda:0")
    for said in refused(start(arguments, arguments)):
        assert "each of the 2 processes has a GPU of its own; use --device cuda instead of cuda:0" in said
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("option", "value", "differs"),
    [
        ("--samples", "6", "calibration, text"),
        ("--blocks", "0:1", "blocks"),
        *[("--sparsity", "0.6", "pattern"), ("--solver", "magnitude", "solver")] * FULL,
        *[("--text-samples", "0", "text, measure")] * FULL,
    ],
)
def test_processes_that_were_asked_for_different_things(
    start: Team, model: Path, text: Path, tmp_path: Path, option: str, value: str, differs: str
) -> None:
    arguments = command(model, tmp_path / "out", text)
    said = refused(start(arguments, arguments, [*arguments, option, value]))
    for rank in (0, 1):
        assert said[rank] == (
            f"error in process {rank}: process 2 was asked for another run than process {rank}: they differ in "
            f"{differs}\n"
        )
    assert f"process 0 was asked for another run than process 2: they differ in {differs}" in said[2]
    assert names(tmp_path) == []


def test_only_the_first_process_looks_at_the_output(start: Team, model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("keep me")
    first, second = start(*[command(model, tmp_path / "out", text)] * 2)
    assert first.code == 2
    assert "exists and is not an empty directory" in first.err
    assert second.code == 1
    assert "another process of this run has ended" in second.err
    assert names(tmp_path / "out") == ["precious.txt"]


# Healing


def healing(model: Path, pruned: Path, out: Path, text: Path) -> list[str]:
    """Two windows that are held out, and all others in each step."""
    return [
        *("heal", str(pruned), str(out), "--teacher", str(model), "--calibration", str(text), "--length", str(LENGTH)),
        *("--tokens", str(96 * LENGTH), "--batch", str(16 * LENGTH), "--rate", "0.003", "--dtype", "float32"),
        *("--text-samples", "2", "--device", "cpu", "--own-text", "0"),
    ]


def test_healed(start: Team, model: Path, alone: Path, tmp_path: Path) -> None:
    """As by one process, whose batches are those of all together; the same bytes each time, and after an end."""
    pruned, few = alone, tmp_path / "few.txt"
    few.write_text(chosen(words()[:40], 21 * LENGTH))  # of which a quarter is left to measure on
    points = {}
    for name, size in (("one", 1), ("two", 2), ("again", 2)):
        healed = prune(start, size, healing(model, pruned, tmp_path / name, few)).healing
        assert healed
        points[name] = [point.error for point in healed.points]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    before = load_file(pruned / "model.safetensors")
    changed = {key for key, value in one.items() if not torch.equal(value, before[key])}
    assert len(changed) > 10, points
    for key in changed:
        torch.testing.assert_close(two[key], one[key], rtol=0, atol=2e-2 * float((one[key] - before[key]).abs().max()))
    assert files(tmp_path / "two") == files(tmp_path / "again")
    assert points["two"] == pytest.approx(points["one"], rel=1e-3)
    assert min(points["two"]) < 0.95 * points["two"][0]

    arguments = healing(model, pruned, tmp_path / "ended", few)
    first, second = start(arguments, arguments, hook={"rank": 1, "step": 4, "how": "kill"})
    assert second.code == -9
    assert first.code == 1
    assert "another process of this run has ended" in first.err
    record = prune(start, 2, arguments)
    assert record.resumed == [4]
    assert files(tmp_path / "ended") == files(tmp_path / "two")


def test_healed_by_blocks(start: Team, model: Path, alone: Path, tmp_path: Path) -> None:
    """On own text too: the same bytes each time, nearer to the dense model, with the same zeros."""
    pruned, few = alone, tmp_path / "few.txt"
    few.write_text(chosen(words()[:40], 34 * LENGTH))
    less = ["--method", "blocks", "--own-text", "0.25", "--tokens", str(32 * LENGTH)]
    for name in ("out", "again"):
        arguments = [*healing(model, pruned, tmp_path / name, few), *less]
        record = prune(start, 2, arguments)
    assert files(tmp_path / "out") == files(tmp_path / "again")
    assert record.healing
    before, after = record.healing.points
    assert after.error < before.error
    came, left = (load_file(path / "model.safetensors") for path in (pruned, tmp_path / "out"))
    assert all(torch.equal(value == 0, came[key] == 0) for key, value in left.items())


def torchrun(size: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *map(str, arguments)),
        ],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=300,
        check=False,
    )


# As users start them


def with_text(arguments: list[str], text: Path) -> list[str]:
    options = ["--calibration", str(text), "--samples", "5", "--length", str(LENGTH), "--text-samples", "3"]
    return [*arguments, *options, "--device", "cpu"]


@pytest.mark.parametrize(
    "options",
    [
        ("--blocks", "1", "--effort", "fast"),
        ("--neurons", "0.25", "--effort", "fast:epochs=1"),
        *[("--parameters", "0.96", "--effort", "fast")] * FULL,
    ],
)
def test_shrunk(start: Team, model: Path, text: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """As by one process but for rounding; the same bytes each time, and after an end."""
    arguments = {
        name: with_text(["shrink", str(model), str(tmp_path / name), *options], text)
        for name in ("alone", "two", "ended")
    }
    alone, two = prune(start, 1, arguments["alone"]), prune(start, 2, arguments["two"])
    assert alone.structure
    assert two.structure
    assert two.structure.neurons == alone.structure.neurons
    assert two.structure.blocks == alone.structure.blocks
    assert two.structure.influence == pytest.approx(alone.structure.influence, rel=1e-3)
    assert two.structure.combinations == pytest.approx(alone.structure.combinations, rel=1e-3)
    assert [m.error for m in two.matrices] == pytest.approx([m.error for m in alone.matrices], rel=1e-2)
    assert [fit.after for fit in two.fits] == pytest.approx([fit.after for fit in alone.fits], rel=0.2)
    assert two.perplexity["before"].value == pytest.approx(alone.perplexity["before"].value, rel=1e-5)
    assert two.perplexity["after"].value == pytest.approx(alone.perplexity["after"].value, rel=1e-2)
    if "--neurons" in options:
        start(*[arguments["ended"]] * 2, hook={"rank": 1, "block": 2, "how": "kill"})
        assert prune(start, 2, arguments["ended"]).resumed == [2]
        assert files(tmp_path / "ended") == files(tmp_path / "two")


def test_stages(start: Team, model: Path, text: Path, tmp_path: Path) -> None:
    """The same bytes each time, also where a process ends in the second stage."""
    pytest.importorskip("gguf")
    stages = ("shrink neurons=0.25", "prune 2:4 effort=fast", "heal tokens=2k own_text=0 batch=200", "export gguf-q8_0")
    arguments = {
        name: with_text(["run", str(model), str(tmp_path / name), *(x for s in stages for x in ("--stage", s))], text)
        for name in ("whole", "ended")
    }
    record = prune(start, 2, arguments["whole"])
    assert [stage.name for stage in record.stages] == ["shrink", "prune", "heal"]
    results = start(*[arguments["ended"]] * 2, hook={"rank": 1, "block": 2, "matrix": "mlp.gate_proj", "how": "kill"})
    assert "stage 2 of 4, prune: 2 of 3 blocks are done and kept" in results[0].err
    assert prune(start, 2, arguments["ended"]).resumed == [2]
    assert files(tmp_path / "ended") == files(tmp_path / "whole")


def test_torchrun(start: Team, model: Path, text: Path, tmp_path: Path) -> None:
    prune(start, 2, command(model, tmp_path / "forked", text, *QUICK))
    ran = torchrun(2, "-m", "niwaki", *command(model, tmp_path / "out", text, *QUICK))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("written to") == ran.stdout.count("calibration:") == 1
    assert files(tmp_path / "out") == files(tmp_path / "forked")


@pytest.mark.skipif(not FULL, reason="the same ends are tried without torchrun, which takes much of the time")
def test_torchrun_with_a_process_that_ends(model: Path, text: Path, tmp_path: Path) -> None:
    # Where it solves, because then the first process has saved the block before.
    hook = json.dumps({"rank": 1, "block": 1, "how": "fail", "matrix": "any"})
    ran = torchrun(2, PROCESSES, hook, *command(model, tmp_path / "out", text))
    assert ran.returncode != 0
    assert "written" not in ran.stdout
    assert "1 of 3 blocks are done and kept" in ran.stderr
    assert re.search(r"error in process 1: \S+: this process is out of luck", ran.stderr)
    assert names(tmp_path) == [".out.partial", ".out.partial.json"]
