"""What llama.cpp computes otherwise than transformers is refused before a byte is written, or said."""

from __future__ import annotations

import json
import math
import unicodedata
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import niwaki
from niwaki.errors import UnsupportedModelError
from niwaki.models.gguf import SPLITTINGS
from support.covering import in_turns
from support.llama_cpp import LLAMA_CPP, ask
from support.models import (
    EMBEDDED_VOCABULARY,
    add_tokenizer,
    edit_json,
    message,
    random_model,
    save_model_with_tokenizer,
    text_template,
)
from support.small_tokenizers import SPACES, save_with_pieces

gguf: Any = pytest.importorskip("gguf")
formulas: Any = pytest.importorskip("support.gguf_formulas")

TEXT = "It's 1984: WE'LL see 12345 <x  and\n\n \tGröße</s> 東京"


def saved(path: Path, case: str, **changes: Any) -> Path:
    random_model(case, vocab_size=EMBEDDED_VOCABULARY, **changes).save_pretrained(path)
    return add_tokenizer(path)


def refusal(source: Path) -> str:
    out = source.parent / "model.gguf"
    said = message(lambda: niwaki.export(source, out, "gguf-f16"), UnsupportedModelError)
    assert [path.name for path in source.parent.iterdir()] == [source.name]
    return said


def exported(source: Path) -> tuple[Any, list[str]]:
    """A file of the model, by the formulas, and what there was to say of it."""
    out = source.parent / "model.gguf"
    notes = niwaki.export(source, out, "gguf-f16")
    return formulas.File(out), notes


def splits_alike(file: Any, source: Path) -> bool:
    same: bool = file.split(TEXT) == AutoTokenizer.from_pretrained(source)(TEXT).input_ids
    return same


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **values}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=2.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("mistral", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("qwen2", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh'"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers is [1]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("qwen2", {"head_dim": 16}, "4 heads of 16 are not as wide as the model (32)"),
        ("llama", {"is_causal": False}, "is_causal is False"),
        ("llama", {"attention_chunk_size": 4}, "attention_chunk_size is 4"),
        ("gemma2", {"rope_parameters": YARN}, "'yarn'"),
        ("qwen3", {"rope_parameters": {**YARN, "beta_fast": 2.0}}, "'yarn'"),
        ("llama", {"rope_parameters": rope("dynamic", factor=2.0)}, "'dynamic'"),
        ("smollm3", {"rope_parameters": LLAMA3}, "'llama3'"),
        ("olmo3", {"rope_parameters": {"full_attention": rope("default"), "sliding_attention": YARN}}, "'yarn'"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1, 0]}, "no_rope_layers is [1, 1, 1, 1, 0]"),
        ("gemma3_text", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar is 24"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping is None"),
        ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("phi3", {"head_dim": 16}, "not as wide as the model"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e39}}, "rope_theta is 1e+39"),
        ("llama", {"sliding_window": "x"}, "sliding_window is 'x'"),
        ("qwen3_5_text", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        ("qwen3_5_text", {"linear_value_head_dim": 16}, "2 heads of 8, and 6 of 16 for values"),
        ("qwen3_5_text", {"rope_parameters": {**rope("default"), "mrope_section": [8]}}, "mrope_section is [8]"),
    ],
)
@pytest.mark.slow
def test_configurations(tmp_path: Path, case: str, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(saved(tmp_path / "source", case, **changes))


OWN_LAYER = {"per_layer_config": {"0": {"num_key_value_heads": 1}}}


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        # By the name that transformers has for the number of experts, and does not look at.
        *(
            ("qwen3_moe", {"num_local_experts": value}, [f"num_local_experts is {value!r}"])
            for value in cast("tuple[Any, ...]", (None, "x", 1.5, [], {}, math.nan, True))
        ),
        ("qwen3_moe", {"num_experts_per_tok": 9}, ["num_experts_per_tok is 9", "num_experts is 4"]),
        *(
            (case, OWN_LAYER, ["per_layer_config is {", "'num_key_value_heads': 1}"])
            for case in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
        ),
        # What transformers' class knows and has no row here is refused unless it is the default.
        ("llama", {"is_encoder_decoder": True}, ["is_encoder_decoder is True"]),
    ],
)
def test_files_of_configurations(tmp_path: Path, case: str, changes: dict[str, Any], said: list[str]) -> None:
    source = saved(tmp_path / "source", case)
    edit_json(source / "config.json", **changes)
    found = refusal(source)
    assert all(part in found for part in said), found


