"""What docs/tutorial.md says can be done: each of its commands, with a small model in the place of the large one."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import tutorial

from niwaki.evaluation import bench as measuring
from support.command import Command
from support.llama_cpp import LLAMA_CPP
from support.models import save_some_of_the_embedded
from support.scripts import run_script

PAGE = tutorial.PAGE.read_text(encoding="utf-8")
#: Of each thing that takes long, less.
LESS = {
    "--samples 16 --length 512": "--samples 2 --length 32 --text-samples 2",
    "--max-time 10m": "--tokens 1k --length 32 --text-samples 2",
    "--limit 100": "--limit 2",
    "--tokens 40": "--tokens 4",
    "niwaki bench ": "niwaki bench --prompt-tokens 8 --tokens 2 --repeats 1 ",
    "max_steps=24": "max_steps=2",
    "max_new_tokens=40": "max_new_tokens=4",
}
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def _less(text: str) -> str:
    for much, little in LESS.items():
        text = text.replace(much, little)
    return text


def test_there_is_less_of_all_that_takes_long() -> None:
    assert [much for much in LESS if much not in PAGE] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the programs are the reader's, and run under his filters
def test_the_commands_run(niwaki_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring, "measured", measuring.measure)  # in this process, which has all loaded
    save_some_of_the_embedded(Path("smollm2"))
    Path("smollm2", "chat_template.jinja").write_text(CHAT)
    for name, program in tutorial.files(PAGE).items():
        Path(name).write_text(_less(program))
    made = tutorial.commands(PAGE)
    assert {command.split()[0] for command in made} == {"niwaki", "python", "node"}
    for command in made:
        match shlex.split(_less(command)):
            case "niwaki", *words:
                done = niwaki_(*words)
                assert done.code == 0, (words, done.err)
            case "python", name if name in tutorial.files(PAGE):
                assert run_script(tmp_path / name) is None
            case "node", *words if LLAMA_CPP.exists():
                if not os.path.lexists("node_modules"):
                    Path("node_modules").symlink_to(LLAMA_CPP)
                subprocess.run(["node", *words], check=True, capture_output=True, timeout=300)
    for name in tutorial.MODELS:
        found = tutorial.result(name, tmp_path)
        assert found["before"]
        assert found["speed"]
        assert found["task"]
