"""What ``niwaki bench`` measured."""

import statistics
from dataclasses import dataclass
from typing import Annotated

import msgspec

from niwaki.records.data import Count, Fraction, JsonFile, Name, Positive, Seconds
from niwaki.records.wording import counted, size

Rate = Annotated[float, msgspec.Meta(ge=1e-12, le=1e12)]


@dataclass(frozen=True)
class Speed:
    """The speed and memory of one form of a model, measured in a process of its own.

    Attributes:
        weights: "dense" or "packed", or "gguf" for a file in llama.cpp.
        disk: Bytes of the weight files; ``resident`` is the size of all weights in memory, in bytes.
        peak: Largest memory use in bytes: of the process, or of torch on the GPU.
        load: Seconds to load the model, from files that may be in the system's cache.
        first_token: Median time in seconds from the prompt to the first token.
        tokens_per_second: Median rate after the first token, for one sequence; the rates range from ``slowest`` to
            ``fastest``.
        one_by_one: Packed matrices in blocks that transformers computed, on a CPU with native kernels, which compute
            blocks whole where they can.
        read: Bytes of weights that are read for each token; 0 where that depends on the token.
        products: The share of a token's time that native products with weights take; 0 where there are none.
    """

    weights: Name
    dtype: Name
    disk: Count
    resident: Count
    peak: Count
    load: Seconds
    first_token: Seconds
    tokens_per_second: Rate
    slowest: Rate
    fastest: Rate
    one_by_one: Count = 0
    read: Count = 0
    products: Fraction = 0

    @classmethod
    def of(
        cls, form: tuple[str, str], sizes: tuple[int, int, int], load: float, first: list[float], rest: list[float]
    ) -> "Speed":
        """That of some runs, of which one has warmed up: seconds to the ``first`` token, and for each of the ``rest``.

        ``form`` is the weights and the dtype, ``sizes`` are those on disk, in memory and at the peak.
        """
        middle, low, high = 1 / statistics.median(rest[1:]), 1 / max(rest[1:]), 1 / min(rest[1:])
        return cls(*form, *sizes, load, statistics.median(first[1:]), middle, low, high)


@dataclass(frozen=True)
class SpeedRecord(JsonFile):
    """What ``niwaki bench`` measured, where and with which libraries.

    Attributes:
        prompt: Tokens in the prompt, after which ``tokens`` were generated, ``repeats`` times.
        threads: Threads of torch, on a CPU.
        kernels: The kernels that computed with packed weights on a CPU.
    """

    model: str
    prompt: Positive
    tokens: Positive
    repeats: Positive
    device: str
    threads: Count
    kernels: str
    command: str
    speeds: Annotated[list[Speed], msgspec.Meta(min_length=1, max_length=100)]
    versions: dict[str, str]

    def table(self) -> list[list[str]]:
        """A table for people: the heading, then a row for each form of the model."""
        table = [["weights", "computed in", "on disk", "in memory", "peak", "loaded in", "first token", "tokens/s"]]
        for speed in self.speeds:
            sizes = [size(count) for count in (speed.disk, speed.resident, speed.peak)]
            times = [f"{speed.load:.2f} s", f"{speed.first_token * 1000:,.1f} ms", f"{speed.tokens_per_second:,.2f}"]
            table.append([speed.weights, speed.dtype, *sizes, *times])
        return table

    def conditions(self) -> str:
        """What was measured where, in words."""
        where = self.device
        if where == "cpu":
            where = counted(self.threads, "thread")
            packed = [speed.one_by_one for speed in self.speeds if speed.weights == "packed"]
            if packed:
                where += f"; packed weights: {self.kernels}"
            if any(packed):
                where += f", for {counted(max(packed), 'matrix', 'matrices')} one by one in blocks of transformers"
        rates = [
            f"{speed.read * speed.tokens_per_second / 1e9:.1f} ({speed.weights})" for speed in self.speeds if speed.read
        ]
        where += f"; weights are read at {' and '.join(rates)} GB/s" if rates else ""
        shares = [f"{100 * speed.products:.0f} %" for speed in self.speeds if speed.products]
        where += f"; native products are {' and '.join(shares)} of a token's time" if shares else ""
        prompt = counted(self.prompt, "token")
        apart = max(speed.fastest / speed.slowest - 1 for speed in self.speeds)
        noise = f", tokens/s up to {100 * apart:.2g} % apart" if self.repeats > 1 else ""
        return f"a prompt of {prompt}, {self.tokens} written, the median of {self.repeats}{noise}; {where}"
