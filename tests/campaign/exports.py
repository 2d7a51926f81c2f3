"""Models and tokenizers of all exportable families with random flags, exported to GGUF.

What is accepted is compared with transformers: in llama.cpp where $NIWAKI_LLAMA_CPP has it, or else by its formulas.
"""

from __future__ import annotations

import json
import random
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import niwaki
from niwaki.choices import BLOCK_TYPE_BITS
from niwaki.errors import CheckpointError, NiwakiError
from support.gguf_formulas import File
from support.llama_cpp import LLAMA_CPP, ask, distance
from support.models import CASES, EMBEDDED_VOCABULARY, add_tokenizer, edit_json, format_of, random_model

_FAMILIES = ("llama", "llama grouped", "llama tied", "mistral", "qwen2", "qwen3", "qwen3_moe")
_TOKENS = 24
_PIECES = (
    *("The", " old", " man", "don't", " I'LL", "we've", " 1984", "12345", " 7", "x1y22", "!", "...", " ?!", "=>"),
    "_a_",
    *(" ", "  ", "     ", "\n", "\n\n", " \n", "\t", "\r\n", "Größe", " naïve", "東京", "привет", " ½", "²", "🙂", "é"),
    *("<s>", "</s>", "<tool>", "<x", "ǅ", "'S", "'", "a b", "1 2", "\u00a0", "don"),
)

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def prepare(place: Path) -> None:
    pass


def case(chance: random.Random, place: Path) -> str:
    source, file = place / "source", place / "model.gguf"
    kind = chance.choice(("F16", "F16", "Q8_0", "Q4_0", "types", "types"))
    changes = _configuration(chance)
    if kind == "types" and chance.random() < 0.7:  # which have blocks of 256
        changes |= {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 32}
    try:
        model = random_model(
            changes.pop("case"), vocab_size=EMBEDDED_VOCABULARY, seed=chance.randrange(2**31), **changes
        )
        model.save_pretrained(source)
        model = _rounded(chance, model, kind)
        model.save_pretrained(source)
    except Exception:
        return "transformers makes no such model"
    add_tokenizer(source)
    _tokenizer(chance, source)
    if chance.random() < 0.1:
        _file(chance, source)
    on_grid = kind != "F16" and chance.random() < (1 if kind == "types" else 0.5) and _put_on_grid(chance, source, kind)
    said = _export(source, file, kind)
    if isinstance(said, NiwakiError):
        assert "\n" not in str(said)
        assert [path.name for path in place.iterdir()] == ["source"], "something is left"
        return "no model" if isinstance(said, CheckpointError) else "refused"
    # What a note says of tokens is so; the texts here are made to find it.
    otherwise = ("llama.cpp keeps", "llama.cpp splits", "llama.cpp takes")
    texts = [] if any(note.startswith(otherwise) for note in said) else [_text(chance) for _ in range(5)]
    tokens = [chance.randrange(EMBEDDED_VOCABULARY) for _ in range(_TOKENS)]
    _compare(source, file, kind, texts, tokens, 1e-2 if on_grid else 1e-3)
    return "as in transformers"


def _put_on_grid(chance: random.Random, source: Path, kind: str) -> bool:
    """Replaces the model by what quantize makes of it, where it can be on the grid."""
    if kind == "types":
        grid, ends = chance.choice([*BLOCK_TYPE_BITS]), chance.choice([*BLOCK_TYPE_BITS])
    else:
        grid, ends = {"Q8_0": "int8", "Q4_0": "int4"}[kind] + chance.choice(("", "", ":32", ":64")), "int8"
    out = source.with_name("on-grid")
    options: Any = {"effort": "none", "measurement": None, "compute": "cpu"}
    try:
        niwaki.quantize(source, out, grid, embeddings=ends, **options)
    except NiwakiError:
        for left in source.parent.glob(".on-grid*"):  # what was done stays, for a run that goes on
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return False
    shutil.rmtree(source)
    out.rename(source)
    return True


def _export(source: Path, file: Path, kind: Any) -> NiwakiError | list[str]:
    try:
        return niwaki.export(source, file, "gguf" if kind == "types" else format_of(kind))
    except NiwakiError as error:
        return error


def _compare(source: Path, file: Path, kind: str, texts: list[str], tokens: list[int], most: float) -> None:
    """AssertionError unless tokens are the same, and logits ``most`` off: scales of grids are rounded in a file."""
    written = File(file)
    tokens = tokens[: written.length]
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].double()
    if LLAMA_CPP.exists():
        (answer,) = ask(file.parent, [(file, texts, tokens)])
        assert not answer.error, answer.error
        split, far, most = answer.split, distance(answer.logits, expected), 0.02 if kind == "F16" else 0.3
        # Inputs are rounded there, so that a token may go to another expert.
        worst = far.quantile(0.75 if written.family == "qwen3moe" else 1.0)
    else:
        split = [written.split(text) for text in texts]
        worst = distance(written.logits(tokens), expected).max()
    for text, ours in zip(texts, split, strict=True):
        assert ours == tokenizer(text).input_ids, text
    assert worst < most, f"logits are off by {float(worst):.4f}"


