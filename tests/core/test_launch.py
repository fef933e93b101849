"""Kernels that are launched outside of an op leave nothing behind in torch; that needs no GPU, as Triton's own launch is a stub."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from triton.runtime.jit import JITFunction
launched = []
JITFunction.run = lambda self, *args, **options: launched.append(self.__name__)
import importlib
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
flatten, reduce, product = (importlib.import_module(f"zk.kernels.{name}_kernel") for name in ("flatten", "reduce", "tiled_matmul"))
rows, out = torch.zeros(2, 64), torch.zeros(64)
for tokens in (16, 40, 4096):  # none of which is a first one that tries configurations
    product.launch(torch.zeros(tokens, 64), torch.zeros(64, 64), torch.zeros(tokens, 64), None, None)
    reduce.launch(rows, out)
    flatten.launch([rows[0]], out, [0, 64])
kernels = "_reduce_kernel", "_move_kernel", "_matmul_kernel"
print(*map(launched.count, kernels), len(kernel_side_table.id_to_kernel), len(kernel_side_table.constant_args))
"""


def test_launches_outside_of_an_op_keep_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET" and not name.startswith("ZK_SOFTGPU")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["3", "3", "3", "0", "0"], done.stderr