@pytest.mark.parametrize(("case", "value"), in_turns(["llama", "mistral", "qwen2", "qwen3"], [1, 3, "x"]))
@pytest.mark.slow
def test_experts_of_models_that_have_none(tmp_path: Path, case: str, value: Any) -> None:
    """Families without experts do not read their number, and the file says nothing of it."""
    source = saved(tmp_path / "source", case)
    edit_json(source / "config.json", num_experts=value)
    file, _ = exported(source)
    assert not [key for key in file.keys if "expert" in key]


def test_a_key_that_is_unknown_to_transformers(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "llama")
    edit_json(source / "config.json", unsloth_fixed=True)
    exported(source)


@pytest.mark.parametrize(
    ("case", "changes", "length"),
    [
        ("mistral window", {}, 6),
        ("mistral", {"sliding_window": 1000}, 128),
        ("qwen2 window", {}, 6),
        ("qwen2", {"sliding_window": 6, "use_sliding_window": False}, 128),
        ("qwen3_moe", {"sliding_window": 7, "use_sliding_window": True}, 7),
    ],
)
@pytest.mark.slow
def test_a_window_is_a_limit(tmp_path: Path, case: str, changes: dict[str, Any], length: int) -> None:
    file, notes = exported(saved(tmp_path / "source", case, **changes))
    assert file.length == length
    assert any("sliding window" in note and f" {length} tokens" in note for note in notes) == (length < 128)


def tokenizer(path: Path, change: Any) -> Path:
    """A model whose tokenizer.json ``change`` has changed."""
    source = save_model_with_tokenizer(path / "source")
    content = json.loads((source / "tokenizer.json").read_text())
    change(content)
    (source / "tokenizer.json").write_text(json.dumps(content))
    return source


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {**BYTES, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def split(expression: str, **flags: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False, **flags}


def steps(*parts: dict[str, Any], **model: Any) -> Any:
    def change(content: dict[str, Any]) -> None:
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(parts)}
        content["model"] |= model

    return change


def model(**values: Any) -> Any:
    return lambda content: content["model"].update(values)


def added(*texts: str, **flags: Any) -> Any:
    """Tokens instead of the last ones of the vocabulary."""

    def change(content: dict[str, Any]) -> None:
        words = {number: word for word, number in content["model"]["vocab"].items()}
        for number, text in enumerate(texts, EMBEDDED_VOCABULARY - len(texts)):
            word = words[number]
            merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in content["model"]["merges"]]
            content["model"]["merges"] = [pair for pair in merges if word not in ("".join(pair), *pair)]
            del content["model"]["vocab"][word]
            plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
            content["added_tokens"].append({"id": number, "content": text, **plain, **flags})

    return change


def normalizer(kind: str) -> Any:
    return lambda content: content.update(normalizer={"type": kind})


def template(text: str) -> Any:
    return lambda content: content.update(post_processor=text_template(text))


