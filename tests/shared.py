"""What every rank needs, imported once by the process that ranks are forked from: seconds of a core for each of them otherwise."""
# ruff: noqa: E402, F401

import gc

gc.disable()  # for as long as this takes

import hypothesis
import numba.np.arraymath
import numba.typed
import pytest
import torch._dynamo
import torch.distributed.fsdp
import torch.profiler._cupti_monitor
import triton.compiler.code_generator

import tests.mutant  # isort: skip  (before zk)
import zk.checkpoint
import zk.optimizer

gc.enable()
gc.collect()
gc.freeze()  # ranks neither look through a million objects of torch, nor copy the pages that have them
