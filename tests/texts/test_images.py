"""Calibration on images: what blocks receive is what they receive in the whole model, run by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMultimodalLM, CLIPImageProcessorPil, LlavaProcessor

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CalibrationError, NiwakiError, UnsupportedModelError, UsageError
from niwaki.models.gram_capture import InputGram
from niwaki.models.interface import Inputs
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import load_tokenizer
from niwaki.options import Calibration, Compute
from niwaki.records.record import Record
from niwaki.runs.store import WeightStore
from niwaki.texts import conversations
from support.models import message, save_model_with_tokenizer, save_random

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
PATCHED = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
IMAGE, START, END = 60, 61, 62
SPECIAL = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 63}
TURNING = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
KINDS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **SIGHT, "image_size": 16, "patch_size": 8},
        "image_token_index": IMAGE,
    },
    "idefics3": {  # as SmolVLM
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {**SIGHT, "image_size": 16, "patch_size": 4},
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
    "gemma3": {  # whose images see all of themselves
        "text_config": {"model_type": "gemma3_text", **TEXT, "sliding_window": 6},
        "vision_config": {"model_type": "siglip_vision_model", **SIGHT, "image_size": 16, "patch_size": 4},
        "image_token_index": IMAGE,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {  # whose blocks have embeddings of their own too, and share keys and values
        "text_config": TEXT
        | {"sliding_window": 6, "global_head_dim": 8, "use_bidirectional_attention": "vision"}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 1}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "vision_config": {**SIGHT, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4}
        | {"pooling_kernel_size": 2, "position_embedding_size": 16},
        "image_token_id": IMAGE,
    },
    "qwen2_vl": {
        "text_config": TEXT | TURNING,
        "vision_config": PATCHED | {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        **SPECIAL,
    },
    "qwen2_5_vl": {
        "text_config": TEXT | TURNING,
        "vision_config": PATCHED
        | {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "window_size": 16}
        | {"fullatt_block_indexes": [1]},
        **SPECIAL,
    },
    "qwen3_vl": {  # which adds what it sees to the outputs of the first two blocks too
        "text_config": TEXT | {"rope_parameters": TURNING["rope_parameters"] | {"mrope_interleaved": True}},
        "vision_config": PATCHED
        | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "deepstack_visual_indexes": [0, 1]},
        **SPECIAL,
    },
}


def samples(kind: str) -> list[Inputs]:
    """Two of one length with other images, one that is longer, and one without an image."""
    chance = torch.Generator().manual_seed(0)
    made: list[Inputs] = []
    for before, after, images in ((3, 5, 1), (4, 4, 1), (6, 9, 2), (8, 0, 0)):
        image = [START, *[IMAGE] * 4, END]
        text = torch.randint(1, 60, (before + after,), generator=chance).tolist()
        ids = torch.tensor([[*text[:before], *(image * images), *text[before:]]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images and kind.startswith("qwen"):
            inputs["pixel_values"] = torch.randn(16 * images, 96, generator=chance)
            inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * images)
            inputs["mm_token_type_ids"] = (ids == IMAGE).int()
        elif images and kind == "gemma4":
            inputs["pixel_values"] = torch.rand(images, 16, 48, generator=chance)
            inputs["image_position_ids"] = torch.cartesian_prod(*[torch.arange(4)] * 2).expand(images, -1, -1)
        elif images:
            shape = (1, images, 3, 16, 16) if kind == "idefics3" else (images, 3, 16, 16)
            inputs["pixel_values"] = torch.randn(shape, generator=chance)
        if kind == "gemma3":
            inputs["token_type_ids"] = (ids == IMAGE).long()
        if kind == "gemma4":
            inputs["mm_token_type_ids"] = (ids == IMAGE).long()
        made.append(inputs)
    return made


def save(path: Path, kind: str) -> Path:
    return save_random(path, AutoConfig.for_model(kind, **KINDS[kind]), AutoModelForMultimodalLM)


@torch.no_grad()
def whole_grams(path: Path, name: str, inputs: list[Inputs]) -> list[Tensor]:
    """X^T X / tokens of the matrix called ``name`` in each block, by hooks on the whole model."""
    model = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    seen: list[list[Tensor]] = [[] for _ in range(TEXT["num_hidden_layers"])]
    for where, module in model.named_modules():
        if where.endswith(name) and isinstance(module, nn.Linear) and "vision" not in where and "visual" not in where:
            number = int(where.split("layers.")[1].split(".")[0])
            module.register_forward_pre_hook(lambda _, given, at=seen[number]: at.append(given[0].flatten(0, -2)))
    for each in inputs:
        model(**each)
    rows = [torch.cat(each).double() for each in seen]
    return [(X.T @ X / len(X)).float() for X in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_blocks_receive_what_they_do_in_the_whole_model(tmp_path: Path, kind: str) -> None:
    path, inputs = save(tmp_path / "model", kind), samples(kind)
    model = StreamedModel(Checkpoint(path), "cpu", "float32")
    states = model.embed(inputs)
    grams: list[list[InputGram]] = []
    for block in model.stream():
        grams.append(block.input_grams(states))
        block.advance(states)
    for name in ("q_proj", "down_proj"):
        expected = whole_grams(path, name, inputs)
        for number, found in enumerate(grams):
            (gram,) = (each for each in found if any(n.endswith(name) for n in each.names))
            assert gram.tokens == sum(each["input_ids"].numel() for each in inputs)
            torch.testing.assert_close(gram.H, expected[number], rtol=2e-4, atol=2e-4)


# The files, and the whole way


class Processor:
    """Makes of messages what a model's own one would, with a picture's bytes as its pixels."""

    image_processor = True

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> dict[str, Tensor]:
        ids: list[int] = []
        pictures: list[Tensor] = []
        for part in (part for turn in messages for part in turn["content"]):
            if part["type"] == "text":
                ids += [ord(letter) % 60 for letter in part["text"]]
            else:
                ids += [START, *[IMAGE] * 4, END]
                seed = int.from_bytes(Path(part["path"]).read_bytes()[:4], "little")
                pictures.append(torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(seed)))
        pixels = {"pixel_values": torch.stack(pictures)} if pictures else {}
        return {"input_ids": torch.tensor([ids]), **pixels}


def chats(folder: Path, count: int = 5) -> Path:
    """A file of conversations of different lengths, and pictures in a folder beside it; the last one has none."""
    (folder / "pictures").mkdir(parents=True)
    lines = []
    for number in range(count):
        (folder / "pictures" / f"{number}.png").write_bytes(bytes([number] * 4))
        image = {"type": "image", "path": f"pictures/{number}.png"}
        question = [
            *[image] * (number % 3 if number < count - 1 else 0),
            {"type": "text", "text": "What is it?" + "!" * number},
        ]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "A cat."}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return folder / "chats.jsonl"


@pytest.fixture
def llava(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model and a file of conversations, which a processor reads that is here."""
    monkeypatch.setattr(conversations, "_load_processor", lambda *_: Processor())
    return save(tmp_path / "model", "llava"), chats(tmp_path / "data")


