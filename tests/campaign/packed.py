"""Packed models that were damaged, or forged by someone who can also write digests."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import niwaki
from campaign.home import contents
from niwaki.errors import NiwakiError
from support.forks import command, forked, refused
from support.models import EMBEDDED_VOCABULARY, add_tokenizer, random_model, random_tokens, reference, with_zeros
from support.packed import SIZES, component_names, decode, read_file, seal, write_file, write_index
from support.sparse import model_on_a_grid

_home = Path()

#: Of each model the family, the dtype, and the number of scales for a row if it is on a grid.
_MODELS: dict[str, tuple[str, torch.dtype, int]] = {
    "single": ("llama", torch.float32, 0),
    "half": ("gpt2", torch.float16, 0),
    "experts": ("mixtral", torch.bfloat16, 0),
    "whole numbers": ("llama", torch.bfloat16, 1),
    "groups": ("llama", torch.float32, 2),
}
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**47, 2**63, 10**30, 1.0, 0.5, float("nan"), float("inf")),
    *("", "F32", "F16", "BF16", "I8", "U8", "../x.safetensors", "/etc/x.safetensors", ".safetensors", "\ud800", "\0"),
    *([], [0], [32, 32], [2**40, 2**40], {}, {"a": 1}, [[[[]]]], "x" * 300, "é" * 150 + ".safetensors"),
)


def prepare(place: Path) -> None:
    global _home
    _home = place
    for name, (family, dtype, groups) in _MODELS.items():
        dense = place / name / "dense"
        sizes: dict[str, Any] = {"dtype": dtype, "vocab_size": EMBEDDED_VOCABULARY}
        if groups > 1:
            model_on_a_grid(dense, family, size=64, hidden_size=128, intermediate_size=128, head_dim=32, **sizes)
        elif groups:
            model_on_a_grid(dense, family, **sizes)
        else:
            random_model(family, **sizes).save_pretrained(dense)
            with_zeros(dense, family, 0.6)
        add_tokenizer(dense)
        niwaki.pack(dense, place / name / "packed")
        stored = json.loads((place / name / "packed" / "packed.json").read_text())["tensors"]
        assert {each["groups"] for each in stored.values() if each["packed"]} == {groups}


class Forgery:
    """A packed model in a directory of its own, and ``chance``; each method changes it, and says if it stays valid."""

    def __init__(self, chance: random.Random, directory: Path, other: Path) -> None:
        self.chance, self.directory, self.other = chance, directory, other
        self.path = directory / "packed.json"

    @property
    def index(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.path.read_text())
        return values

    def write(self, index: dict[str, Any]) -> None:
        write_index(self.directory, index)

    def some(self, packed: bool = True) -> tuple[dict[str, Any], str, dict[str, Any]]:
        """The index, a key, and what the index has of it."""
        index = self.index
        key = self.chance.choice([key for key, each in index["tensors"].items() if each["packed"] >= packed])
        return index, key, index["tensors"][key]

    def component(self, key: str, stored: dict[str, Any], name: str, change: Callable[[bytearray], None]) -> None:
        """Changes the bytes of one of the tensors that ``key`` is stored as."""
        file = self.directory / stored["file"]
        tensors = read_file(file)
        dtype, shape, data = tensors[f"{key}.{name}"]
        changed = bytearray(data)
        change(changed)
        assert len(changed) == len(data)
        write_file(file, {**tensors, f"{key}.{name}": (dtype, shape, bytes(changed))})

    def values(self) -> bool:
        """Other numbers, finite ones."""
        _, key, stored = self.some()

        def change(data: bytearray) -> None:
            size = 1 if stored["groups"] else SIZES[stored["dtype"]]
            at = self.chance.randrange(stored["count"])
            number = self.chance.uniform(-1, 1)
            bits = {4: struct.pack("<f", number), 2: struct.pack("<f", number)[2:], 1: b"\x85"}[size]
            bits = struct.pack("<e", number) if stored["dtype"] == "F16" else bits
            data[size * at : size * (at + 1)] = bits

        self.component(key, stored, "values", change)
        return True

    def junk(self) -> bool:
        """Any bytes anywhere in values or mask: NaN, too many ones, something in the padding."""
        _, key, stored = self.some()

        def change(data: bytearray) -> None:
            at = self.chance.choice((self.chance.randrange(len(data)), len(data) - 8, 0))
            bits = self.chance.choice((b"\xff" * 8, b"\x7f" * 8, b"\x80\x7f" * 4, bytes(8), b"\x00\x7c" * 4, b"\x01"))
            data[at : at + len(bits)] = bits[: len(data) - at]

        self.component(key, stored, self.chance.choice(("values", "mask")), change)
        return False

    def mask(self) -> bool:
        """A one goes to another column, of any row."""
        _, key, stored = self.some()
        columns = stored["shape"][-2 if stored["transposed"] else -1]
        stride = (columns + 63) // 64 * 8

        def change(data: bytearray) -> None:
            places = [8 * row * stride + column for row in range(len(data) // stride) for column in range(columns)]
            ones = [place for place in places if data[place // 8] >> place % 8 & 1]
            zeros = [place for place in places if not data[place // 8] >> place % 8 & 1]
            for place in (self.chance.choice(ones), self.chance.choice(zeros)):
                data[place // 8] ^= 1 << place % 8

        self.component(key, stored, "mask", change)
        return True

    def scales(self) -> bool:
        _, key, stored = self.some()
        number = self.chance.choice((0.0, -0.0, -1.0, float("nan"), float("inf"), 1e38, 3e36, 1e-45, 1e-30, 0.5, 3.0))

        def change(data: bytearray) -> None:
            at = 4 * self.chance.randrange(len(data) // 4)
            data[at : at + 4] = struct.pack("<f", number)

        self.component(key, stored, "scales", change)
        return 0 < number < 4

    def exchange(self) -> bool:
        """Two tensors of the same form exchange their places."""
        index, key, stored = self.some(packed=False)
        kind = ("file", "dtype", "shape", "packed", "transposed", "groups")
        same = [k for k, each in index["tensors"].items() if all(each[name] == stored[name] for name in kind)]
        other = self.chance.choice(same)
        file = self.directory / stored["file"]
        tensors = read_file(file)
        names = zip(component_names(key, stored), component_names(other, stored), strict=True)
        for a, b in names:
            tensors[a], tensors[b] = tensors[b], tensors[a]
        write_file(file, tensors)
        index["tensors"][key], index["tensors"][other] = index["tensors"][other], stored
        self.write(index)
        return True

    def header(self) -> bool:
        """The header of a file of tensors."""
        file = self.directory / next(iter(self.index["tensors"].values()))["file"]
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        key = self.chance.choice([key for key in header if key != "__metadata__"])
        what = self.chance.choice(("dtype", "shape", "data_offsets", "rename", "remove", "twice", "text"))
        if what in header[key]:
            header[key][what] = self.chance.choice((*_ODD, *SIZES, header[key].get(what)))
            if isinstance(header[key]["shape"], list) and self.chance.random() < 0.3:
                header[key]["shape"] = self.chance.sample(header[key]["shape"], len(header[key]["shape"]))
        elif what == "rename":
            header[self.chance.choice([*header, "other"])] = header.pop(key)
        elif what == "remove":
            del header[key]
        text = json.dumps(header)
        if what == "twice":
            text = "{" + json.dumps({key: header[key]})[1:-1] + ", " + text[1:]
        elif what == "text":
            text = self.chance.choice(("[" * 5000, "", "\ufeff" + text, text[:-3], "9" * 5000, "{" * 99999, "null"))
        data = text.encode()
        size = self.chance.choice((len(data),) * 8 + (2**62, len(data) + 9))
        file.write_bytes(size.to_bytes(8, "little") + data + content[start:])
        return False

    def stored(self) -> bool:
        """What the index says of a tensor, and perhaps the file's header too, so that both agree."""
        index, key, stored = self.some(self.chance.random() < 0.8)
        before, name = dict(stored), self.chance.choice([*stored])
        related = {
            "dtype": [*SIZES],
            "shape": [stored["shape"][::-1], [1, *stored["shape"]], [*stored["shape"], 1], [0, 5], [2**47, 2**47, 0]],
            "count": [stored["count"] + n for n in (-64, -1, 1, 64)],
            "groups": [0, 1, 2, 3, 64],
        }
        stored[name] = self.chance.choice(related.get(name, [not stored[name], *_ODD]))
        if self.chance.random() < 0.2:
            stored[name] = self.chance.choice(_ODD)
        if self.chance.random() < 0.7:  # what the file has, in this form
            file = self.directory / before["file"]
            tensors = read_file(file)
            parts = [tensors.pop(each) for each in component_names(key, before)]
            names = component_names(key, stored)
            values = parts[-1][2]
            size = 1 if stored["groups"] else SIZES[stored["dtype"]]
            if stored["packed"] and name == "dtype":
                stored["count"] = len(values) // size - 64
            rows = parts[0][1][0]
            made = {
                f"{key}.mask": parts[0],
                f"{key}.scales": ("F32", (rows, stored["groups"]), bytes(4 * rows * stored["groups"])),
                f"{key}.values": ("I8" if stored["groups"] else stored["dtype"], (len(values) // size,), values),
                key: (stored["dtype"], tuple(stored["shape"]), parts[-1][2]),
            }
            if stored["groups"] and self.chance.random() < 0.8:
                scales = struct.pack("<f", 0.01) * rows * stored["groups"]
                made[f"{key}.scales"] = ("F32", (rows, stored["groups"]), scales)
            write_file(file, {**tensors, **{each: made[each] for each in names}})
        self.write(index)
        return False

    def json(self) -> bool:
        """Something else at any place of the index."""
        index = self.index
        place: Any = index
        while True:
            key = self.chance.choice([*place] if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or self.chance.random() < 0.1:
                break
            place = place[key]
        if self.chance.random() < 0.2 and isinstance(place, dict):
            del place[key]
        else:
            place[key] = self.chance.choice(_ODD)
        self.write(index)
        return False

    def text(self) -> bool:
        """What a JSON library reads in one way, and another in another way or not at all."""
        text = self.path.read_text()
        number = '"version": 7'
        changes = (
            *(text[: self.chance.randrange(len(text))], "[" * 100_000, "\ufeff" + text),
            text.replace('"shards"', '"config": "{}", "shards"', 1),
            text.replace('"dtype"', '"groups": 0, "dtype"', 1),
            text.replace('"index"', '"more": ' + "[" * 900 + "]" * 900 + ', "index"', 1),
            text.replace(number, '"version": ' + "9" * 5000),
            text.replace(number, number + self.chance.choice((".0", "e0", "0", "e999"))),
        )
        self.path.write_text(self.chance.choice(changes))
        return False

    def shard(self) -> bool:
        """What the index says of the dense model's file, by its header or beside it."""
        index = self.index
        shard = self.chance.choice(index["shards"])
        header = json.loads(shard["header"])
        key, other = self.chance.sample([key for key in header if key != "__metadata__"], 2)
        what = self.chance.choice(("exchange", "dtype", "offsets", "order", "name", "twice", "metadata", "text"))
        if what == "exchange":
            header[key], header[other] = header[other], header[key]
        elif what in ("dtype", "offsets"):
            field = "data_offsets" if what == "offsets" else what
            header[key][field] = self.chance.choice((header[other][field], *SIZES, *_ODD))
        elif what == "order":
            self.chance.shuffle(shard["keys"])
        elif what == "name":
            shard["name"] = self.chance.choice(("other.safetensors", *map(str, _ODD)))
        elif what == "twice":
            index["shards"].append(dict(shard))
        elif what == "metadata":
            header["__metadata__"] = self.chance.choice(_ODD)
        text = json.dumps(header)
        shard["header"] = self.chance.choice((text + "  ", " " + text, text[1:])) if what == "text" else text
        self.write(index)
        return False

    def config(self) -> bool:
        """The configuration, the same in both places."""
        index = self.index
        config = json.loads(index["config"])
        names = ("num_hidden_layers", "hidden_size", "vocab_size", "dtype", "model_type", "rope_theta")
        key = self.chance.choice(names)
        config[key] = self.chance.choice((1, 3, 64, "float16", "bfloat16", "float32", "gpt2", 500.0))
        index["config"] = json.dumps(config)
        mark = json.loads((self.directory / "config.json").read_text())["quantization_config"]
        (self.directory / "config.json").write_text(json.dumps({**config, "quantization_config": mark}))
        self.write(index)
        return False

    def swap(self) -> bool:
        """A file of another model."""
        name = self.chance.choice(("packed.json", "config.json", "packed-00001-of-00001.safetensors"))
        shutil.copyfile(self.other / name, self.directory / name)
        return False

    def cut(self) -> bool:
        file = self.chance.choice([*self.directory.glob("packed*")])
        content = bytearray(file.read_bytes())
        at = self.chance.choice((self.chance.randrange(len(content)), self.chance.randrange(min(9, len(content)))))
        kind = self.chance.choice(("cut", "grow", "flip", "append", "remove"))
        if kind == "cut":
            del content[at:]
        elif kind == "grow":
            content[at:at] = b"\0" * self.chance.choice((1, 8))
        elif kind == "flip":
            content[at] ^= 1 << self.chance.randrange(8)
        else:
            content += b"\0"
        file.write_bytes(content)
        if kind == "remove":
            file.unlink()
        return False


_CHANGES: tuple[Callable[[Forgery], bool], ...] = (
    *(Forgery.values, Forgery.junk, Forgery.mask, Forgery.scales, Forgery.exchange, Forgery.header, Forgery.stored),
    *(Forgery.stored, Forgery.stored, Forgery.json, Forgery.text, Forgery.shard, Forgery.config, Forgery.swap),
    Forgery.cut,
)


def case(chance: random.Random, place: Path) -> str:
    name, packed = chance.choice([*_MODELS]), place / "packed"
    shutil.copytree(_home / name / "packed", packed)
    forgery = Forgery(chance, packed, _home / chance.choice([*_MODELS]) / "packed")
    valid, done = True, []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        change = chance.choice(_CHANGES)
        # An earlier change may have left nothing to change here.
        with contextlib.suppress(Exception):
            valid &= change(forgery)
            done.append(change.__name__)
            continue
        valid = False
    sealed = chance.random() < 0.85
    if sealed:
        with contextlib.suppress(Exception):
            seal(packed)
    before = contents(packed)
    how = chance.choice((_generate, _unpack, _evaluate, _load))
    outcome = how(packed, place)
    what = f"{name} {done} {how.__name__}: {outcome}"
    assert contents(packed) == before, f"its input was changed: {what}"
    if outcome is None:
        return "right"
    assert not (place / "out").exists(), what
    assert not [path for path in place.iterdir() if path.name.startswith(".out")], what
    assert not (valid and sealed and done), f"a valid model is refused: {what}"
    return "refused"


def _dense(packed: Path, place: Path) -> Path:
    """The dense model, as the packed one says it is."""
    dense = add_tokenizer(shutil.copytree(packed, place / "dense", ignore=shutil.ignore_patterns("packed*")))
    write_file(dense / "model.safetensors", decode(packed))
    (dense / "config.json").write_text(json.loads((packed / "packed.json").read_text())["config"])
    return dense


def _unpack(packed: Path, place: Path) -> str | None:
    ended = command(["unpack", packed, place / "out"], place)
    if ended.code:
        return refused(ended)
    expected, found = decode(packed), {}
    for file in (place / "out").glob("*.safetensors"):
        load_file(file)  # which says if it is not valid
        found.update(read_file(file))
    assert found == expected, [key for key in expected if found.get(key) != expected[key]]
    return None


def _evaluate(packed: Path, place: Path) -> str | None:
    arguments = ("--text", "demo-held", "--length", "32", "--text-samples", "2", "--device", "cpu")
    ended = command(["eval", packed, *arguments], place)
    if ended.code:
        return refused(ended)
    dense = command(["eval", _dense(packed, place), *arguments], place)
    assert (dense.code, dense.out) == (0, ended.out), (ended, dense)
    return None


def _generate(packed: Path, place: Path) -> str | None:
    ended = command(["generate", packed, "The trees", "--tokens", "3", "--device", "cpu"], place)
    if ended.code:
        return refused(ended)
    decode(packed)
    assert ended.out.startswith("The trees"), ended
    assert "Traceback" not in ended.err, ended
    return None


def _load(packed: Path, place: Path) -> str | None:
    """Few vectors, for which the kernels are, and many."""

    @torch.no_grad()
    def work() -> None:
        try:
            model = niwaki.load(packed, "cpu", "float32")
        except NiwakiError as error:
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(error.exit_code) from None
        right = reference(_dense(packed, place))
        stored = json.loads((packed / "packed.json").read_text())["tensors"].values()
        rounded = any(each["groups"] and each["dtype"] != "F32" for each in stored)
        for tokens in (random_tokens(1, 3), random_tokens(2, 40)):
            found, expected = model(tokens).logits, right(tokens).logits
            assert torch.equal(found.isfinite(), expected.isfinite()), (found, expected)
            there = expected.isfinite()
            if there.any():
                off = (found[there] - expected[there]).abs().max()
                # Products with whole numbers do not round them, times their scale, to the model's half precision.
                assert off <= (2e-2 if rounded else 1e-4) * expected[there].abs().max(), off

    ended = forked(work)
    if ended.code in (1, 2) and ended.err.startswith("error: "):
        return refused(ended)
    assert ended.code == 0, f"{ended.code}: {ended.err.strip().splitlines()[-1:]}\n{ended.err[-2000:]}"
    return None
