"""Text from a model, against a loop of single tokens; and what can go wrong around it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig

from niwaki import Compute
from niwaki.cli import main as cli
from niwaki.errors import CheckpointError, NumericalError
from niwaki.evaluation.generate import continue_text, generate
from support.command import Command
from support.forks import begun
from support.models import EMBEDDED, edit_json, message, reference, save_model_with_tokenizer

PROMPT = "The old man looked at"


@pytest.fixture(scope="module")
def given() -> tuple[Any, Any]:
    return reference(EMBEDDED, torch.float32), AutoTokenizer.from_pretrained(EMBEDDED)


@torch.no_grad()
def likeliest(model: Any, ids: list[int], count: int) -> list[int]:
    """``count`` tokens, each the most likely one after all before it."""
    found = list(ids)
    for _ in range(count):
        found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]


def inputs(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """What ``model`` is going to be given, each time."""
    seen: list[list[list[int]]] = []
    usual = model.generate

    def generate(given: Any, **options: Any) -> Any:
        seen.append(given.tolist())
        return usual(given, **options)

    monkeypatch.setattr(model, "generate", generate)
    return seen


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.slow
def test_text_ends_where_the_model_says(given: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    """Chat models have other ends than their tokenizer's, and more than one."""
    model, tokenizer = given
    made = likeliest(model, tokenizer.encode(PROMPT), 12)
    assert tokenizer.eos_token_id not in made
    end, own = made[6], model.generation_config.eos_token_id
    for ends, count in (([own, end] if several else end, made.index(end) + 1), (None, 12)):
        monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
        assert continue_text(model, tokenizer, PROMPT, 12) == tokenizer.decode(made[:count])


def test_pieces_make_the_text(given: tuple[Any, Any]) -> None:
    """Without the prompt; with as many tokens as were asked for."""
    model, tokenizer = given
    said: list[str] = []
    text = continue_text(model, tokenizer, PROMPT, 7, say=said.append)
    assert text == "".join(said) == tokenizer.decode(likeliest(model, tokenizer.encode(PROMPT), 7))
    assert len(said) > 2


