"""Shared by all tests; numerical problems are made in problems.py."""

import os

# Before torch is imported: with spinning OpenMP threads, one other busy process on the machine makes
# small products 30 times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from hypothesis import settings

# Triton's interpreter, where there is no GPU. Also before Triton is imported, which torch itself does late.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples on every machine and in every run, however slow it is.
settings.register_profile("niwaki", derandomize=True, deadline=None)
settings.load_profile("niwaki")
