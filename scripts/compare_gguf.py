"""What llama.cpp's own converter makes of the models of all types that niwaki exports: tests/exports/converter.json.

    python scripts/compare_gguf.py DIR     # of llama.cpp, such as vendor/llama.cpp in the sdist of llama-cpp-python

Tokenizers are left out: the converter does not know that of the tests.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def convert(model: Path, out: Path) -> None:
    """Writes ``model`` as a file, by the converter."""
    import gguf

    conversion: Any = importlib.import_module("conversion")
    base = importlib.import_module("conversion.base")
    config = base.ModelBase.load_hparams(model, False)
    kind = conversion.get_model_class(base.get_model_architecture(config, base.ModelType.TEXT))
    kind.no_mtp = True  # as with --no-mtp: models of the tests have no blocks for further tokens
    made = kind(model, gguf.LlamaFileType.ALL_F32, out, eager=True, model_name="model")
    for each in (made, getattr(made, "impl", made)):
        each.set_vocab = each._set_vocab_none
    made.write()


def main(llama_cpp: str) -> None:
    """Writes what comes of all models, by the converter in ``llama_cpp``."""
    sys.path[:0] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    from support.gguf_files import summary
    from support.models import FEW_TOKENS, FOR_LLAMA_CPP, add_small_tokenizer, edit_json, random_model

    found: dict[str, Any] = {}
    for case in FOR_LLAMA_CPP:
        with tempfile.TemporaryDirectory() as place:
            source, out = Path(place) / "model", Path(place) / "model.gguf"
            random_model(case, vocab_size=FEW_TOKENS).save_pretrained(source)
            add_small_tokenizer(source)
            if case == "cohere2":
                edit_json(source / "config.json", rotary_pct=1.0)  # which old files have
            convert(source, out)
            found[case] = summary(out)
    lines = (f"{json.dumps(case)}: {json.dumps(each)}" for case, each in found.items())
    (ROOT / "tests" / "exports" / "converter.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


main(sys.argv[1])