@pytest.mark.parametrize("text", ["def f(x):\n    return x", "ねこがいる", "ไม่มีช่องว่าง", "1234567890", "a  b "])
def test_each_token_is_told_at_once(given: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A word, or a text of a script without spaces, does not wait for its end; only half a character waits."""
    model, tokenizer = given
    written = tokenizer.encode(text)

    def write(prompt: Any, streamer: Any, **_: Any) -> Any:
        streamer.put(prompt)
        for number, token in enumerate(written):
            streamer.put(torch.tensor([token]))
            whole = tokenizer.decode(written[: number + 1])
            assert "".join(said) == whole.rstrip(" \N{REPLACEMENT CHARACTER}")
        streamer.end()
        return torch.cat([prompt, torch.tensor([written])], dim=1)

    said: list[str] = []
    monkeypatch.setattr(model, "generate", write)
    assert continue_text(model, tokenizer, PROMPT, len(written), say=said.append) == "".join(said) == text


def test_the_tokenizers_end_where_the_model_has_none(given: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no word of the text."""
    model, tokenizer = given
    made = likeliest(model, tokenizer.encode(PROMPT), 12)
    other, said = AutoTokenizer.from_pretrained(EMBEDDED), list[str]()
    other.add_special_tokens({"eos_token": other.convert_ids_to_tokens(made[6])})
    assert other.eos_token_id == made[6]
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    text = continue_text(model, other, PROMPT, 12, say=said.append)
    assert text == "".join(said) == tokenizer.decode(made[: made.index(made[6])])


def test_texts_begin_as_the_tokenizer_has_it(given: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = given
    other = AutoTokenizer.from_pretrained(EMBEDDED)
    other.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    seen = inputs(model, monkeypatch)
    continue_text(model, other, PROMPT, 2)
    assert seen == [[[0, *tokenizer.encode(PROMPT)]]]


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}. {% endfor %}"
    "{% if add_generation_prompt %}He said{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a chat template."""
    path = shutil.copytree(EMBEDDED, tmp_path_factory.mktemp("chatty") / "model")
    edit_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    return path


def test_a_model_with_a_chat_template_answers(given: tuple[Any, Any], chatty: Path) -> None:
    """As what the template makes of a message is continued; with --raw the prompt itself."""
    model, tokenizer = given
    asked = f"user: {PROMPT}. He said"
    expected = tokenizer.decode(likeliest(model, tokenizer.encode(asked, add_special_tokens=False), 8))
    assert generate(chatty, PROMPT, tokens=8, compute=Compute("cpu", "float32")) == expected
    continued = tokenizer.decode(likeliest(model, tokenizer.encode(PROMPT), 8))
    assert generate(chatty, PROMPT, tokens=8, raw=True, compute=Compute("cpu", "float32")) == continued != expected


@pytest.mark.parametrize("raw", [False, True])
def test_an_answer_does_not_repeat_what_was_asked(raw: bool, chatty: Path, niwaki_: Command) -> None:
    ran = niwaki_("generate", chatty, PROMPT, "--tokens", 3, "--device", "cpu", *["--raw"] * raw)
    assert ran.code == 0
    assert ran.out.startswith(PROMPT) == raw


def test_a_chat_template_that_fails(chatty: Path, tmp_path: Path) -> None:
    path = shutil.copytree(chatty, tmp_path / "model")
    edit_json(path / "tokenizer_config.json", chat_template="{{ raise_exception('no users here') }}")
    said = message(lambda: generate(path, PROMPT, tokens=3), CheckpointError)
    assert "no users here; --raw continues it without" in said


@pytest.mark.slow
def test_of_a_long_prompt_the_end_counts(
    given: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As much of it as there are positions for, which is said."""
    model, tokenizer = given
    prompt = " ".join(str(number) for number in range(300))
    ids = tokenizer.encode(prompt)
    assert len(ids) > 256
    seen = inputs(model, monkeypatch)
    assert continue_text(model, tokenizer, prompt, 6) == tokenizer.decode(likeliest(model, ids[-250:], 6))
    assert seen == [[ids[-250:]]]
    assert f"of the {len(ids)} tokens of the prompt the last 250 are read" in caplog.text
    caplog.clear()
    continue_text(model, tokenizer, PROMPT, 2)
    assert not caplog.text


@torch.no_grad()
@pytest.mark.parametrize(("temperature", "seed"), [(1.0, 1), (2.5, 1), (2.5, 2)])
@pytest.mark.slow
def test_drawing(given: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, temperature: float, seed: int) -> None:
    """From all of the vocabulary, whatever the model's own settings are, and without a trace."""
    model, tokenizer = given
    ids = tokenizer.encode(PROMPT)
    generator = torch.Generator().manual_seed(seed)
    made: list[int] = []
    for _ in range(10):
        logits = model(torch.tensor([ids + made])).logits[0, -1]
        made.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
    end = model.generation_config.eos_token_id
    settings = GenerationConfig(do_sample=True, top_k=2, repetition_penalty=0.1, eos_token_id=end)
    monkeypatch.setattr(model, "generation_config", settings)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert continue_text(model, tokenizer, PROMPT, 10, temperature=temperature, seed=seed) == tokenizer.decode(made)
    assert model.generation_config is settings
    assert continue_text(model, tokenizer, PROMPT, 10) == tokenizer.decode(likeliest(model, ids, 10))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("error", [BrokenPipeError(), UnicodeEncodeError("ascii", "é", 0, 1, "no"), KeyError(1)])
def test_errors_of_the_listener_are_its_own(given: tuple[Any, Any], error: Exception) -> None:
    def say(text: str) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        continue_text(*given, PROMPT, 3, say=say)
    assert caught.value is error


def test_errors_of_the_model(given: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*_: object, **__: object) -> None:
        raise KeyError("cache")

    monkeypatch.setattr(given[0], "generate", generate)
    said = message(lambda: continue_text(*given, PROMPT, 3, say=print), CheckpointError)
    assert said == "the model generates no text: 'cache'"


def test_a_tokenizer_of_another_model(given: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given[0].config, "vocab_size", 10)
    assert "is it the model's own tokenizer?" in message(lambda: continue_text(*given, PROMPT, 3))


def test_settings_that_transformers_refuses(tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path / "model")
    for content in ("{", "[]", '{"max_new_tokens": "x"}', '{"max_new_tokens": -1, "do_sample": []}'):
        (model / "generation_config.json").write_text(content)
        said = message(lambda: generate(model, PROMPT, tokens=3), CheckpointError)
        assert "generation_config.json is refused by transformers: " in said


def test_control_codes_of_a_model_are_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal, shown in ((True, "a\\x1bb\n"), (False, "a\x1bb\n")):
        monkeypatch.setattr(sys, "argv", ["niwaki", "generate", "demo", "a"])
        monkeypatch.setattr("niwaki.evaluation.generate.continue_text", lambda *_, say, **__: say("\x1bb"))
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        with pytest.raises(SystemExit):
            cli.main()
        assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((PROMPT, "--seed", "-1"), "the seed must be 0 or more; got -1"),
        ((PROMPT, "--seed", str(2**63)), "seed must be less than 2^63"),
        (("bad \udcff",), "the prompt 'bad \\udcff' is not valid Unicode text"),
        ((PROMPT, "--tokens", "256"), "256 tokens are more than the 256 positions"),
    ],
)
@pytest.mark.slow
def test_what_is_refused(options: tuple[str, ...], said: str, niwaki_: Command) -> None:
    """Without a word of the prompt."""
    ran = niwaki_("generate", "demo", *options)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert said in ran.err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no forks")
def test_a_reader_that_goes_away() -> None:
    """As with ``| head -c 5``: no word about it."""
    reader, writer = os.pipe()
    arguments = ["generate", "demo", PROMPT, "--tokens", "100", "--device", "cpu"]
    running = begun(arguments, before=lambda: os.close(reader), out=writer)
    os.close(writer)
    assert os.read(reader, 5) == b"The o"
    os.close(reader)
    ended = running.ended()
    assert ended.code == 1
    assert set(ended.err.splitlines()) == {"loading demo"}  # again where that takes half a minute


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
@torch.no_grad()
def test_outputs_that_are_no_numbers(factor: float, temperature: float, given: tuple[Any, Any]) -> None:
    """Of these the most likely one would be the first token of all."""
    _, tokenizer = given
    model = reference(EMBEDDED, torch.float32)
    model.get_output_embeddings().weight.mul_(factor)
    said = message(lambda: continue_text(model, tokenizer, PROMPT, 3, temperature=temperature), NumericalError)
    assert said == "the model's outputs are NaN or infinite; try --dtype float32"


def test_a_configuration_that_is_no_object(tmp_path: Path) -> None:
    """Here the tokenizer is read first, whose library would speak of something else."""
    model = save_model_with_tokenizer(tmp_path / "model")
    (model / "config.json").write_text("[]")
    assert "config.json does not hold a JSON object" in message(lambda: generate(model, PROMPT), CheckpointError)