def taken(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    number = vocabulary.pop(next(word for word, number in vocabulary.items() if number == EMBEDDED_VOCABULARY - 1))
    vocabulary["<EOT>"] = number
    content["model"]["merges"] = content["model"]["merges"][:-50]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (steps({**BYTES, "add_prefix_space": True}), "'add_prefix_space': True"),
        (steps(WORDS), "'use_regex': False"),
        (steps({"type": "Digits", "individual_digits": False}, BYTES), "'individual_digits': False"),
        (steps(split(QWEN, behavior="Removed"), WORDS), "'behavior': 'Removed'"),
        (steps(split(QWEN, invert=True), WORDS), "'invert': True"),
        (steps(split(QWEN), BYTES), "'use_regex': True"),
        (steps(split(QWEN.replace("s|'t", "s")), WORDS), "splits text in a way"),
        (steps({"type": "Whitespace"}), "splits text in a way"),
        (
            lambda content: content["model"].update(merges=content["model"]["merges"][:2000], ignore_merges=True),
            "tokens that merging does not make",
        ),
        (model(byte_fallback=True), "the decoder ByteLevel"),
        (model(dropout=0.5), "dropout 0.5"),
        (model(end_of_word_suffix="</w>"), "end_of_word_suffix '</w>'"),
        (normalizer("Lowercase"), "Lowercase"),
        (normalizer("NFKC"), "NFKC"),
        (added("<x", lstrip=True), "'<x' with lstrip"),
        (added("<x", rstrip=True), "'<x' with rstrip"),
        (added("<x", single_word=True), "'<x' with single_word"),
        (added("<x", "x>"), "'<x' and 'x>', which can overlap"),
        (added("ab", "bab"), "'ab' and 'bab', which can overlap"),
        (template("<s> <s> $A"), "adds tokens to a text"),
        (lambda content: content.update(decoder={"type": "Fuse"}), "decoder Fuse"),
    ],
)
@pytest.mark.slow
def test_tokenizers(tmp_path: Path, change: Any, said: str) -> None:
    assert said in refusal(tokenizer(tmp_path, change))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda content: None, "gpt-2"),
        (steps(BYTES), "gpt-2"),
        (steps(DIGITS, BYTES), "smollm"),
        (steps(split(LLAMA), WORDS, ignore_merges=True), "llama-bpe"),
        (steps(split(LLAMA), WORDS), "smaug-bpe"),
        (template("<s> $A"), "gpt-2"),
        (template("<s> $A </s>"), "gpt-2"),
        (added("<x", "Größe", special=True), "gpt-2"),
        (added("a<x>b", "<x>", normalized=True), "gpt-2"),
        (added("\n\n", "\n\n\n", "\n\n\n\n"), "gpt-2"),
        (template("</s> $A"), "gpt-2"),
        *(
            (steps(*map(split, SPLITTINGS[name].expressions), WORDS, ignore_merges=SPLITTINGS[name].whole), name)
            for name in ("deepseek-r1-qwen", "seed-coder", "deepseek-v3")
        ),
        # As files of models write the same: lines' ends as such, and what is not matched, which is nothing, removed.
        (steps(split(LLAMA.replace(r"\r", "\r").replace(r"\n", "\n")), WORDS), "smaug-bpe"),
        (steps(split(LLAMA, behavior="Removed", invert=True), WORDS), "smaug-bpe"),
        (steps(*map(split, SPLITTINGS["deepseek-coder"].expressions), DIGITS, WORDS), "deepseek-coder"),
        (lambda content: content["model"]["merges"].append(content["model"]["merges"][0]), "gpt-2"),
    ],
)
@pytest.mark.slow
def test_tokenizers_that_are_written(tmp_path: Path, change: Any, name: str) -> None:
    source = tokenizer(tmp_path, change)
    file, notes = exported(source)
    assert notes == []
    assert file.keys["tokenizer.ggml.pre"] == name
    assert splits_alike(file, source)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (normalizer("NFC"), "NFC"),
        (steps(split(SPLITTINGS["qwen35"].expressions[0]), WORDS), ""),
        (taken, "llama.cpp takes '<EOT>' for special, or for the end of a text"),
        (added("[EOT]"), "llama.cpp ends a text at '[EOT]', which is an ordinary token here"),
        (added("<x", lstrip=True, special=True), "llama.cpp keeps the spaces beside '<x'"),
        (added("<|x|>", rstrip=True), "llama.cpp keeps the spaces beside '<|x|>'"),
        (added("&&T<<", "<|xy|>"), "the longer one of '&&T<<' and '<|xy|>' where they overlap, as in '&&T<<|xy|>'"),
        (added("a<x>b", normalized=True, special=True), ""),
        (steps(split(SPLITTINGS["gpt-4o"].expressions[0]), WORDS), "capitals beyond A to Z"),
        (steps(split(SPLITTINGS["tekken"].expressions[0]), WORDS, ignore_merges=True), "capitals beyond A to Z"),
        (model(ignore_merges=True), ""),
        (
            lambda content: content["model"].update(merges=content["model"]["merges"][:-1], ignore_merges=True),
            "llama.cpp splits '",
        ),
    ],
)
@pytest.mark.slow
def test_tokenizers_with_a_note(tmp_path: Path, change: Any, said: str) -> None:
    _, notes = exported(tokenizer(tmp_path, change))
    assert len(notes) == bool(said)
    assert said in "".join(notes)


def test_spaces_that_phi_3_takes_away(tmp_path: Path) -> None:
    """llama.cpp does so for models of that name, whatever their special tokens are."""

    def change(content: dict[str, Any]) -> None:
        added("<unk>", "<|endoftext|>", "<|user|>", "<|end|>", special=True)(content)
        for token in content["added_tokens"]:
            token["rstrip"] = token["content"] in ("</s>", "<|user|>", "<|end|>")

    file, notes = exported(tokenizer(tmp_path, change))
    assert notes == []
    assert file.keys["general.name"] == "source (phi-3)"


