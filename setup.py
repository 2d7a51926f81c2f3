"""The native library, for every Python, and README.md as package indexes show it; the rest is in pyproject.toml."""

import re
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

REPOSITORY = "https://github.com/niwaki/niwaki"
# Plain C functions, loaded by ctypes. Where they cannot be compiled, niwaki installs without them and uses torch
# (niwaki.packed.kernels).
KERNELS = Extension(
    "niwaki._kernels",
    [f"src/native/{name}.cpp" for name in ("kernels", "lanes", "whole", "strips", "panels", "decoding", "masks")],
    depends=[f"src/native/{name}.h" for name in ("products", "streams", "strips", "words")],
    extra_compile_args=["-std=c++17", "-O3", "-g0", "-fno-trapping-math"],
    extra_link_args=["-pthread"],
    language="c++",
    optional=True,
)


class BuildLibrary(build_ext):
    """In parallel, and with the suffix that all Pythons of a platform look for."""

    def build_extensions(self) -> None:
        """Sources side by side, which setuptools compiles one after the other."""
        compile_all = self.compiler.compile

        def side_by_side(sources: list[str], *given: object, **named: object) -> list[str]:
            with ThreadPoolExecutor() as pool:
                found = pool.map(lambda source: compile_all([source], *given, **named), sources)
                return [name for names in found for name in names]

        self.compiler.compile = side_by_side
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        """Such as niwaki/_kernels.so."""
        return str(Path(*fullname.split("."))) + EXTENSION_SUFFIXES[-1]


class BuildWheel(bdist_wheel):
    """For one platform and all Pythons."""

    def get_tag(self) -> tuple[str, str, str]:
        """Such as py3-none-linux_x86_64."""
        return "py3", "none", super().get_tag()[2]


def readme() -> str:
    """README.md with addresses for its links into the repository."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r'(\]\(|\b(?:src|srcset)=")(docs/figures/)', rf"\1{REPOSITORY}/raw/main/\2", text)
    return re.sub(r"(\]\()(?!\w+:|#)", rf"\1{REPOSITORY}/blob/main/", text)


setup(
    ext_modules=[KERNELS],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": BuildWheel},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
