"""One thread for torch in each process, as several share the machine and tiny tensors: imported before torch, whose OpenMP reads this once.

The collector rests until all is imported (conftest.py): it would look through that again and again, for a quarter of the time.
The process that others are forked from (world.py) imports what they need while this one does.
"""

import gc
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from unittest import mock

gc.disable()
os.environ["OMP_NUM_THREADS"] = "1"
if "-n" in sys.argv and not multiprocessing.parent_process():
    forkserver.set_forkserver_preload(["tests.shared"])
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        forkserver.ensure_running()