def run(model: Path, out: Path, file: Path, effort: str = "fast", **options: Any) -> Record:
    return niwaki.prune(model, out, 0.5, effort=effort, calibration=str(file), compute="cpu", **options)


@pytest.mark.parametrize("effort", ["fast", "balanced", "best", "balanced:epochs=0.5"])
@pytest.mark.slow
def test_a_model_is_pruned_on_images(tmp_path: Path, llava: tuple[Path, Path], effort: str) -> None:
    model, file = llava
    record = run(model, tmp_path / "out", file, effort, solver="sparsegpt")
    assert (record.calibration["samples"], record.calibration["images"]) == (5, 3)
    assert len(record.matrices) == 21
    assert record.sparsity == pytest.approx(0.5)
    assert any("have 17 to 31 tokens" in note for note in record.notes)
    assert any("5 conversations, fewer than 128 samples" in note for note in record.notes)
    assert any("perplexity was not measured" in note for note in record.notes)
    left_out = [note for note in record.notes if "what needs text is left out" in note]
    assert ("allocation error" in left_out[0]) == (effort != "fast")
    assert "5 conversations with 3 images of chats.jsonl" in (tmp_path / "out" / "README.md").read_text()
    again = run(model, tmp_path / "again", chats(tmp_path / "same"), effort, solver="sparsegpt")
    assert again.calibration["tokens_sha256"] == record.calibration["tokens_sha256"]
    assert weights(tmp_path / "again") == weights(tmp_path / "out")