def _configuration(chance: random.Random) -> dict[str, Any]:
    """Most of these change logits, and few at a time do, so that some are accepted."""

    def some(share: float, *values: Any) -> Any:
        return chance.choice(values) if chance.random() < share else ...

    case_ = chance.choice(_FAMILIES)
    odd = 1.0 if chance.random() < 0.3 else 0.0
    ropes = _ropes(chance)
    if not odd:
        ropes = ropes[: 2 * (case_[0] in "lm")] or [{"rope_type": "default", "rope_theta": 300.0}]
    rope: Any = some(0.15 + 0.2 * odd, *ropes)
    if rope is ...:
        rope = {"rope_type": "default", "rope_theta": chance.choice((100.0, 10_000.0, 5e5))}
    values = {"case": case_, "rope_parameters": rope, "use_sliding_window": some(0.1, True)}
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        values[key] = some(0.2, True, False)
    values |= {
        "hidden_act": some(odd * 0.2, "gelu", "relu", "swish", "gelu_pytorch_tanh", "sigmoid"),
        "sliding_window": some(0.2, 1, 5, 8, 64, None),
        "head_dim": some(0.3 if odd or case_ != "qwen2" else 0, 4, 8, 16, 32),
        "num_key_value_heads": some(0.2, 1, 2, *([3] if odd else [])),
        "eos_token_id": some(0.3, 1, [1, 5, 7], 4095, None),
    }
    values |= {"norm_topk_prob": some(odd * 0.2, True, False), "decoder_sparse_step": some(odd * 0.1, 1, 2)}
    values |= {"mlp_only_layers": some(odd * 0.1, [], [0]), "num_experts_per_tok": some(0.3, 1, 2, 3)}
    values |= {"num_hidden_layers": some(0.3, 1, 2, 3), "hidden_size": some(0.3, 16, 32, 64)}
    values |= {"intermediate_size": some(0.3, 20, 32, 64, 179), "rms_norm_eps": some(0.3, 1e-5, 1e-2, 0.5)}
    values |= {"max_position_embeddings": some(0.2, 6, 12, 4096), "is_causal": some(odd * 0.06, False)}
    values |= {"attention_chunk_size": some(odd * 0.06, 4), "attention_dropout": some(0.1, 0.3)}
    values |= {"initializer_range": some(0.1, 0.5)}
    return {key: value for key, value in values.items() if value is not ...}


def _ropes(chance: random.Random) -> list[dict[str, Any]]:
    base = {"rope_theta": chance.choice((100.0, 10_000.0, 5e5))}
    parts = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    return [
        {"rope_type": "linear", "factor": chance.choice((1.0, 2.0, 7.5)), **base},
        {"rope_type": "llama3", "factor": 8.0, **parts, **base},
        {"rope_type": "dynamic", "factor": 4.0, **base},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **base},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5, **base},
        {"rope_type": "default", "partial_rotary_factor": 0.5, **base},
        {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5, **base},
    ]


