"""The loop of the kernel for packed matrices, as compilers make it; for ``gpu.py instructions``."""

import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from niwaki.packed import gpu

VERSION = triton.__version__
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
