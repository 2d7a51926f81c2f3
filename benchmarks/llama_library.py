"""llama.cpp's library, as node-llama-cpp has it: what llama-quantize does, and predictions, without JavaScript.

The structures are those of llama.h in llama.cpp's release v0.5.0, which the functions that give default values are
checked against.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import common  # noqa: F401 - first: it sets what OpenMP reads when torch is loaded
import gguf
import numpy as np
import torch
from torch import Tensor

_OPAQUE = 1024  # more bytes than any structure of parameters has: a callee reads the first of them


class _Power(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t))


class _Quantization(ctypes.Structure):
    """`llama_model_quantize_params`."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("nthread", "ftype", "output_tensor_type", "token_embedding_type")),
        *((name, ctypes.c_bool) for name in ("allow_requantize", "quantize_output_tensor", "only_copy", "pure")),
        *((name, ctypes.c_bool) for name in ("keep_split", "dry_run")),
        ("imatrix", ctypes.POINTER(_Power)),
        *((name, ctypes.c_void_p) for name in ("kv_overrides", "tt_overrides", "prune_layers")),
        ("max_buf_size", ctypes.c_size_t),
    )


class _Context(ctypes.Structure):
    """The first members of `llama_context_params`, and room for the others."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        ("others", ctypes.c_byte * _OPAQUE),
    )


class _Model(ctypes.Structure):
    """`llama_model_params`, as it comes."""

    _fields_ = (("all", ctypes.c_byte * _OPAQUE),)


class _Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


class LlamaCpp:
    """The library below a directory that npm has installed node-llama-cpp in."""

    def __init__(self, peer: Path) -> None:
        (library,) = peer.glob("node_modules/@node-llama-cpp/*/bins/*/libllama.v*.so")
        (ggml,) = library.parent.glob("libggml.v*.so")
        ctypes.CDLL(str(ggml), ctypes.RTLD_GLOBAL).ggml_backend_load_all_from_path(str(library.parent).encode())
        self._library = llama = ctypes.CDLL(str(library))
        llama.llama_model_quantize_default_params.restype = _Quantization
        llama.llama_model_default_params.restype = _Model
        llama.llama_context_default_params.restype = _Context
        llama.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
        for name in ("model_load_from_file", "init_from_model", "get_memory", "model_get_vocab"):
            getattr(llama, f"llama_{name}").restype = ctypes.c_void_p
        self._silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        llama.llama_log_set(self._silent, None)

    def quantize(self, dense: Path, out: Path, mixture: str, importance: dict[str, Tensor]) -> None:
        """What `llama-quantize --imatrix` does, for the mean squares of the inputs of each tensor."""
        given = self._library.llama_model_quantize_default_params()
        assert (given.ftype, given.nthread, given.quantize_output_tensor) == (gguf.LlamaFileType.MOSTLY_Q8_0, 0, True)
        of = [
            _Power(name.encode(), ctypes.cast(power.data_ptr(), ctypes.POINTER(ctypes.c_float)), power.numel())
            for name, power in importance.items()
        ]
        given.imatrix, given.nthread = (_Power * (len(of) + 1))(*of), torch.get_num_threads()
        given.ftype = getattr(gguf.LlamaFileType, f"MOSTLY_{mixture}")
        assert not self._library.llama_model_quantize(str(dense).encode(), str(out).encode(), ctypes.byref(given))

    def logits(self, file: Path, windows: Tensor) -> Iterator[Tensor]:
        """(tokens, words) float32 after each token of each of the ``windows`` (windows, tokens)."""
        llama, (_, length) = self._library, windows.shape
        model = ctypes.c_void_p(
            llama.llama_model_load_from_file(str(file).encode(), llama.llama_model_default_params())
        )
        assert model.value, f"llama.cpp does not load {file}"
        words = llama.llama_vocab_n_tokens(ctypes.c_void_p(llama.llama_model_get_vocab(model)))
        given = llama.llama_context_default_params()
        assert (given.n_batch, given.n_ubatch, given.n_seq_max) == (2048, 512, 1)
        given.n_ctx, given.n_batch, given.n_ubatch = 256 * -(-length // 256), length, length
        context = ctypes.c_void_p(llama.llama_init_from_model(model, given))
        llama.llama_set_n_threads(context, torch.get_num_threads(), torch.get_num_threads())
        place, one = np.arange(length, dtype=np.int32), np.ones(length, np.int32)
        zero = np.zeros(1, np.int32)
        sequences, every = np.full(length, zero.ctypes.data, np.uint64), np.ones(length, np.int8)
        for window in windows:
            tokens = window.numpy().astype(np.int32)
            parts = (tokens, None, place, one, sequences, every)
            llama.llama_memory_clear(ctypes.c_void_p(llama.llama_get_memory(context)), True)
            batch = _Batch(length, *(None if part is None else part.ctypes.data for part in parts))
            assert not llama.llama_decode(context, batch)
            found = np.ctypeslib.as_array(llama.llama_get_logits(context), (length, words))
            yield torch.from_numpy(found.copy())
        llama.llama_free(context)
        llama.llama_model_free(model)
