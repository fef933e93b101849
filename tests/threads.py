"""How torch's threads behave, and how many they are in one of several pytest processes. Imported before torch: OpenMP reads these variables once.

The collector rests until all is imported (conftest.py): it would look through that again and again, for a quarter of the time.
"""

import gc
import os

gc.disable()

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads without work sleep: spinning, they take the core of another process
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))