def _rounded(chance: random.Random, model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """With weights that the format holds as they are, but for some that are far too large or small."""
    scale = chance.choice((1.0,) * 30 + (1e6, 1e9, 1e-6, 1e-9))
    chosen = chance.choice([name for name, each in model.named_parameters() if each.ndim > 1])
    with torch.no_grad():
        for name, each in model.named_parameters():
            ends = "embed_tokens" in name or "lm_head" in name
            if each.ndim > 1 and not name.endswith("mlp.gate.weight"):
                top, low = (127, -127) if kind == "Q8_0" or ends else (7, -8)
                step = 2.0**-9 if kind == "Q8_0" or ends else 2.0**-5
                codes = (each / step).round().clamp(low, top)
                if kind == "F16":
                    codes = (each * 1024).round() * 0.5 / step / 512
                codes[..., ::32] = low  # one of each group decides the scale
                each.copy_(codes * step * (scale if name == chosen else 1.0))
    return model


def _tokenizer(chance: random.Random, source: Path) -> None:
    """Changes steps and flags; most often none or one."""
    file = source / "tokenizer.json"
    content = json.loads(file.read_text())
    odd = 1.0 if chance.random() < 0.3 else 0.0
    digits = {"type": "Digits", "individual_digits": chance.random() >= 0.2 * odd}
    bytes_ = {
        "type": "ByteLevel",
        "add_prefix_space": chance.random() < 0.07 * odd,
        "trim_offsets": chance.random() < 0.5,
        "use_regex": chance.random() >= 0.07 * odd,
    }
    expressions = (_SPLIT, _SPLIT.replace("{1,3}", ""), r"\s+")
    split: dict[str, Any] = {
        "type": "Split",
        "pattern": {"Regex": chance.choice(expressions if odd else expressions[:2])},
        "behavior": chance.choice(("Removed", "MergedWithPrevious") if chance.random() < 0.2 * odd else ("Isolated",)),
        "invert": chance.random() < 0.07 * odd,
    }
    plain = {**bytes_, "use_regex": chance.random() < 0.1 * odd}
    ways = ([bytes_], [digits, bytes_], [split, plain], [plain, split])
    steps = chance.choice(ways if odd else ways[:3])
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]
    model = content["model"]
    three = split["pattern"]["Regex"] == _SPLIT and steps[0] is split
    model["ignore_merges"] = chance.random() < (0.3 if odd else 0.7 * three)
    flags: dict[str, Any] = {"byte_fallback": True, "dropout": 0.5, "fuse_unk": True, "unk_token": "<s>"}
    for key, value in {**flags, "continuing_subword_prefix": "##", "end_of_word_suffix": "</w>"}.items():
        if chance.random() < 0.06 * odd:
            model[key] = value
    if chance.random() < 0.05:
        model["merges"] = chance.sample(model["merges"], len(model["merges"]))
    if chance.random() < 0.1 + 0.2 * odd:
        kinds = [{"type": "NFC"}, {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": " "}]
        content["normalizer"] = chance.choice(kinds if odd else kinds[:1])
    if chance.random() < 0.2:
        piece = {"SpecialToken": {"id": chance.choice(("<s>", "</s>")), "type_id": 0}}
        whole: list[Any] = [{"Sequence": {"id": "A", "type_id": 0}}]
        whole.insert(chance.randrange(2) if odd else int(piece["SpecialToken"]["id"] == "</s>"), piece)
        ids = {name: {"id": name, "ids": [number], "tokens": [name]} for number, name in enumerate(("<s>", "</s>"))}
        pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
        content["post_processor"] = {"type": "TemplateProcessing", "single": whole, "pair": pair, "special_tokens": ids}
    texts = chance.sample(("<tool>", "<x", "don", " old", "  ", "<|im_end|>", "l>x"), chance.choice((0, 0, 0, 1, 2)))
    words = {number: word for word, number in model["vocab"].items()}
    for number, text in enumerate(texts, EMBEDDED_VOCABULARY - len(texts)):
        _take(model, words[number])
        one = {"id": number, "content": text, "special": chance.random() < 0.5, "normalized": chance.random() < 0.3}
        flags = {name: chance.random() < 0.1 * odd for name in ("single_word", "lstrip", "rstrip")}
        content["added_tokens"].append({**one, **flags})
    file.write_text(json.dumps(content))
    if chance.random() < 0.1:
        edit_json(source / "tokenizer_config.json", tokenizer_class=chance.choice(("Qwen2Tokenizer", "GPT2Tokenizer")))
    if chance.random() < 0.05:
        edit_json(source / "tokenizer_config.json", add_bos_token=True, add_eos_token=chance.random() < 0.5)


def _take(model: dict[str, Any], word: str) -> None:
    """Removes a word of the vocabulary, and what needs it."""
    pairs = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
    gone = {word}
    while more := {"".join(pair) for pair in pairs if gone & set(pair)} - gone:
        gone |= more
    model["merges"] = [" ".join(pair) for pair in pairs if "".join(pair) not in gone]
    del model["vocab"][word]


def _file(chance: random.Random, source: Path) -> None:
    """What config.json may also say."""
    key, value = chance.choice(
        (
            *(("unknown_key", 3), ("head_dim", 16), ("rope_theta", 1e39), ("rms_norm_eps", 0.0), ("vocab_size", 4095)),
            *(("num_hidden_layers", 1), ("num_hidden_layers", 4), ("max_position_embeddings", 2**40)),
            *(("layer_types", ["sliding_attention", "full_attention"]), ("num_key_value_heads", 0)),
            *(("hidden_act", "nothing"), ("rope_scaling", {"type": "linear"}), ("pruning_config", {"library": "x"})),
        )
    )
    edit_json(source / "config.json", **{key: value})


def _text(chance: random.Random) -> str:
    return unicodedata.normalize("NFC", "".join(chance.choice(_PIECES) for _ in range(chance.randrange(1, 15))))


assert {each.split()[0] for each in CASES} >= {each.split()[0] for each in _FAMILIES}