def weights(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_pictures_decide_and_memory_does_not(tmp_path: Path, llava: tuple[Path, Path]) -> None:
    model, file = llava
    first = run(model, tmp_path / "out", file)
    niwaki.prune(
        model, tmp_path / "little", 0.5, effort="fast", calibration=str(file), compute=Compute("cpu", max_memory=1)
    )
    assert weights(tmp_path / "out") == weights(tmp_path / "little")
    (file.parent / "pictures" / "1.png").write_bytes(b"other")
    other = run(model, tmp_path / "other", file)
    assert first.calibration["tokens_sha256"] != other.calibration["tokens_sha256"]
    assert weights(tmp_path / "out") != weights(tmp_path / "other")


@pytest.mark.slow
def test_a_stopped_run_resumes(tmp_path: Path, llava: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = llava
    run(model, tmp_path / "whole", file, "balanced")
    written = WeightStore.finish

    def stop(store: WeightStore, block: int, *others: Any) -> None:
        written(store, block, *others)
        if block == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WeightStore, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            run(model, tmp_path / "out", file, "balanced")
    record = run(model, tmp_path / "out", file, "balanced")
    assert record.resumed == [2]
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def user(*content: dict[str, str]) -> str:
    return json.dumps({"messages": [{"role": "user", "content": content}]})


@pytest.mark.slow
def test_conversations_that_are_refused(tmp_path: Path, llava: tuple[Path, Path]) -> None:
    """With the line, before anything is written."""
    model, file = llava
    good = file.read_text()
    for line, said in (
        (user({"type": "image", "path": "no.png"}), "no image"),
        (user({"type": "image", "url": "a"}), "unknown field `url`"),
        (user({"type": "audio", "path": "a"}, {"type": "image", "path": "x"}), "audio"),
        ('{"text": "a"}', "no field 'messages'"),
        (json.dumps({"messages": [{"role": "user", "content": "a" * 65}]}), "65 is more than the model's 64"),
    ):
        file.write_text(f"{good}\n{line}\n")
        text = message(lambda: run(model, tmp_path / "out", file), NiwakiError)
        assert f"{file}, line 6: " in text
        assert said in text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model"]


@pytest.mark.slow
def test_what_is_for_text_is_refused(tmp_path: Path, llava: tuple[Path, Path]) -> None:
    model, file = llava[0], str(llava[1])
    for options, said in (
        ({"text": file, "length": 32}, "--length is for windows of text"),
        ({"text": file, "order": "random"}, "--order is for windows of text"),
        ({"text": file, "bos": False}, "--no-bos is for windows of text"),
        ({"text": [file, "demo"]}, "give it alone"),
    ):
        calibration = Calibration(**options)
        text = message(lambda c=calibration: niwaki.prune(model, tmp_path / "out", 0.5, calibration=c), UsageError)  # type: ignore[misc]
        assert said in text
    text = message(lambda: niwaki.shrink(model, tmp_path / "out", neurons=0.5, calibration=file), UsageError)
    assert "has images, and only prune calibrates on images" in text
    record = run(model, tmp_path / "out", Path(file), "heal:epochs=0")
    assert any("skipping the effort's healing" in note and "calibrated on images" in note for note in record.notes)


def test_a_model_of_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = save_model_with_tokenizer(tmp_path / "model"), chats(tmp_path / "data")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "PIL" else pytest.fail(name))
    assert "need an extra: pip install pillow torchvision" in message(
        lambda: run(model, tmp_path / "out", file), CalibrationError
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    assert "has no processor of images" in message(lambda: run(model, tmp_path / "out", file), CalibrationError)


def test_the_tower_has_to_be_there(tmp_path: Path, llava: tuple[Path, Path]) -> None:
    model, file = llava
    values = load_file(model / "model.safetensors")
    key = next(key for key in values if "vision" in key and key.endswith("q_proj.weight"))
    values[f"{key}.other"] = values.pop(key)
    save_file(values, model / "model.safetensors", {"format": "pt"})
    text = message(lambda: run(model, tmp_path / "out", file), UnsupportedModelError)
    assert "q_proj.weight' in its files in a way that niwaki does not follow; calibrate on a text" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model"]


@pytest.mark.slow
def test_with_a_processor_of_transformers(tmp_path: Path) -> None:
    """From pictures on the disk to a pruned model that transformers loads."""
    image = pytest.importorskip("PIL.Image")
    tokenizer = load_tokenizer(locate_model("demo"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    config = AutoConfig.for_model("llava", **KINDS["llava"])
    config.text_config.vocab_size, config.image_token_index = len(tokenizer), len(tokenizer) - 1
    model = save_random(tmp_path / "model", config, AutoModelForMultimodalLM)
    sizes: dict[str, Any] = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(**sizes),
        tokenizer=tokenizer,
        patch_size=8,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template="{% for each in messages %}{% for part in each['content'] %}"
        "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}",
    ).save_pretrained(model)
    file = chats(tmp_path / "data")
    for number, path in enumerate(sorted((tmp_path / "data" / "pictures").iterdir())):
        image.effect_noise((20 + number, 30), 50.0).convert("RGB").save(path)
    record = run(model, tmp_path / "out", file)
    assert record.calibration["images"] == 3
    AutoModelForMultimodalLM.from_pretrained(tmp_path / "out")
    (tmp_path / "data" / "pictures" / "1.png").write_bytes(b"no picture")
    text = message(lambda: run(model, tmp_path / "other", file), CalibrationError)
    assert "line 2: the model's processor fails: cannot identify image file" in text
