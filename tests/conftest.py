"""Shared by all tests; helpers are in support/, numerical problems in support/problems.py."""

import atexit
import gc
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator

# One thread for each process of tests: the matrices are tiny, and there is a process for each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before torch is imported: with spinning OpenMP threads, one other busy process on the machine makes
# small products 30 times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# transformers reads tiny files in a pool of threads, which takes a third of the time of loading a model.
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
# Forks of a process that has used tokenizers in parallel would say that they do not.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What is kept for a command that is repeated is not that of earlier tests.
if "HF_ASSETS_CACHE" not in os.environ:
    os.environ["HF_ASSETS_CACHE"] = tempfile.mkdtemp(prefix="niwaki-assets-")
    atexit.register(shutil.rmtree, os.environ["HF_ASSETS_CACHE"], ignore_errors=True)
# In memory where there is enough: a disk is waited for where a file replaces another. --basetemp keeps what is there.
if "TMPDIR" not in os.environ and os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="niwaki-tests-", dir="/dev/shm")
    atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)
    tempfile.tempdir = None  # it is looked for again

# What tests.support.made makes is that of this run.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["NIWAKI_MADE"] = tempfile.mkdtemp(prefix="niwaki-made-")
    atexit.register(shutil.rmtree, os.environ["NIWAKI_MADE"], ignore_errors=True)

import pytest
from hypothesis import settings

# transformers makes the same thousand regular expressions for each model that it reads or writes; Python keeps 512.
vars(re)["_MAXCACHE"] = 1 << 16

pytest.register_assert_rewrite("support")
pytest_plugins = ["support.command"]  # fixtures


def pytest_configure(config: pytest.Config) -> None:
    """Triton's interpreter, where there is no GPU. Also before Triton is imported, which torch itself does late."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # it only starts the others, which wait for it

    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """What is imported by now stays; to look through it for garbage again and again takes a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 60)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A command leaves signals to the system at its end, and these processes go on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks() -> Iterator[None]:
    """No test can see what is on the disk when the power fails, and on a busy machine that wait is half of the time."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_measuring_of_the_machine() -> None:
    from support.speed import measure_once

    measure_once()


# The same examples on every machine and in every run, however slow it is.
settings.register_profile("niwaki", derandomize=True, deadline=None)
settings.load_profile("niwaki")
