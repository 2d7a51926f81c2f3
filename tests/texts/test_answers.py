"""A model's own answers: against what transformers' own greedy search answers to each prompt alone."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from huggingface_hub import cached_assets_path
from torch import Tensor
from transformers import AutoTokenizer

import niwaki
from niwaki import Calibration, Measurement
from niwaki.errors import CalibrationError, UnsupportedModelError, UsageError
from niwaki.models.processes import World
from niwaki.models.tokens import encode, load_tokenizer
from niwaki.records.progress import Progress
from niwaki.texts import own, rows
from niwaki.texts.own import with_answers
from niwaki.texts.sources import read_prompts
from niwaki.texts.texts import read_windows
from niwaki.windows import Windows
from support.command import Command
from support.models import FEW_TOKENS, edit_json, message, random_model, reference, save_model_with_few_tokens
from support.streams import stream_of
from support.threads import in_threads

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LENGTH = 64
ASKED = ["What is a tree?", "Why?", "Say how an old oak is told from a young one.", "Count to three."]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "assets"
    monkeypatch.setattr("niwaki.files.cached_assets_path", functools.partial(cached_assets_path, assets_dir=place))
    return place


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Of whose tokens one in eight ends an answer."""
    path = save_model_with_few_tokens(tmp_path / "model")
    edit_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    edit_json(path / "generation_config.json", eos_token_id=list(range(1, FEW_TOKENS, 8)))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return written(tmp_path / "prompts.jsonl", [{"prompt": text} for text in ASKED])


def written(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def given(model: Path, source: str, samples: int = 3, **others: Any) -> Windows:
    world, progress = others.pop("world", World()), others.pop("progress", Progress())
    budget, stream = others.pop("budget", None), others.pop("stream", None) or stream_of(model)
    calibration = Calibration(source, samples=samples, length=LENGTH, answers="own", **others)
    windows = with_answers(stream, calibration, budget, world, progress).text
    assert isinstance(windows, Windows)
    return windows


def templated(model: Path, text: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(model)(f"user: {text}\nassistant:")["input_ids"]
    return ids


@pytest.mark.slow
def test_answers_are_those_of_each_prompt_alone(model: Path, prompts: str) -> None:
    """Though they are written together, with what prompts lack in length on their left; drawn as the maker wants."""
    random_model("llama", vocab_size=FEW_TOKENS).save_pretrained(model)  # which hears what was said before
    ends = set(range(1, FEW_TOKENS, 8))
    edit_json(model / "generation_config.json", do_sample=True, top_k=1, eos_token_id=sorted(ends))
    whole = reference(model)
    conversations = []
    for text in ASKED:
        ids = templated(model, text)
        settings = {"do_sample": False, "max_length": LENGTH, "eos_token_id": sorted(ends), "pad_token_id": 0}
        conversations.append(cast("Any", whole).generate(torch.tensor([ids]), **settings)[0].tolist())
    expected, window = [], list[int]()
    for turn in range(100):
        window = window + conversations[turn % len(conversations)]
        if len(window) >= LENGTH:
            expected.append(window[:LENGTH])
            window = []
    windows = given(model, prompts, 5)
    assert windows.tokens.tolist() == expected[:5]
    assert windows.source == f"own answers to {prompts}"
    assert "drawn with temperature 1, top-p 1, top-k 1;" in windows.origin


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "temperature 0.7, top-p 0.95"),
        ({"temperature": 0.2}, "temperature 0.7, top-p 0.95"),  # which it has not by itself
        ({"do_sample": True}, "temperature 1, top-p 1"),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9}, "temperature 0.6, top-p 0.9, top-k 20"),
        ({"do_sample": True, "temperature": 0, "top_k": -1, "top_p": 7}, "temperature 1, top-p 1"),
        ({"do_sample": True, "temperature": "warm", "top_k": True, "top_p": None}, "temperature 1, top-p 1"),
    ],
)
@pytest.mark.slow
def test_how_answers_are_drawn(model: Path, prompts: str, settings: dict[str, Any], said: str) -> None:
    edit_json(model / "generation_config.json", **settings)
    assert f"in its chat template, drawn with {said}; a window" in given(model, prompts, 1).origin


