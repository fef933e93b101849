"""What every rank needs, imported once by the process that ranks are forked from: seconds of a core for each of them otherwise."""
# ruff: noqa: E402, F401

import atexit
import gc
import os

gc.disable()  # for as long as this takes
said = os.dup(2)
for number in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # what packages lack here, and ranks print, is heard where it is tested

import bitsandbytes
import hypothesis
import numba.np.arraymath
import numba.typed
import numpy.ma
import peft
import pytest
import torch._dynamo
import torch.distributed.fsdp
import torch.profiler._cupti_monitor
import torchmetrics.functional
import transformers.trainer
import triton.compiler.code_generator

import zk.checkpoint
import zk.optimizer

numba.njit(lambda array: array[0]).compile((numba.float32[::1],))  # with the first function numba sets itself up: a tenth of a second of each rank

gc.enable()
gc.collect()
gc.freeze()  # ranks neither look through a million objects of torch, nor copy the pages that have them
atexit.register(gc.unfreeze)  # C extensions look at the end whether all of theirs is gone
