"""Compiles every kernel, in the forms that its launcher asks for, for GPUs that need not be there; prints what came out as JSON.

    TRITON_INTERPRET=0 python tests/compile_kernels.py

All forms are compiled for compute capability 9.0, the first form of each kernel for the others. Then it launches kernels where Triton's own launch
is a stub, and prints how often each was, and what torch has kept of that.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from zk.kernels import flatten_kernel, reduce_kernel, tiled_matmul_kernel
from zk.kernels.adam_kernel import _adam_kernel
from zk.kernels.flatten_kernel import _move_kernel
from zk.kernels.numerics import BLOCK
from zk.kernels.reduce_kernel import _reduce_kernel
from zk.kernels.tiled_matmul_kernel import CONFIGS, _matmul_kernel

ARCHITECTURES = (80, 90, 100, 120)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Name, kernel, types of its arguments in order, its constants, and the compiler's options."""
    found = []
    casts = (1, "fp32", "bf16"), (1, "fp32", "fp16"), (1, "bf16", "fp32")
    for rows, source, out in (*casts, (8, "bf16", "bf16")):
        types = {"rows": f"*{source}", "out": f"*{out}", "numel": "i64"}
        name = f"{f'mean of {rows} rows' if rows > 1 else 'cast'} {source} to {out}"
        found.append((name, _reduce_kernel, types, {"ROWS": rows, "BLOCK": BLOCK}, {"num_warps": 4}))
    for tensor, flat in (("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp32")):
        types = {"base": f"*{tensor}", "flat": f"*{flat}", "tensors": "*i64", "regions": "*i64", "blocks": "*i32"}
        found.append((f"flatten {tensor}, flat {flat}", _move_kernel, types, {"ALIGNED": True, "BLOCK": BLOCK}, {"num_warps": 4}))
    scalars = dict.fromkeys(("scale", "l2", "decay", "lerp", "beta2", "one_minus_beta2", "bc2_sqrt", "eps", "step_size", "step"), "fp32")
    layouts = ("fp32", "fp32", None, "fp32"), ("bf16", "bf16", "*fp32", "fp32"), ("bf16", "bf16", "*i16", "fp32")
    for param, grad, master, moments in (*layouts, ("bf16", "fp32", "*i16", "bf16"), ("bf16", "bf16", "*u8", "u8"), ("fp32", "bf16", None, "u8")):
        types = {"param": f"*{param}", "grad": f"*{grad}", "master": master, "exp_avg": f"*{moments}", "exp_avg_sq": f"*{moments}", **scalars}
        constants = {"FROM_GRAD": False, "L2": False, "SPLIT": master == "*i16", "CODED": moments == "u8", "BLOCK": BLOCK}
        name = f"adam {param}, gradient {grad}, master {master}, moments {moments}"
        found.append((name, _adam_kernel, {**types, "numel": "i64"}, constants, {"num_warps": 8}))
    forms = ("fp32", "*fp32", None, False), ("bf16", "*fp32", "*bf16", False), ("bf16", None, None, True)
    for a, (out, plus, bias, transposed) in (("bf16", form) for form in forms):
        for m, n, k, warps, stages in CONFIGS if bias else CONFIGS[:1]:  # other forms in the largest tile: it needs the most registers
            types = {"a": f"*{a}", "b": f"*{a}", "out": f"*{out}", "plus": plus, "bias": bias, "M": "i32", "N": "i32", "K": "i32"}
            # x (m, k) row by row, weight (n, k) as its transpose; or dy^T (m, k) with x (k, n), both rows by rows in memory
            types |= {"stride_am": "i32", "stride_ak": 1, "stride_bk": 1, "stride_bn": "i32", "stride_om": "i32", "stride_on": 1}
            if transposed:
                types |= {"stride_am": 1, "stride_ak": "i32", "stride_bk": "i32", "stride_bn": 1}
            types |= {"stride_pm": "i32", "stride_pn": 1 if plus else None}
            constants = {"PRECISION": "ieee", "EVEN_K": True, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}
            name = f"tiled_matmul {a} to {out}{', plus' if plus else ''}{', bias' if bias else ''}{', transposed' if transposed else ''} {m}x{n}x{k}"
            found.append((name, _matmul_kernel, types, constants, {"num_warps": warps, "num_stages": stages}))
    return found


def compile_case(kernel: Any, types: dict[str, Any], constants: dict[str, Any], options: dict[str, int], architecture: int) -> Any:
    """The compiled kernel, pointers and sizes multiples of 16 as the launcher finds them for whole tensors."""
    signature, fixed, attributes = {}, dict(constants), {}
    for position, (name, kind) in enumerate(types.items()):
        if kind is None or isinstance(kind, int):
            signature[name], fixed[name] = "constexpr", kind
        else:
            signature[name] = kind
            if kind.startswith(("*", "i")):
                attributes[(position,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def look(name: str, architecture: int, compiled: Any) -> dict[str, Any]:
    """What is to be known of a compiled kernel."""
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    return {
        "name": name,
        "architecture": architecture,
        "stack": sum(int(value) for value in re.findall(r"(?:STACK|LOCAL):(\d+)", usage)),  # where registers that spill go
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32|ld\.global[.\w:]*\.v2\.b64|cp\.async\.cg\.shared\.global", ptx)),
        "wide_stores": len(re.findall(r"st\.global[.\w:]*\.v4\.b32|st\.global[.\w:]*\.v2\.b64", ptx)),
        "rounding": sorted(set(re.findall(r"cvt\.\w+(?:\.satfinite)?\.(?:bf16|f16)(?:x2)?\.f32", ptx))),
        "shared": compiled.metadata.shared,
        "fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),
        "loose_products": len(re.findall(r"\bmul\.f32|\bfma\.f32|\bmad\.f32", ptx)),
        "divisions": sorted(set(re.findall(r"(?:div|sqrt|rcp|rsqrt)\.\w+(?:\.ftz)?\.f32", ptx))),
    }


def launched() -> list[int]:
    """How often each kernel was launched outside of an op, and how many kernels and arguments torch has kept."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernels: list[str] = []
    JITFunction.run = lambda self, *args, **options: kernels.append(self.__name__)
    rows, out = torch.zeros(2, 64), torch.zeros(64)
    for tokens in (16, 40, 4096):
        tiled_matmul_kernel.launch(torch.zeros(tokens, 64), torch.zeros(64, 64), torch.zeros(tokens, 64), None, None)
        reduce_kernel.launch(rows, out)
        flatten_kernel.launch([rows[0]], out, [0, 64])
    counts = [kernels.count(name) for name in ("_reduce_kernel", "_move_kernel", "_matmul_kernel")]
    return [*counts, len(kernel_side_table.id_to_kernel), len(kernel_side_table.constant_args)]


def main() -> None:
    kinds, found = set[str](), list[dict[str, Any]]()
    for name, kernel, types, constants, options in cases():
        kind = name.replace(",", "").split()[0]
        for architecture in ARCHITECTURES if kind not in kinds else (90,):
            found.append(look(name, architecture, compile_case(kernel, types, constants, options, architecture)))
        kinds.add(kind)
    print(json.dumps({"compiled": found, "launched": launched()}))


if __name__ == "__main__":
    main()
