"""Instructions of the kernel for packed matrices, counted in what compilers make of it. Needs no GPU.

    python benchmarks/gpu_instructions.py --record benchmarks/results/gpu_instructions.json

Triton compiles the kernel as :func:`niwaki.packed.gpu.multiply` would, and its disassembler shows the loop. A turn of
it is 64 positions for each lane. It waits where it uses something that it has asked for since the last wait: the loads
between two waits are in flight together.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import common
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from niwaki.packed import gpu

POSITIONS = 64
#: The dtype of values and inputs as Triton calls it, and the dtype of the matrix.
KINDS = {
    "float16": ("fp16", "fp16", torch.float16),
    "bfloat16": ("bf16", "bf16", torch.bfloat16),
    "float32": ("fp32", "fp32", torch.float32),
    "int8": ("i8", "fp16", torch.float16),
}


def compiled(architecture: int, rows: int, vectors: int, kind: str) -> bytes:
    """The program for a GPU, for matrices whose numbers of rows and columns are multiples of 16."""
    values, inputs, dtype = KINDS[kind]
    kernel, scaled = gpu._by_tiles, kind == "int8"
    chosen = gpu.constants(rows, vectors, dtype, dtype) | {"SCALED": scaled} | ({} if scaled else {"scales": None})
    pointers = {"mask": "*u32", "values": f"*{values}", "starts": "*i64", "scales": "*fp32"}
    pointers |= {"x": f"*{inputs}", "y": f"*{inputs}"}
    names = kernel.arg_names
    types = dict.fromkeys(names, "i32") | pointers | dict.fromkeys(chosen, "constexpr")
    even = [name for name in names if name in {*pointers, "rows", "columns", "words"} - chosen.keys()]
    source = ASTSource(
        kernel,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in chosen.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    options = {"num_warps": chosen["WARPS"], "enable_fp_fusion": True, "num_stages": 2}
    program: bytes = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).asm["cubin"]
    return program


def disassembled(program: bytes) -> tuple[list[str], int]:
    """The instructions of the longest loop, and the registers of a lane."""
    tools = triton.knobs.nvidia
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program)
        file.flush()
        # The disassembler warns about the format of each file.
        quiet: dict[str, Any] = {"text": True, "stderr": subprocess.DEVNULL}
        text = subprocess.check_output([tools.nvdisasm.path, "-c", file.name], **quiet)
        usage = subprocess.check_output([tools.cuobjdump.path, "-res-usage", file.name], **quiet)
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[list[str]] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append(found[1])
            target = re.search(r"\bBRA `\((\.L_\w+)\)", found[1])
            if target and target[1] in labels:
                loops.append(instructions[labels[target[1]] :])
    registers = re.search(r"REG:(\d+)", usage)
    assert registers
    return max(loops, key=len), int(registers[1])


def waits(loop: list[str]) -> int:
    """How often a turn of the loop waits for memory."""
    flying: set[int] = set()
    counted = 0
    for turn in range(2):  # what the first one asks for at its end, the second one may wait for
        for instruction in loop:
            name, _, operands = re.sub(r"^@!?U?P\d+ ", "", instruction).partition(" ")
            target, _, sources = operands.partition(",") if not name.startswith("ST") else ("", "", operands)
            if flying & {int(register) for register in re.findall(r"\bR(\d+)", sources)}:
                flying.clear()
                counted += turn
            if name.startswith("LDG.") and (first := re.match(r"R(\d+)", target)):
                width = int(size[1]) // 32 if (size := re.search(r"\.(64|128)$", name)) else 1
                flying |= set(range(int(first[1]), int(first[1]) + width))
    return counted


def main() -> None:
    """Compiles, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--architectures", nargs="*", type=int, default=[80, 89, 90])
    parser.add_argument("--rows", nargs="*", type=int, default=[1024, 4096, 8192])
    parser.add_argument("--vectors", nargs="*", type=int, default=[1, 2, 4, 16])
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=["float16", "bfloat16", "int8"])
    parser.add_argument("--record", type=Path, help="write JSON there")
    arguments = parser.parse_args()
    print(f"{'':>9} {'vectors':>8} {'rows':>6} {'sm':>4} {'instructions':>13} {'waits':>6} {'registers':>10}")
    results: list[dict[str, Any]] = []
    for kind in arguments.kinds:
        for vectors in arguments.vectors:
            for rows in arguments.rows:
                for architecture in arguments.architectures:
                    loop, registers = disassembled(compiled(architecture, rows, vectors, kind))
                    count, waited = len(loop) / POSITIONS, waits(loop)
                    print(
                        f"{kind:>9} {vectors:8} {rows:6} {architecture:4} {count:13.2f} {waited:6} {registers:10}",
                        flush=True,
                    )
                    case = {"kind": kind, "vectors": vectors, "rows": rows, "architecture": architecture}
                    results.append({**case, "instructions": count, "waits": waited, "registers": registers})
    common.save(arguments.record, triton=triton.__version__, results=results)


if __name__ == "__main__":
    main()
