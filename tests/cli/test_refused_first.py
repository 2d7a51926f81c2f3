"""What names, options, configurations and texts say is refused before any weights are read, by all commands."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from niwaki.checkpoints.reading import Checkpoint
from niwaki.models.streamed import StreamedModel
from niwaki.options import Compute, Measurement
from niwaki.recipes import prune, quantize
from support.command import Command
from support.models import FEW_TOKENS, add_small_tokenizer, edit_json, random_model
from support.runs import listing

WORDS = "the old man looked at the sea and the boat "
#: Texts of the options of all commands: long enough; and of about 60 tokens, too few for one window.
TEXTS = {"long.txt": WORDS * 2000, "short.txt": WORDS * 4, "p.jsonl": '{"prompt": "the sea"}\n', "nul.txt": "a\0"}
#: By the command what it says. Models: ``model`` is a LLaMA with a tokenizer, and ``odd`` has rows of 48.
REFUSED = {
    # names of outputs
    "compress model out.gguf --size 0.6 --for llama.cpp": "give it a name without .gguf, such as out",
    "compress model out.gguf --loss 0.5 --for ollama": "give it a name without .gguf, such as out",
    "run model out.gguf -s 'quantize int4:16' -s 'export gguf-q4_0'": "give it a name without .gguf",
    "prune model out.gguf --sparsity 0.5": "give it a name without .gguf",
    "compress model full --size 0.6": "full exists and is not an empty directory",
    "prune model model/out --sparsity 0.5": "is inside the model's own directory",
    "prune model full/x --sparsity 0.5": "full/x exists and is not an empty directory",
    "shrink model model/out --blocks 1": "is inside the model's own directory",
    "shrink model full --blocks 1": "full exists and is not an empty directory",
    "inspect full/x": "full/x is a file; a model is a directory",
    "heal pruned model/x --teacher model": "is inside model, which the run reads",
    # texts that are too short, to calibrate on and to measure on
    "prune model out --sparsity 0.5 --calibration short.txt": "short.txt is too short",
    "prune model out --sparsity 0.5 --calibration long.txt --samples 999": "long.txt is too short",
    "prune model out --sparsity 0.5 --calibration long.txt --text short.txt": "short.txt is too short",
    "prune model out --sparsity 0.5 --calibration nul.txt": "nul.txt is not text: it has NUL characters",
    "prune model out --sparsity 0.5 --text nul.txt": "it has NUL characters",
    "quantize model out int4:16 --calibration long.txt --text short.txt": "short.txt is too short",
    "quantize model out int8 --text short.txt": "short.txt is too short",
    "shrink model out --blocks 1 --calibration long.txt --text short.txt": "short.txt is too short",
    "shrink model out --vocabulary 0.1 --calibration long.txt --text short.txt": "short.txt is too short",
    "heal pruned out --teacher model --calibration long.txt --text short.txt": "short.txt is too short",
    "heal pruned out --teacher model --calibration short.txt": "short.txt has only 0 random windows",
    "run model out -s 'prune 0.5' -s heal -s pack --calibration long.txt --text short.txt": "short.txt is too short",
    "compress model out --size 0.3 --calibration long.txt --text short.txt": "short.txt is too short",
    "compress model out --size 0.3 --calibration short.txt": "short.txt is too short",
    "compress model out --size 0.45 --for llama.cpp --calibration long.txt --text short.txt": "short.txt is too short",
    "compress model out --parameters 0.95 --calibration long.txt --text short.txt": "short.txt is too short",
    "compress model out --loss 0.5 --calibration long.txt --also short.txt": "short.txt is too short",
    "compress model out --loss 0.5 --calibration long.txt --text short.txt": "short.txt is too short",
    "compress model out --speed 1.1 --calibration long.txt --text short.txt": "short.txt is too short",
    "compare model -o out --calibration long.txt --text short.txt": "short.txt is too short",
    "eval model --text short.txt": "short.txt is too short",
    # answers are written once all else is known to be right
    "prune chat out --sparsity 0.5 --calibration p.jsonl --answers own --text short.txt": "short.txt is too short",
    "run chat out -s 'prune 0.5' -s 'export gguf-q8_0' --calibration p.jsonl --answers own": "cannot be exported",
    # solvers, groups, patterns and ranges that do not fit
    "prune model out --sparsity 0.5 --solver admm1:roh=1": "no parameter of admm1 is called 'roh'; did you mean rho?",
    "prune model out --sparsity 0.5 --solver admm1:rho=big": "rho='big': admm1 wants float here",
    "prune model out --sparsity 0.5 --solver admm1:rho=-1": "rho must be above 0; got -1",
    "prune model out --sparsity 0.5 --length 129": "129 is more than the model's 128 positions",
    "quantize model out int4:24 --calibration short.txt": "24",
    "prune model out --pattern 3:7 --calibration short.txt": "the pattern 3:7 needs",
    "prune model out --sparsity 0.5 --blocks 0:9 --calibration short.txt": "the model's are 0:3",
    "shrink model out --blocks 9 --calibration short.txt": "from 0 to 2 can be removed",
    "run model out -s 'prune 0.5' -s 'quantize int4:24' --calibration short.txt": "stage 2, quantize",
    "run model out -s 'quantize int4:16' -s pack --calibration short.txt": "would hardly be smaller packed",
    "run model out -s 'quantize q4_0' -s export --calibration short.txt": "a type of llama.cpp's",
    "bench model": "128 + 32 tokens are more than the 128 positions of the model",
    "run model out -s 'prune 0.5' -s 'embeddings int8:24' --calibration short.txt": "stage 2, embeddings",
    "compress odd out --size 0.3 --for llama.cpp --calibration short.txt": "do not divide into groups of 32",
    "compress odd out --loss 0.3 --for llama.cpp --calibration short.txt": "do not divide into groups of 32",
    "compare model -o out --solvers wanda,wanda@best:allocation=error --sparsity 2:4 --calibration short.txt": "short",
    # two factors, which stay such
    "compress factors out --size 0.3 --calibration short.txt": "was pruned to two factors",
    "compress factors out --size 0.45 --for llama.cpp --calibration short.txt": "was pruned to two factors",
    "quantize factors out int4 --calibration short.txt": "was pruned to two factors",
    "run model out -s 'prune two-factors:0.5' -s 'quantize int8' --calibration short.txt": "of two sparse factors",
    "run model out -s 'prune two-factors:0.5' -s export --calibration short.txt": "two sparse factors",
    # what only later stages or other programs cannot have
    "run model out -s 'shrink blocks=1' -s 'heal method=blocks' --calibration short.txt": "stage 2, heal",
    "run neox out -s 'quantize int4' -s 'export gguf-q4_0' --calibration short.txt": "cannot be exported to GGUF",
    "run gpt2 out -s 'quantize int4' -s export --calibration short.txt": "it is stored the other way around",
    "compress neox out --size 0.45 --for llama.cpp --calibration short.txt": "cannot be exported to GGUF",
    "export neox out --format gguf-q8_0": "cannot be exported to GGUF",
    "export model out": "has no weights on a grid",
    "export gpt2-int4 out": "it is stored the other way around",
    "pack model full": "full exists and is not an empty directory",
    "push pruned me/small": "say which model of the hub this was made from",
    "generate model hello --device cuda:77": "cannot be used",
    "report pruned -o model": "it is a directory",
    "bench model --prompt-tokens 8 --device cuda:77": "cannot be used",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all models and texts."""
    place = tmp_path_factory.mktemp("first")
    for name, text in TEXTS.items():
        (place / name).write_text(text)
    (place / "full").mkdir()
    (place / "full" / "x").write_text("x")
    wide: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 3}
    models = {
        "model": ("llama", wide),
        "odd": ("llama", {}),
        "neox": ("gpt_neox", {"intermediate_size": 64}),
        "gpt2": ("gpt2", {}),
    }
    for name, (case, sizes) in models.items():
        random_model(case, vocab_size=FEW_TOKENS, **sizes).save_pretrained(place / name)
        add_small_tokenizer(place / name)
    for name, like in {"chat": "neox", "factors": "model"}.items():
        shutil.copytree(place / like, place / name)
    edit_json(place / "chat" / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    edit_json(place / "factors" / "config.json", pruning_config={"library": "niwaki", "pattern": "two-factors:0.5"})
    nothing: dict[str, Any] = {"measurement": Measurement(samples=0), "compute": Compute("cpu")}
    prune(place / "model", place / "pruned", 0.5, solver="magnitude", calibration=torch.zeros(1, 8).long(), **nothing)
    quantize(place / "gpt2", place / "gpt2-int4", "int4", effort="none", **nothing)
    return place


@pytest.mark.parametrize("line", REFUSED)
def test_refused_before_anything_is_computed(
    place: Path, line: str, niwaki_: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read, or blocks run")

    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for owner, names in ((Checkpoint, ["read"]), (StreamedModel, ["embed", "stream", "whole", "target_states"])):
        for name in names:
            monkeypatch.setattr(owner, name, computed)
    before = listing(place)
    ran = niwaki_(*shlex.split(line))
    assert ran.code in (1, 2), ran
    assert REFUSED[line] in ran.err
    assert ran.err.splitlines()[-1].startswith("error: ")
    assert listing(place) == before


def test_all_commands_and_stages_are_among_them() -> None:
    commands = {line.split()[0] for line in REFUSED}
    assert commands >= {"prune", "quantize", "shrink", "heal", "run", "compress", "compare", "eval", "export", "pack"}
    assert commands >= {"push", "generate", "report", "bench"}
    assert all(any(f"-s {name}" in line or f"'{name}" in line for line in REFUSED) for name in ("prune", "quantize"))
    assert all(any(f"--for {name}" in line for line in REFUSED) for name in ("llama.cpp", "ollama"))
