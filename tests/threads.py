"""How torch's threads behave, and how many they are in one of several pytest processes. Imported before torch: OpenMP reads these variables once.

The collector rests until all is imported (conftest.py): it would look through that again and again, for a quarter of the time.
"""

import contextlib
import gc
import os

gc.disable()

# A thread that is woken does not take the core from the one that wakes it. Among ranks that is gloo's, which asks the system again and again
# until the other thread gives the connection's lock back: a quarter of the processor time of two ranks that train alone. Programs inherit it.
with contextlib.suppress(OSError):  # where a sandbox forbids it, tests are as right, and take longer
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads without work sleep: spinning, they take the core of another process
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))
