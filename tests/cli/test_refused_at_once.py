"""What is wrong with the arguments alone is refused at once: without torch, whose import takes seconds."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from niwaki.choices import FIRST_PARAMETERS
from niwaki.cli.checks import check
from niwaki.stages import STAGES

#: Runs each list of arguments on standard input; says the exit code, standard output and error of each.
_EACH = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "datasets"]))  # to import them is an error
from niwaki.cli.main import main
said = []
for arguments in json.load(sys.stdin):
    sys.argv, out, err = ["niwaki", *arguments], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            said.append((ended.code, out.getvalue(), err.getvalue()))
json.dump(said, sys.stdout)
"""
_REFUSED = {
    "prune demo out": "say how sparse: a sparsity such as 0.6, or a pattern such as 2:4",
    "prune demo out --mask-from wanda": "say how sparse",
    "prune demo out --pattern foo": "'foo' is not a valid pattern",
    "prune demo out --pattern two-factors:0.5:int1": "2 to 8 bits",
    "prune demo out --sparsity 0.5,0.6": "is not a valid pattern",
    "prune demo out --sparsity 60": "did you mean 0.6",
    "prune ./nowhere out --sparsity 0.5": "there is no directory ./nowhere",
    "prune ./smolm2 out --sparsity 0.5": "there is no directory ./smolm2; did you mean ./smollm2?",
    "prune SmolM2 out --sparsity 0.5": "there is no directory SmolM2 (did you mean smollm2?), and the",
    "prune fulll out --sparsity 0.5": "there is no directory fulll, and the Hugging Face hub is not asked",  # no model
    "prune empty out --sparsity 0.5": "empty has no config.json",
    "prune demo full --sparsity 0.5": "is not an empty directory",
    "prune demo full/x/y --sparsity 0.5": "is not a directory",
    "prune demo out --sparsity 0.5 --solver sparsgpt": "no solver is called 'sparsgpt'; did you mean sparsegpt?",
    "prune demo out --sparsity 0.5 --mask-from wandaa": "there is no directory wandaa to take masks from",
    "prune demo out --sparsity 0.5 --mask-from ./nowhere": "there is no directory ./nowhere",
    "prune demo out --sparsity 0.5 --effort bset": "did you mean best",
    "prune demo out --sparsity 0.5 --quantize int99": "a grid has 2 to 8 bits",
    "prune demo out --sparsity 0.5 --calibration nowhere.txt": "there is no file nowhere.txt",
    "prune demo out --sparsity 0.5 --calibration binary.txt": "cannot be read as UTF-8 text",
    "prune demo out --sparsity 0.5 --calibration bad.jsonl": "line 1: not a JSON object",
    "prune demo out --sparsity 0.5 --calibration wikitex2": "no text is called 'wikitex2'; did you mean wikitext2",
    "prune demo out --sparsity 0.5 --text nowhere.txt": "there is no file nowhere.txt",
    "prune demo out --sparsity 0.5 --samples 0": "samples must be 1 or more; got 0",
    "prune demo out --sparsity 0.5 --max-memory 8": "8 bytes; did you mean 8GiB?",
    "prune demo out --sparsity 0.5 --device quantum": "the device 'quantum' cannot be used",
    "prune demo out --sparsity 0.5 --dtype float8": "got float8",
    "prune demo out 0.6": "unexpected '0.6'; a value goes after its option",
    "prune demo out --sparsity 0.5 --blocks 7": "give FROM:TO",
    "quantize demo out int77": "a grid has 2 to 8 bits",
    "quantize demo out four": "is not a valid grid",
    "quantize ./nowhere out int8": "there is no directory ./nowhere",
    "shrink demo out": "experts or vocabulary",
    "shrink demo out --blocks=-1": "blocks must be 0 or more; got -1",
    "shrink demo out --neurons 25": "got 25; did you mean 0.25 (25 %)?",
    "shrink demo out --parameters lots": "parameters is how much is left",
    "shrink demo out --vocabulary lots": "vocabulary is how many tokens stay",
    "heal ./nowhere out --teacher demo": "there is no directory ./nowhere",
    "heal demo out --teacher ./nowhere": "there is no directory ./nowhere",
    "heal demo out --teacher demo --max-time 5": "invalid time '5'; did you mean 5m or 5h?",
    "heal demo out --teacher demo --tokens 0": "tokens must be 1 or more; got 0",
    "heal demo out --teacher demo --rate=-1": "the learning rate must be above 0; got -1.0",
    "heal demo out --teacher demo --tokens lots": "invalid number 'lots'",
    "compress demo out": "say how small",
    "compress demo out --size 0.4 --also demo": "--also is for --loss",
    "compress demo out --loss 0.1 --also nowhere.txt": "there is no file nowhere.txt",
    "compress demo out --size small": "such as 0.4 or 40%, or bytes, such as 80MB; got 'small'",
    "quantize demo out fp8": "FP8 and W8A8 are formats, as in 'niwaki export MODEL OUT --format fp8'",
    "export demo out --format Q4_K_M": "for a type such as q4_k, 'niwaki quantize MODEL OUT q4_k' comes first",
    "compress demo out --size 40": "did you mean 0.4 (40 %) or 40MB?",
    "compress demo out --size 0.4 --loss 0.1": "give only one of these",
    "compress demo out --size 0.4 --for transformers": "transformers takes parameters",
    "compress demo out --loss none": "loss is a number above 0",
    "compress demo out --speed=-1": "speed is a number above 0",
    "compress demo full --size 0.5": "is not an empty directory",
    "run demo out": "say what to do",
    "run demo out --stage purne": "did you mean prune",
    "run demo out -s 'prune foo'": "'foo' is not a valid pattern",
    "run demo out -s 'shrink blocks=1' -s 'quantize int99'": "a grid has 2 to 8 bits",
    "run demo out -s 'heal tokens=lots'": "invalid number 'lots'",
    "run demo out --recipe nowhere.toml": "nowhere.toml cannot be read",
    "compare demo -o out --solvers wanda,foo": "no solver is called 'foo'",
    "compare demo -o out --solvers wanda@foo": "no effort is called 'foo'",
    "compare demo -o out --solvers ,": "say which solvers and which patterns",
    "compare demo -o out --sparsity ''": "say which solvers and which patterns",
    "compare demo -o out --sparsity 0.5,foo": "'foo' is not a valid pattern",
    "compare demo -o full": "has no comparison to resume",
    "compare demo -o demo": "demo is what the model is called",
    "eval ./nowhere": "there is no directory ./nowhere",
    "eval demo --text nowhere.txt": "there is no file nowhere.txt",
    "eval demo --text demo --samples 0": "samples must be 1 or more",
    "export demo o.gguf": "o.gguf would be a file for llama.cpp; its format is gguf, gguf-f16, gguf-q8_0 or gguf-q4_0",
    "export demo o.gguf --format packed": "its format is gguf, gguf-f16, gguf-q8_0 or gguf-q4_0",
    "export demo full": "is not an empty directory",
    "export demo out --format gptq": "'gptq' is not one of",
    "pack ./nowhere out": "there is no directory ./nowhere",
    "pack demo full": "is not an empty directory",
    "unpack ./nowhere out": "there is no directory ./nowhere",
    "push nowhere owner/name": "there is no directory nowhere",
    "push full small": "OWNER/NAME, such as me/small-model; got 'small'",
    "generate demo ''": "the prompt is empty",
    "generate ./nowhere hello": "there is no directory ./nowhere",
    "generate demo hello --tokens 0": "tokens must be 1 or more",
    "generate demo hello --temperature=-1": "the temperature must be 0",
    "bench ./nowhere": "there is no directory ./nowhere",
    "bench demo --repeats 0": "repeats must be 1 or more",
    "report nowhere": "there is no directory nowhere",
    "inspect ./nowhere": "there is no directory ./nowhere",
    "demo --samples 0": "samples must be 1 or more",
    "prune demo out --sparsity 0.5 --pattern 2:4": "not both",
    "prune demo out --sparsity 0.5 --solver xyzzy": "known: magnitude, wanda, ria",
    "prune demo out --sparsity 0.5 --solver admm1:rho": "parameters are written admm1:NAME=VALUE",
    "prune demo out --sparsity 0.5 --length 1": "the length of windows must be 2 or more; got 1",
    "prune demo out --sparsity 0.5 --text-samples=-1": "got -1",
    "prune demo out --sparsity 0.5 --device meta": "the device 'meta' cannot be used",
    "prune demo out --sparsity 0.5 --device cpu:3": "'cpu:3' cannot be used; it is cpu, cuda, cuda:1 ... or auto",
    "prune demo out --sparsity 0.5 --solver=": "no solver is called ''",
    "prune demo out --sparsity 0.5 --effort=": "no effort is called ''",
    "prune demo out --sparsity 0.5 --calibration=": "cannot be used as a path: it is empty",
    "prune demo out --sparsity 0.5 --seed 9223372036854775808": "seed must be less than 2^63",
    "prune demo out --sparsity 0.5 --max-memory much": "invalid size 'much'; try 8GiB or 500MB",
    "prune demo out --sparsity 0.5 --blocks=-1:1": "invalid range '-1:1'",
    "prune demo out --sparsity 0.5 --length 4k": "'4k' is not a whole number; did you mean 4000 or 4096?",
    "eval demo --samples 1,000": "'1,000' is not a whole number; did you mean 1000?",
    "eval demo --samples 2.5": "'2.5' is not a whole number (see",
    "demo --samples few": "'few' is not a whole number (see",
    "generate demo hello --temperature 70%": "'70%' is not a number (see",
    "prune demo out --order middle": "'--order': 'middle' is not one of 'first', 'random'",
    "help prnue": "Did you mean 'prune'?",
    "heal demo out --teacher demo --own-text 25": "got 25; did you mean 0.25 (25 %)?",
    "compare demo -o out --max-time 5": "invalid time '5'; did you mean 5m or 5h?",
    "prune": "Missing argument 'MODEL'. (see niwaki prune --help)",
    "prune demo": "Missing argument 'OUT'. (see niwaki prune --help)",
    "prune demo out --sparsty 0.5": "No such option: --sparsty (Possible options: --sparsity) (see",
    "prune demo out --sparsity 0.5 --tf32 sometimes": "'sometimes' is not one of 'auto', 'always', 'never' (see niwaki",
    "prune demo out extra --sparsity 0.5": "in quotes if it has blanks (see niwaki prune --help)",
    "prune demo out --solver wanda+nosuch --sparsity 0.5": "no solver is called 'nosuch'",
    "prune demo out --sparsity 0.5 --effort best:epoch=3": "no parameter of best is called 'epoch'; did you mean",
    "quantize demo out int4:0": "got groups of 0",
    "quantize demo out int8 --embeddings 8": "'8' is not a valid grid",
    "shrink demo out --parameters 3": "such as 0.75, 75% or 110M; got '3'",
    "heal demo out --teacher demo --own-text 1": "own_text is a fraction, from 0 to below 1; got 1",
    "purge": "Did you mean 'prune'? (see niwaki --help)",
    "compare demo": "Missing option '-o' / '--out'. (see niwaki compare --help)",
    "compare demo -o out --keep yes": "in quotes if it has blanks (see niwaki compare --help)",
    "compare demo -o out --max-memory much": "invalid size",
    "generate demo hello --temperature nan": "token each time, or 0.001 or more; got nan",
    "generate demo hello --temperature 1e-300": "the temperature must be 0, for the most likely token each time, or",
    "generate demo hello --temperature inf": "got inf",
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    place = tmp_path_factory.mktemp("refused")
    (place / "full").mkdir()
    (place / "empty").mkdir()
    (place / "full" / "x").write_text("x")
    (place / "smollm2").mkdir()
    (place / "smollm2" / "config.json").write_text("{}")
    (place / "binary.txt").write_bytes(b"\xff\xfe\x00\x01")
    (place / "bad.jsonl").write_text("no JSON")
    given = json.dumps([shlex.split(line) for line in _REFUSED])
    how: dict[str, Any] = {"cwd": place, "env": {**os.environ, "HF_HUB_OFFLINE": "1"}}
    ran = subprocess.run([sys.executable, "-c", _EACH], input=given, capture_output=True, text=True, **how)
    assert ran.returncode == 0, ran.stderr
    assert sorted(path.name for path in place.iterdir()) == ["bad.jsonl", "binary.txt", "empty", "full", "smollm2"]
    return dict(zip(_REFUSED, json.loads(ran.stdout), strict=True))


@pytest.mark.parametrize("line", _REFUSED)
def test_refused_without_torch(refusals: dict[str, tuple[int, str, str]], line: str) -> None:
    code, out, err = refusals[line]
    assert code == (1 if re.search(r" empty |\w\.(txt|jsonl)$", line) else 2)  # 1 is for what files have or not
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert _REFUSED[line] in err


def test_a_stage_that_trains_on_so_many_times_the_tokens_of_another() -> None:
    check({"stages": ["prune 0.5", "heal tokens=0.5x", "heal tokens=2M"]})


def test_names_of_stages() -> None:
    assert [*FIRST_PARAMETERS] == [*STAGES]