def test_what_stands_around_a_text(tmp_path: Path) -> None:
    """Qwen3-Embedding ends texts with another token than answers; GLM 4 begins them with two."""

    def change(content: dict[str, Any]) -> None:
        added("<|im_end|>", special=True)(content)
        template("$A </s>")(content)

    source = tokenizer(tmp_path / "first", change)
    edit_json(source / "tokenizer_config.json", eos_token="<|im_end|>")
    (source / "generation_config.json").unlink(missing_ok=True)
    edit_json(source / "config.json", eos_token_id=None)
    file, (note,) = exported(source)
    assert "llama.cpp also ends a text at '</s>'" in note
    assert [file.keys[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot")] == [1, EMBEDDED_VOCABULARY - 1]
    assert splits_alike(file, source)
    source = tokenizer(tmp_path / "second", template("<s> </s> $A"))
    (source / "chat_template.jinja").write_text("<s></s>{% for message in messages %}{{ message.content }}{% endfor %}")
    file, (note,) = exported(source)
    assert "does not put '<s></s>' before a text" in note
    assert file.split(TEXT) == AutoTokenizer.from_pretrained(source)(TEXT, add_special_tokens=False).input_ids


PIECES = [
    *("The old men sat by the river", "word", "a  b   c    d     e", "x=1 == y === z ======", "a</s>b<|im_end|>c"),
    *("\n", "a\n\n\n\nb\n\n", "Größe 東京 ½ 😀", "<h1>the</h1> <h1>", "<unk>", "", "tab\tx", "▁▁ the"),
]


@pytest.mark.parametrize(("spaces", "runs"), [*((spaces, False) for spaces in SPACES), ("replaced", True)])
def test_tokenizers_of_sentencepiece(tmp_path: Path, spaces: str, runs: bool) -> None:
    """What was merged by ranks is merged by scores, in the formulas, by niwaki's own reader, and in llama.cpp."""
    source, out = save_with_pieces(tmp_path / "source", spaces, runs), tmp_path / "model.gguf"
    file, notes = exported(source)
    assert [note for note in notes if "puts a space" not in note] == []
    assert len(notes) == (spaces == "before the first")
    own: Any = AutoTokenizer.from_pretrained(source)
    expected = [own(text).input_ids for text in PIECES]
    kinds = dict(zip(file.keys["tokenizer.ggml.tokens"], file.keys["tokenizer.ggml.token_type"], strict=True))
    assert (file.keys["tokenizer.ggml.model"], file.keys["tokenizer.ggml.pre"]) == ("llama", "default")
    assert file.keys["tokenizer.ggml.add_space_prefix"] == spaces.startswith("before")
    wanted = {"<unk>": 3, "</s>": 3, "<0x0A>": 6, "the": 1, "\n\n": 4, "<|im_end|>": 3, "<h1>": 4}
    assert {token: kinds.get(token) for token in wanted} == wanted
    assert file.keys["tokenizer.ggml.token_type"][-2:] == [5, 5]
    inner = spaces == "before the first"  # behind special tokens there is none, which the note says
    texts = [i for i, text in enumerate(PIECES) if not (inner and ("<" in text or "\n" in text or text[:1] == "▁"))]
    assert [file.split(PIECES[i]) for i in texts] == [expected[i] for i in texts]
    if LLAMA_CPP.exists():
        (answer,) = ask(tmp_path, [(out, PIECES, [1, 2])])
        assert not answer.error
        assert [answer.split[i] for i in texts] == [expected[i] for i in texts]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content["model"].update(merges=content["model"]["merges"][::2]), "in an order of its own"),
        (lambda content: content["model"].update(ignore_merges=True), "ignore_merges True"),
        (lambda content: content.update(normalizer={"type": "NFKC"}), "'NFKC'"),
        (lambda content: content["model"]["vocab"].pop("<0x41>"), "no token for 1 bytes"),
        (lambda content: content["added_tokens"].pop(2), "the ordinary token '</s>'"),
        (lambda content: content.update(decoder={"type": "BPEDecoder", "suffix": "x"}), "the decoder BPEDecoder"),
    ],
)
def test_tokenizers_of_sentencepiece_that_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    source = save_with_pieces(tmp_path / "source")
    content = json.loads((source / "tokenizer.json").read_text())
    if "</s>" in said:  # which texts give, where it is an ordinary token
        content["model"]["merges"] += [["<", "/"], ["s", ">"], ["</", "s>"]]
        content["model"]["vocab"] |= {"</": 351, "s>": 352, "<": 353, "/": 354, ">": 355}
        edit_json(source / "tokenizer_config.json", eos_token="<s>")
    change(content)
    (source / "tokenizer.json").write_text(json.dumps(content))
    assert said in refusal(source)


