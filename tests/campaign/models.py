"""Model directories as they should not be: bytes, headers, JSON, links, names; each command refuses or is right."""

from __future__ import annotations

import contextlib
import json
import lzma
import math
import os
import random
import shutil
import socket
import struct
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from campaign.home import SMALL, contents
from support.forks import command, forked, refused
from support.models import EMBEDDED_VOCABULARY, add_tokenizer, is_pruned, random_model

_CASES = ("llama", "llama tied", "gpt2", "mixtral", "gpt_oss", "phi3", "opt", "qwen2 window", "gemma2", "deepseek_v3")
_SHARDED = " in shards"
_home = Path()

#: What is put in place of a value.
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 10**3, 10**9, 2**63, 10**25, 0.5, -0.5, 1e-30, 1e308, math.nan, math.inf),
    *("", "x", "float32", "float99", "true", "0", "é", "\x1b[2J", "\ud800", "a\nb", "../x", "/etc/passwd", "a" * 300),
    *([], [1], ["x"], [None], [[]], [0, 10**9], {}, {"x": 1}, {"rope_type": "yarn"}, {"": []}, {"type": ["x"]}),
)
#: Keys that some configurations have, or niwaki reads.
_KEYS = (
    *("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"),
    *("tie_word_embeddings", "rope_parameters", "rope_scaling", "rope_theta", "layer_types", "sliding_window"),
    *("hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "attention_dropout", "initializer_range"),
    "use_cache",
    *("text_config", "is_encoder_decoder", "pruning_config", "quantization_config", "transformers_version"),
    "pad_token_id",
    *("bos_token_id", "num_experts_per_tok", "num_local_experts", "num_experts", "num_kv_shared_layers", "id2label"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "final_logit_softcapping", "n_layer"),
    *("n_positions", "pretraining_tp", "chunk_size_feed_forward", "output_hidden_states", "return_dict"),
    "_name_or_path",
)
_TYPES = (
    *("bert", "t5", "whisper", "mamba", "rwkv", "clip", "gemma3", "qwen3", "bloom", "falcon", "xlnet", "llama4"),
    "bart",
)
_NAMES = (
    *("plan.safetensors", "README.md", "README.base.md", "README.dense.md", "niwaki.json", "report.html"),
    "packed.json",
    *("quantization", "quantization/scales.safetensors", ".partial", ".partial.json", "niwaki-bench.json", "LICENSE"),
    *("generation_config.json", "chat_template.jinja", "additional_chat_templates/x.jinja", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "model.bin", "old/model.safetensors"),
    "a" * 255,
    *("a\nb.txt", "\x1b[2J.txt", "\udcff\udcfe.txt", "\udcff.bin", "é/ü.txt", " ", "~", "-", "%s", "[red]"),
    ".git/config",
    *("preprocessor_config.json", "adapter_config.json", "model.safetensors.index.json", "model-00001.safetensors"),
)
_CONTENTS = (
    *(b"", b"{}", b"[]", b"null", b"\xff\xfe", b"---\ntags: [x]\nlicense: mit\n---\n# A\n", b"---\n: [\n---\n"),
    b"x\n" * 99,
    *(b'{"eos_token_id": "x"}', b'{"temperature": "hot", "do_sample": []}', b'{"max_new_tokens": -1}', b"{{ 1/0 }}"),
    b"[" * 3000,
)


def prepare(place: Path) -> None:
    global _home
    _home = place
    for case in _CASES:
        model = random_model(case, vocab_size=EMBEDDED_VOCABULARY)
        for name, size in ((case, "1GB"), (case + _SHARDED, "100KB")):
            model.save_pretrained(place / name, max_shard_size=size)
            add_tokenizer(place / name)


def case(chance: random.Random, place: Path) -> str:
    name = chance.choice(_CASES) + chance.choice(("", _SHARDED))
    model, out, record = place / "model", place / "out", place / "record.json"
    shutil.copytree(_home / name, model)
    changes = chance.choice((0, 1, 1, 1, 1, 2, 3))
    done = [chance.choice(_CHANGES) for _ in range(changes)]
    for change in done:
        change(chance, model)
    before = contents(model)
    arguments: dict[str, tuple[object, ...]] = {
        "prune": (model, out, "--sparsity", "0.5", "--solver", "wanda", *SMALL),
        "shrink": (model, out, "--neurons", "0.25", *SMALL),
        "eval": (model, "--text", "demo-held", "--length", "32", "--text-samples", "2", "--record", record),
        "inspect": (model,),
        "generate": (model, "The trees", "--tokens", "2"),
    }
    verb = chance.choice(("prune", "prune", "prune", "shrink", "eval", "inspect", "generate"))
    ended = command([verb, *arguments[verb]], place)
    assert contents(model) == before, f"{verb} changed its input"
    if ended.code != 0:
        refused(ended)
        left = [path for path in place.iterdir() if path.name not in ("model", "other")]
        assert "are done and kept" in ended.err or not left, f"{left} after {ended.err}"
        assert not out.exists()
        assert changes or verb == "shrink", f"{name} was refused: {ended.err}"
        return "refused"
    if verb == "prune":
        _check_pruned(name.removesuffix(_SHARDED), model, out, whole=not changes)
    if verb in ("prune", "shrink"):
        _check_files(model, out)
        assert _loads(out) or not _loads(model), "transformers cannot load the output"
    if verb == "eval":
        measured = json.loads(record.read_text())["perplexity"]["value"]
        expected = _perplexity(model)
        # Where transformers cannot load the whole model there is nothing to compare with.
        assert expected is None or abs(measured / expected - 1) < 1e-3, f"{measured}, and transformers: {expected}"
    return "done" if changes else "unchanged"


# What must be so


def _tensors(directory: Path) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    names = {single.name} if single.exists() else set(json.loads(index.read_text())["weight_map"].values())
    found: dict[str, Tensor] = {}
    for name in names:
        with safe_open(directory / name, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - is no mapping
    return found


def _check_pruned(case: str, model: Path, out: Path, whole: bool) -> None:
    was, now = _tensors(model), _tensors(out)
    assert was.keys() == now.keys()
    pruned = 0
    for key, value in now.items():
        assert (value.dtype, value.shape) == (was[key].dtype, was[key].shape), key
        changed = value.contiguous().view(torch.uint8) != was[key].contiguous().view(torch.uint8)
        if not changed.any():
            assert not (whole and is_pruned(case, key)), f"{key} is not pruned"
            continue
        pruned += 1
        assert is_pruned(case, key), f"{key} is changed"
        assert torch.equal(torch.where(value == 0, 0, was[key]), value), f"{key} has other values"
        assert not ((value == 0) & value.signbit()).any(), f"{key} has -0"
        zeros = value.numel() - int(value.count_nonzero())
        assert 2 * zeros == value.numel(), f"{key} has {zeros} zeros of {value.numel()}"
    assert pruned, "nothing was pruned"


def _check_files(model: Path, out: Path) -> None:
    """All that is not weights is in the output."""
    other = {"config.json", "niwaki.json", "README.md", "README.base.md", "report.html"}
    other |= {"niwaki-bench.json", "packed.json"}
    for path in model.rglob("*"):
        name = path.relative_to(model)
        if not os.path.isfile(path) or name.parts[0] in {".git", ".cache", *other} or "index.json" in path.name:
            continue
        if path.suffix not in (".safetensors", ".bin"):
            assert (out / name).read_bytes() == path.read_bytes(), ascii(str(name))
    if (model / "README.md").is_file():  # a folder of this name comes along as it is, as README.base.md
        assert (out / "README.base.md").read_bytes() == (model / "README.md").read_bytes()
    made = json.loads((out / "config.json").read_text())
    assert made.pop("pruning_config")["library"] == "niwaki"
    assert json.loads((out / "niwaki.json").read_text())["model"] == str(model)


def _whole(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False)


def _loads(directory: Path) -> bool:
    return forked(lambda: _whole(directory)(torch.arange(8)[None])).code == 0


def _perplexity(directory: Path) -> float | None:
    """As transformers alone has it."""

    def measure() -> None:
        with lzma.open(Path(str(files("niwaki"))) / "data" / "held.txt.xz", "rt", encoding="utf-8") as file:
            text = file.read(10_000)
        tokenizer = AutoTokenizer.from_pretrained(directory, model_max_length=10**9)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = torch.tensor(ids[:64]).view(2, 32)
        with torch.no_grad():
            logits = _whole(directory)(tokens).logits.float()
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        sys.stdout.write(str(losses.double().exp().item()))

    ended = forked(measure)
    return float(ended.out.split()[-1]) if ended.code == 0 else None


# What is changed


def _some_file(chance: random.Random, model: Path, pattern: str = "*") -> Path:
    found = [path for path in model.glob(pattern) if os.path.isfile(path) and path.stat().st_size < 2**30]
    return chance.choice(sorted(found) or [model / "config.json"])


def _truncated(chance: random.Random, model: Path) -> None:
    path = _some_file(chance, model)
    size = path.stat().st_size
    sizes = (0, 1, 8, size // 2, max(0, size - 1), size + 1, size + 8, chance.randint(0, size))
    os.truncate(path, chance.choice(sizes))


def _bytes(chance: random.Random, model: Path) -> None:
    path = _some_file(chance, model)
    content = bytearray(path.read_bytes())
    for _ in range(min(len(content), chance.choice((1, 1, 8, 100)))):
        # More often at the start, where headers are.
        at = chance.randrange(chance.choice((1, 16, 1000, 10**9)))
        content[min(at, len(content) - 1)] = chance.randrange(256)
    path.write_bytes(content)


def _gone(chance: random.Random, model: Path) -> None:
    path = _some_file(chance, model)
    path.unlink()
    kind = chance.choice(("nothing", "link", "loop", "folder", "pipe", "socket", "null", "zero"))
    _put(kind, path)


def _put(kind: str, path: Path) -> None:
    """Something at ``path`` that is no file."""
    if path.exists() or path.is_symlink():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        path.mkdir()
        (path / "x").write_text("x")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            here = os.open(path.parent, os.O_RDONLY)  # for their names may not be long
            try:
                bound.bind(f"/proc/self/fd/{here}/{path.name}"[:100])
            except (OSError, UnicodeEncodeError):
                os.mkfifo(path)
            finally:
                os.close(here)
    elif kind != "nothing":
        targets = {"link": "nowhere", "loop": path.name, "null": "/dev/null", "zero": "/dev/zero", "long": "b" * 300}
        path.symlink_to(targets[kind])


def _added(chance: random.Random, model: Path) -> None:
    path = model / chance.choice(_NAMES)
    kind = chance.choice(("file", "file", "file", "link", "loop", "folder", "pipe", "socket", "null", "zero", "long"))
    if kind != "file":
        _put(kind, path)
    elif not path.exists() and not path.is_symlink():
        if path.parent != model:
            shutil.rmtree(path.parent, ignore_errors=True)
            path.parent.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.choice(_CONTENTS))


def _elsewhere(chance: random.Random, model: Path) -> None:
    """Links that are as good as files, to what may be far larger than the disk, and in circles."""
    kind = chance.choice(("file", "large", "large weights", "up", "here", "deep"))
    other = model.parent / "other"
    if kind == "file":
        path = _some_file(chance, model)
        shutil.move(path, other)
        path.symlink_to(other)
    elif kind.startswith("large"):
        with other.open("wb") as file:
            file.truncate(2**42)
        (model / ("huge.bin" if "weights" in kind else "huge.txt")).symlink_to(other)
    elif kind == "deep":
        here = os.getcwd()
        os.chdir(model)
        for _ in range(chance.choice((50, 400))):
            with contextlib.suppress(FileExistsError):
                os.mkdir("d")
            os.chdir("d")
        Path("x").write_text("x")
        os.chdir(here)
    elif not (model / "again").is_symlink():
        (model / "again").symlink_to(model.parent if kind == "up" else model)


def _json_value(chance: random.Random, model: Path) -> None:
    """One value somewhere in a JSON file."""
    path = _some_file(chance, model, "*.json")
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError):
        return
    at: Any = {"": values}
    key: Any = ""
    for _ in range(chance.choice((1, 1, 2, 3, 5))):
        below: Any = at[key]
        if not isinstance(below, dict | list) or not below:
            break
        at, key = below, chance.choice(list(below) if isinstance(below, dict) else range(len(below)))
    if chance.random() < 0.2 and isinstance(at, dict) and key:
        del at[key]
    else:
        at[key] = chance.choice(_ODD)
    path.write_text(json.dumps(values))


def _config_value(chance: random.Random, model: Path) -> None:
    path = model / "config.json"
    try:
        values = json.loads(path.read_text()) if os.path.isfile(path) else None  # a pipe is never read to its end
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(values, dict):
        return
    for _ in range(chance.choice((1, 1, 1, 2))):
        key = chance.choice((*_KEYS, *values))
        if chance.random() < 0.1:
            values.pop(key, None)
        elif isinstance(values.get(key), int) and chance.random() < 0.3:
            values[key] = values[key] + chance.choice((-1, 1, values[key], -values[key]))
        elif key == "model_type":
            values[key] = chance.choice(_TYPES)
        else:
            values[key] = chance.choice(_ODD)
    if chance.random() < 0.05:
        for _ in range(chance.choice((90, 300, 900, 5000))):
            values = {"x": values}
    # Not by json, which would refuse to write the deepest.
    path.write_text(json.dumps(values) if "x" not in values else _nested(values))


def _nested(values: Any) -> str:
    depth = 0
    while isinstance(values, dict) and set(values) == {"x"}:
        values, depth = values["x"], depth + 1
    text = json.dumps(values)
    return text[:-1] + ', "deep": ' + '{"x":' * depth + "1" + "}" * depth + "}" if text != "{}" else text


def _header(chance: random.Random, model: Path) -> None:
    """The header of a weight file, some of the time to one that is as good."""
    path = _some_file(chance, model, "*.safetensors")
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8].ljust(8, b"\0"))
    try:
        header = json.loads(raw[8 : 8 + size])
        keys = [key for key in header if key != "__metadata__"]
        key, other, data = chance.choice(keys), chance.choice(keys), raw[8 + size :]
        entry = header[key]
        entry["data_offsets"][0] + 0
    except (ValueError, LookupError, TypeError, AttributeError):
        return
    end, text = len(data), None
    hows = ("field", "offset", "shape", "same", "more", "zero", "dtype", "name", "twice", "metadata", "text")
    match chance.choice(hows):
        case "field":
            entry[chance.choice([*entry])] = chance.choice(_ODD[:-1])
        case "offset":
            entry["data_offsets"][chance.randrange(2)] += chance.choice((-4, 4, 1, 1 << 40, -(1 << 40)))
        case "shape":
            shapes: Any = ([], [-1], [2**32, 2**32], [2**64], [0], entry["shape"][::-1], [*entry["shape"], 1])
            entry["shape"] = chance.choice(shapes)
        case "same":
            entry["data_offsets"] = header[other]["data_offsets"]
        case "more":  # a tensor that nothing asks for
            widths = {"F32": 4, "U16": 2, "F8_E8M0": 1, "F4": 1, "C64": 8, "BOOL": 1, "I64": 8}
            dtype, width = chance.choice([*widths.items()])
            shape, places = [4 if dtype == "F4" else 2], [end, end + 2 * width]
            header["more"] = {"dtype": dtype, "shape": shape, "data_offsets": places}
            data += bytes(2 * width)
        case "zero":
            header["zero"] = {"dtype": "F32", "shape": [0, 3], "data_offsets": [end, end]}
        case "dtype":
            entry["dtype"] = chance.choice(("I32", "U32", "F16", "F64", "I8", "Q7", "f32", ""))
        case "name":
            names = (other, f"{key}x", key.replace("model.", ""), "", "é", "a" * 5000, "\x1b[2J", "\ud800")
            header[chance.choice(names)] = header.pop(key)
        case "twice":
            text = json.dumps(header)[:-1] + f", {json.dumps(key)}: {json.dumps(header[chance.choice((key, other))])}}}"
        case "metadata":
            header["__metadata__"] = chance.choice(_ODD)
        case _:
            text = json.dumps(header)
            odd = (text + " " * 77, " " + text, text + "x", text[:-1], "{}", "", "null", text.replace('"', "'"))
            text = chance.choice(odd)
    new = (json.dumps(header) if text is None else text).encode("utf-8", "surrogatepass")
    if chance.random() < 0.03:
        new = new.decode("utf-8", "replace").encode("utf-16")
    length = len(new)
    if chance.random() >= 0.97:
        length = chance.choice((0, 1, 2**63, 10**8, length + 1, max(0, length - 1)))
    path.write_bytes(struct.pack("<Q", length) + new + data)


