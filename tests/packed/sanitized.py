"""All that the native kernels can do, on memory that ends where a packed matrix ends: run by test_sanitizers.py.

python sanitized.py LIBRARY [PATH]

From the instructions called PATH on, such as AVX512BW, or from the plainest.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import DynamicCache, StaticCache

import niwaki
from niwaki.packed import decoding, kernels
from niwaki.packed.matrix import in_strips, pack
from support.caches import CACHE
from support.decoding import block_by_block, counting
from support.models import random_tokens, sparse_model
from support.sparse import dense_of, in_whole_numbers, is_product, on_grid, sparse, vectors

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8)

found = kernels.open_library(sys.argv[1])
kernels.library = functools.cache(lambda: found)
first = kernels.Path[sys.argv[2]] if len(sys.argv) > 2 else kernels.Path.PORTABLE
paths = [path for path in kernels.paths() if path >= first]
for rows, columns, dtype, sparsity in itertools.product((1, 37), (1, 100, 192), DTYPES, (0.0, 0.6)):
    whole = dtype in (torch.int8, torch.uint8)
    for groups in (1, 3) if whole and columns == 192 else (1,):
        if whole:
            bits = 8 if dtype == torch.int8 else 4
            W, codes, scales = on_grid(rows, columns, groups, bits)
            packed = pack(W, codes, scales, bits)
            W = dense_of(codes, scales)
        else:
            W = sparse(rows, columns, sparsity, dtype)
            packed = pack(W)
        for path in paths:
            torch.set_num_threads(1 if rows == 1 else 2)
            assert torch.equal(kernels.expand(packed, path=path).to(packed.dtype), W.to(packed.dtype))
            for batch in (1, 2, 3, 5):
                x = vectors(batch, columns, torch.bfloat16 if batch % 2 else torch.float32)
                assert is_product(kernels.multiply(packed, x, path), x, W)

# All numbers of a matrix, without a mask.
for rows, (columns, groups), bits in itertools.product(
    (1, 4, 37), ((1, 1), (100, 1), (192, 3), (192, 1)), (2, 3, 4, 5, 6, 8)
):
    W, codes, scales = on_grid(rows, columns, groups, bits, zeros=0.1)
    packed, exact = pack(W, codes, scales, bits, whole=True), dense_of(codes, scales)
    for path, form in itertools.product(paths, (packed, in_strips(packed))):
        assert torch.equal(kernels.expand(form, path=path), W)
        for batch, rounded in itertools.product((1, 2, 3, 5, 9, 16), (False, True)):
            x = vectors(batch, columns)
            assert is_product(kernels.multiply(form, x, path, rounded), in_whole_numbers(x) if rounded else x, exact)
        odd = vectors(1, columns)
        odd[0, -1] = torch.nan
        assert kernels.multiply(form, odd, path, rounded=True).isnan().all()

# Numbers that a mask makes 0, up to the last bit of each.
for dtype, count in itertools.product((torch.int8, torch.bfloat16, torch.float32, torch.float64), (1, 8, 77, 70_001)):
    for path in paths:
        kept, which = torch.ones(count, dtype=dtype), torch.full(((count + 7) // 8,), 0x55, dtype=torch.uint8)
        assert kernels.mask_(kept, which, path)
        assert torch.equal(kept, (torch.arange(count) % 2 == 0).to(dtype))

# A token through each kind of block and through all of them, behind others, in caches that end where their numbers do.
decoding._LEAST_MORE, decoding._MORE = 1, 0.0
for case, dtype in itertools.product(("llama", "llama biases", "qwen3"), (torch.bfloat16, torch.float32)):
    with tempfile.TemporaryDirectory() as scratch:
        niwaki.pack(sparse_model(Path(scratch) / "model", case, dtype=dtype), Path(scratch) / "packed")
        loaded: Any = niwaki.load(Path(scratch) / "packed", "cpu")
    tokens = random_tokens(1, 4)
    for path in paths:
        kernels.best_path = functools.partial(kernels.Path, path)
        model = copy.deepcopy(loaded)
        for grows, at_once in ((True, True), (True, False), (False, False)):
            cache = DynamicCache() if grows else StaticCache(config=model.config, max_cache_len=5)
            alone = contextlib.nullcontext() if at_once else block_by_block()
            with torch.no_grad(), alone, counting() as steps:
                model(tokens, **{CACHE: cache})
                assert model(tokens[:, :1], **{CACHE: cache}).logits.isfinite().all()
            assert len(steps) == len(model.model.layers)  # all of them natively