def composing(**flags: Any) -> Any:
    """A tokenizer that composes characters, with a token that is not composed."""

    def change(content: dict[str, Any]) -> None:
        normalizer("NFC")(content)
        added(unicodedata.normalize("NFD", "<é>"), **flags)(content)

    return change


def test_tokens_that_are_composed_themselves(tmp_path: Path) -> None:
    said = refusal(tokenizer(tmp_path / "first", composing(normalized=True)))
    assert "normalized, which makes '<é>' of it" in said
    exported(tokenizer(tmp_path / "second", composing(normalized=False)))


def test_what_else_tokenizers_have(tmp_path: Path) -> None:
    source = save_model_with_tokenizer(tmp_path / "source")
    edit_json(source / "tokenizer_config.json", split_special_tokens=True)
    assert "has split_special_tokens True" in refusal(source)
    (source / "tokenizer.json").rename(source / "tokenizer.model")
    assert "SentencePiece" in refusal(source)


def test_a_class_that_replaces_what_the_file_says(tmp_path: Path) -> None:
    """transformers gives Qwen 2 its own steps, whatever tokenizer.json has."""
    file, notes = exported(source := saved(tmp_path / "source", "qwen2"))
    assert file.keys["tokenizer.ggml.pre"] == "qwen2"
    assert splits_alike(file, source)
    assert any("'<|endoftext|>'" in note for note in notes)  # which the class adds, beyond the vocabulary


def test_files_of_slow_tokenizers(tmp_path: Path) -> None:
    source = save_model_with_tokenizer(tmp_path / "source")
    expected = AutoTokenizer.from_pretrained(source)(TEXT).input_ids
    content = json.loads((source / "tokenizer.json").read_text())["model"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["merges"]]
    (source / "vocab.json").write_text(json.dumps(content["vocab"]))
    (source / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]))
    (source / "tokenizer.json").unlink()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **names}))
    file, _ = exported(source)
    assert file.split(TEXT) == AutoTokenizer.from_pretrained(source)(TEXT).input_ids == expected


def test_where_texts_end(tmp_path: Path) -> None:
    """llama.cpp ends a text at three tokens that a file names."""
    source = save_model_with_tokenizer(tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5, 7, 9]}))
    file, (note,) = exported(source)
    assert [file.keys[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")] == [1, 5, 7]
    assert "does not end texts at" in note


def test_no_end_of_text_is_said(tmp_path: Path) -> None:
    source = save_model_with_tokenizer(tmp_path / "source")
    edit_json(source / "tokenizer_config.json", eos_token=None)
    edit_json(source / "config.json", eos_token_id=None)
    (source / "generation_config.json").unlink(missing_ok=True)
    _, (note,) = exported(source)
    assert "the token 11" in note


@pytest.mark.parametrize("name", ["my-Phi-3-mini", "phi3", "modern-bert"])
@pytest.mark.slow
def test_names_that_llama_cpp_takes_for_another_model(tmp_path: Path, name: str) -> None:
    file, _ = exported(save_model_with_tokenizer(tmp_path / name))
    assert "general.name" not in file.keys


def test_tokens_of_the_padding(tmp_path: Path) -> None:
    """Numbers without a token get a name that no token has: llama.cpp loads no file with one twice."""
    source = tokenizer(tmp_path, added("[PAD4100]", special=True))
    file = source / "model.safetensors"
    tensors = load_file(file)
    more = torch.zeros(EMBEDDED_VOCABULARY + 10, 32)
    more[:EMBEDDED_VOCABULARY] = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "model.embed_tokens.weight": more}, file, {"format": "pt"})
    edit_json(source / "config.json", vocab_size=EMBEDDED_VOCABULARY + 10)
    tokens = exported(source)[0].keys["tokenizer.ggml.tokens"]
    assert len(set(tokens)) == len(tokens) == EMBEDDED_VOCABULARY + 10
