"""One thread for torch in each process, as several share the machine and tiny tensors: imported before torch, whose OpenMP reads this once.

The collector rests until all is imported (conftest.py): it would look through that again and again, for a quarter of the time.
"""

import gc
import os

gc.disable()
os.environ["OMP_NUM_THREADS"] = "1"