@pytest.mark.slow
def test_draws(model: Path, prompts: str, kept: Path) -> None:
    """Others for another seed, the same for the same one, and each prompt several times with other answers."""
    first, again, other = given(model, prompts), given(model, prompts), given(model, prompts, seed=1)
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)
    many = given(model, prompts, 30).tokens
    assert torch.equal(many[:3], first.tokens)
    assert len({tuple(row.tolist()) for row in many}) == 30
    begins = templated(model, ASKED[0])
    assert sum(row[: len(begins)].tolist() == begins for row in many) > 3


@pytest.mark.slow
def test_what_was_written_before(model: Path, prompts: str, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is read, also by a run that wants more, and written again where it is damaged."""
    first = given(model, prompts)
    files = sorted(kept.rglob("*.json"))
    assert files
    with monkeypatch.context() as patch:
        patch.setattr(own, "continued", None)
        assert torch.equal(given(model, prompts).tokens, first.tokens)
    whole = [file.read_bytes() for file in files]
    wrong = [json.dumps([[value]] * 32).encode() for value in (FEW_TOKENS, True)]
    for content in (b"", b"[[1, 2", b"[]", *wrong):
        files[0].write_bytes(content)
        assert torch.equal(given(model, prompts).tokens, first.tokens)
        assert [file.read_bytes() for file in files] == whole
    edit_json(model / "config.json", rms_norm_eps=0.1)  # another model
    assert not torch.equal(given(model, prompts).tokens, first.tokens)


@pytest.mark.slow
def test_where_nothing_can_be_kept(model: Path, prompts: str, tmp_path: Path, kept: Path) -> None:
    expected = given(model, prompts)
    for file in sorted(kept.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    kept.rmdir()
    kept.write_text("no directory")
    windows = given(model, prompts)
    assert torch.equal(windows.tokens, expected.tokens)
    assert [note.partition(":")[0] for note in windows.notes if note not in expected.notes] == [
        "the model's answers could not be saved for another run"
    ]


def test_processes_share_the_work(model: Path, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "_TOGETHER", 2)
    # Threads share the generator of random numbers, which processes do not.
    monkeypatch.setattr(
        own, "continued", lambda _, prompts, *__: torch.cat([prompts, prompts[:, -5:] % 8 * 3, prompts * 0 + 1], 1)
    )
    expected = given(model, prompts, 4).tokens
    monkeypatch.setattr(own._Writer, "_kept", lambda *_: None)
    streams = [stream_of(model) for _ in range(2)]

    def do(world: World) -> Tensor:
        return given(model, prompts, 4, world=world, stream=streams[world.rank]).tokens

    for found in in_threads(2, do):
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_notes(model: Path, prompts: str) -> None:
    edit_json(model / "generation_config.json", eos_token_id=None)
    edit_json(model / "tokenizer_config.json", eos_token=None)
    windows = given(model, prompts, 2)
    assert windows.notes == (
        f"32 of the 32 answers that the model wrote had not ended at {LENGTH} tokens and were cut off",
    )
    edit_json(model / "generation_config.json", eos_token_id=[*range(FEW_TOKENS)])
    assert message(lambda: given(model, prompts, 2), CalibrationError) == (
        f"the model answers none of the prompts of {prompts}; calibrate on a text"
    )


def test_prompts(tmp_path: Path) -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    lines = [{"prompt": "Why?"}, {"messages": talk}, {"messages": [*talk, {"role": "assistant", "content": "Bye."}]}]
    expected = [[{"role": "user", "content": "Why?"}], talk, talk]
    assert read_prompts(written(tmp_path / "p.jsonl", lines)) == (expected, 1)
    shipped, answered = read_prompts("answers")
    assert not answered
    assert len(shipped) == 200
    assert len({json.dumps(each) for each in shipped}) == 200
    assert all(each[-1]["role"] == "user" and all(turn["content"].strip() for turn in each) for each in shipped)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"text": "once"}, "line 1: neither a field 'prompt' that is text nor 'messages'"),
        ({"prompt": " "}, "line 1: neither a field 'prompt' that is text nor 'messages'"),
        ({"prompt": 3}, "line 1: neither a field 'prompt' that is text nor 'messages'"),
        ({"messages": [{"role": "user"}]}, "line 1: not a message with a role and a content that is text"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "line 1: there is nothing to answer"),
        (["Why?"], "entry 1: neither a field 'prompt' that is text nor 'messages'"),
    ],
)
def test_no_prompts(tmp_path: Path, line: Any, said: str) -> None:
    source = written(tmp_path / "p.jsonl", [line])
    assert said in message(lambda: read_prompts(source), CalibrationError)


@pytest.mark.slow
def test_what_makes_no_sense(model: Path, prompts: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "text.txt").write_text("Why?")
    for source, said in (
        (str(tmp_path / "empty.jsonl"), "has no prompts"),
        (str(tmp_path / "text.txt"), "has no prompts; give a file of rows"),
        ("demo", "has no prompts; give a file of rows"),
        (written(tmp_path / "long.jsonl", [{"prompt": "why " * 40}]), "prompt 1 of"),
    ):
        assert said in message(lambda source=source: given(model, source), CalibrationError)  # type: ignore[misc]
    assert "do not fit in memory" in message(lambda: given(model, prompts, budget=1), CalibrationError)
    for template, said in (
        (None, "has no chat template"),
        ("{{ 1 / 0 }}", f"prompt 1 of {prompts}: the model's chat template fails: "),
        ("{% if %}", f"prompt 1 of {prompts}: the model's chat template fails: "),
        ("{{ '' }}", "the model's chat template makes nothing of the prompts"),
    ):
        edit_json(model / "tokenizer_config.json", chat_template=template)
        assert said in message(lambda: given(model, prompts), CalibrationError)
    with pytest.raises(UsageError, match="answers are written to prompts in a file"):
        Calibration(torch.zeros(1, 2, dtype=torch.int64), answers="own")
    with pytest.raises(UsageError, match=r"such as --calibration prompts\.jsonl; got 'c4'"):
        Calibration(answers="own")  # of no file


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "does not end within"),
        ("{% if messages[0].content == 'Why?' %}{{ 'a' * 10**10 }}{% else %}a{% endif %}", "more than 1 GiB"),
        ("{{ 'a' * 1100000 }}", "makes 1,100,000 characters"),
        ("a" * 1100000, "has 1,100,000 characters"),
    ],
)
@pytest.mark.slow
def test_templates_without_end(
    model: Path, prompts: str, monkeypatch: pytest.MonkeyPatch, template: str, said: str
) -> None:
    monkeypatch.setattr(rows, "_SECONDS", 1)
    edit_json(model / "tokenizer_config.json", chat_template=template)
    text = message(lambda: given(model, prompts), CalibrationError)
    assert f"prompt {2 if 'Why' in template else 1} of {prompts}: the model's chat template fails: " in text
    assert said in text


@pytest.mark.slow
def test_texts_are_those_that_transformers_makes(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chats = [[{"role": "user", "content": text}] for text in (" Why? ", "é \"'\\ {{ x }} 😀\n", "")]
    for ask in (True, False):
        options: dict[str, Any] = {"chat_template": template, "add_generation_prompt": ask}
        theirs = [tokenizer.apply_chat_template(chat, tokenize=False, **options) for chat in chats]
        ours = rows.rendered(template, chats, tokenizer.special_tokens_map, ask=ask)
        assert ours == theirs
        again = [rows.verbatim(text) for text in ours]
        assert [tokenizer.apply_chat_template(chats[0], chat_template=one, tokenize=False) for one in again] == ours
    ids = tokenizer.apply_chat_template(chats[0], chat_template=template, add_generation_prompt=True, return_dict=False)
    edit_json(model / "tokenizer_config.json", chat_template=template)
    text = rows.rendered(template, chats[:1], tokenizer.special_tokens_map, ask=True)[0]
    assert encode(AutoTokenizer.from_pretrained(model), text) == ids


@pytest.mark.slow
def test_a_model_that_cannot_generate(model: Path, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("not this one")

    monkeypatch.setattr("transformers.GenerationMixin.generate", refuse)
    said = message(lambda: given(model, prompts), UnsupportedModelError)
    assert said == "transformers cannot generate text with this model (not this one)"


# In runs


@pytest.mark.slow
def test_prune(model: Path, prompts: str, tmp_path: Path, niwaki_: Command) -> None:
    small = ("--samples", "3", "--length", str(LENGTH), "--text", "demo-held", "--text-samples", "2")
    said = niwaki_(
        *("prune", model, tmp_path / "out", "--sparsity", "0.5", "--calibration", prompts, "--answers", "own", *small)
    )
    assert (said.code, said.err) == (0, "")
    assert "calibration: 3 x 64 tokens of own answers" in said.out
    record = niwaki.Record.load(tmp_path / "out" / "niwaki.json")
    assert record.calibration["source"] == f"own answers to {prompts}"
    assert record.calibration["tokens_sha256"] == given(model, prompts).fingerprint()
    said = niwaki_("prune", model, tmp_path / "other", "--sparsity", "0.5", "--calibration", prompts, *small)
    assert said.code == 1
    assert said.err.endswith("for the model's own answers to prompts, --answers own\n")


@pytest.mark.slow
def test_compare(model: Path, prompts: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "solvers": "wanda",
        "patterns": 0.5,
        "calibration": Calibration(prompts, samples=3, length=LENGTH, answers="own"),
        "measurement": Measurement("demo-held", samples=2),
    }
    found = niwaki.compare(model, tmp_path / "out", **asked)
    assert found.calibration["source"] == f"own answers to {prompts}"
    assert niwaki.compare(model, tmp_path / "out", **asked).cells == found.cells


@pytest.mark.slow
def test_answers_and_a_text(model: Path, prompts: str, tmp_path: Path, niwaki_: Command) -> None:
    small = ("--samples", "4", "--length", str(LENGTH), "--text", "demo-held", "--text-samples", "2")
    texts = ("--calibration", prompts, "--calibration", "demo", "--answers", "own")
    said = niwaki_("prune", model, tmp_path / "out", "--sparsity", "0.5", *texts, *small)
    assert (said.code, said.err) == (0, "")
    assert f"calibration: 4 x 64 tokens of own answers to {prompts} + demo" in " ".join(said.out.split())
    record = niwaki.Record.load(tmp_path / "out" / "niwaki.json")
    demo = read_windows("demo", load_tokenizer(model), LENGTH, 2).tokens
    mixed = torch.stack([given(model, prompts, samples=2).tokens, demo], 1).view(4, LENGTH)
    assert record.calibration["tokens_sha256"] == Windows(mixed, "").fingerprint()


def test_a_note_for_models_that_chat(model: Path, tmp_path: Path) -> None:
    said = "this model has a chat template"
    for text, noted in (("demo", True), (torch.zeros(2, 32, dtype=torch.int64), False)):
        asked = Calibration(text, samples=2, length=32)
        record = niwaki.prune(model, tmp_path / f"out{noted}", 0.5, solver="wanda", calibration=asked, measurement=None)
        assert any(note.startswith(said) for note in record.notes) == noted
