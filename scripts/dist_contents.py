"""Fails unless the sdist and the wheel in a directory hold what they should: python scripts/dist_contents.py dist."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
#: Tracked files that the sdist does not have, and files that only the sdist has.
LEFT_OUT = {".ci/run", ".gitignore"}
GENERATED = {"PKG-INFO", "setup.cfg"}


def tracked() -> set[str]:
    """The names of the files that git has."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S607
    return set(listing.stdout.split("\0")) - {""}


def check_sdist(file: Path) -> None:
    """All that git has."""
    with tarfile.open(file) as archive:
        names = {str(PurePosixPath(*PurePosixPath(member.name).parts[1:])) for member in archive if member.isfile()}
    names = {name for name in names if ".egg-info/" not in name}
    same("the sdist", names - GENERATED, tracked() - LEFT_OUT)


def check_wheel(file: Path) -> None:
    """The package and the native library, for all Pythons of a platform."""
    with zipfile.ZipFile(file) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        information = f"{'-'.join(file.name.split('-')[:2])}.dist-info/"
        tags = [line for line in archive.read(information + "WHEEL").decode().splitlines() if line.startswith("Tag:")]
    python, abi, platform = file.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none"), file.name
    assert platform.startswith("manylinux_2_"), file.name
    assert tags == [f"Tag: py3-none-{platform}"], tags
    package = {name.removeprefix("src/") for name in tracked() if name.startswith("src/niwaki/")}
    same("the wheel", {name for name in names if not name.startswith(information)}, package | {"niwaki/_kernels.so"})
    assert information + "licenses/LICENSE" in names


def same(what: str, there: set[str], wanted: set[str]) -> None:
    """Fails with the names of the files that are not wanted or missing."""
    assert there == wanted, f"{what}: not wanted: {sorted(there - wanted)}; missing: {sorted(wanted - there)}"


def main() -> None:
    """One sdist and one wheel."""
    (sdist,) = Path(sys.argv[1]).glob("*.tar.gz")
    (wheel,) = Path(sys.argv[1]).glob("*.whl")
    check_sdist(sdist)
    check_wheel(wheel)
    for file in (sdist, wheel):
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