def _shards(chance: random.Random, model: Path) -> None:
    """Names and the index of shards, or a whole file that becomes one."""
    file = model / "model.safetensors.index.json"
    single = model / "model.safetensors"
    if single.exists() and not file.exists():
        try:
            with safe_open(single, framework="pt") as opened:
                keys = list(opened.keys())
        except Exception:
            return
        file.write_text(json.dumps({"weight_map": dict.fromkeys(keys, single.name)}))
    if not os.path.isfile(file):
        return
    try:
        index = json.loads(file.read_text())
        places = index["weight_map"]
        key, shard = chance.choice(list(places.items()))
        (model / shard).lstat()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    new = chance.choice(("plan.safetensors", "scales.safetensors", "a b é.safetensors", "x" * 240 + ".safetensors"))
    odd = ("config.json", "README.md", "quantization", "x.bin", "\udcff.safetensors", "a\nb.safetensors")
    new = chance.choice((new, *odd))
    match chance.choice(("rename", "rename", "wrong", "copy", "drop", "add", "odd", "case")):
        case "rename":
            (model / shard).rename(model / new)
            index["weight_map"] = {each: new if of == shard else of for each, of in places.items()}
        case "wrong":
            wrong = ("", ".", "..", "x", "../model/x.safetensors", "/x", "\0", "\ud800", None, 5)
            places[key] = chance.choice([*places.values(), *wrong])
        case "copy":  # every tensor twice
            shutil.copyfile(model / shard, model / "copy.safetensors")
            places["copied"] = "copy.safetensors"
        case "drop":
            del places[key]
        case "add":
            places["more"] = shard
        case "odd":
            index[chance.choice(("weight_map", "metadata"))] = chance.choice(_ODD)
        case _:
            places[key] = shard.upper()
    file.write_text(json.dumps(index))


_CHANGES: tuple[Callable[[random.Random, Path], None], ...] = (
    *(_truncated, _bytes, _gone, _added, _added, _elsewhere, _json_value, _json_value),
    *(_config_value, _config_value, _config_value, _header, _header, _shards, _shards),
)
