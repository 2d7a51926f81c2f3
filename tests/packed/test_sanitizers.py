"""The native kernels under AddressSanitizer and UndefinedBehaviorSanitizer: they read and write what is theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import niwaki
import support
from support.covering import FULL

SOURCES = sorted((Path(niwaki.__file__).parents[1] / "native").glob("*.cpp"))
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-shared", "-fPIC"]


def preloaded() -> str:
    """The libraries of g++ that have to be there before all others; "" where they are missing."""
    if shutil.which("g++") is None or not SOURCES:
        return ""
    names = ("libasan.so", "libubsan.so")
    asked = [subprocess.run(["g++", f"-print-file-name={n}"], capture_output=True, text=True).stdout for n in names]
    paths = [path.strip() for path in asked]
    return " ".join(paths) if all(Path(path).is_absolute() for path in paths) else ""


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="`make campaign` runs it")
@pytest.mark.parametrize("emulated", [False, True], ids=["own instructions", "AVX-512 in plain C++"])
def test_no_access_out_of_bounds(emulated: bool, tmp_path: Path) -> None:
    if not (libraries := preloaded()):
        pytest.skip("no g++ with sanitizers")
    header = Path(support.__file__).with_name("avx512.h")
    flags = [f'-DNIWAKI_EMULATE="{header}"'] if emulated else []
    library = tmp_path / "kernels.so"
    # With -O1 to compile them takes five times as long, and to run them hardly less.
    options = ["-std=c++17", "-O0", "-g1", *SANITIZE, *flags, "-pthread"]
    subprocess.run(["g++", *options, "-o", library, *SOURCES], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": libraries,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",  # or small objects of Python would share their memory
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    script = Path(__file__).with_name("sanitized.py")
    # What is not emulated is the same code in both.
    arguments = [sys.executable, str(script), str(library), *(["AVX512BW"] if emulated else [])]
    ran = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "runtime error" not in ran.stderr
