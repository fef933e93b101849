"""A Python program that a test started: it has the software GPU, and must not race."""

import atexit
import os
import sys

# (Python's own process that keeps a list of what is to be removed computes nothing, and torch takes seconds)
if os.environ.get("ZK_SOFTGPU") == "1" and not any("multiprocessing.resource_tracker" in argument for argument in sys.orig_argv):
    from tests import softgpu

    softgpu.install()

    @atexit.register
    def _report() -> None:
        try:
            softgpu.check()
        except AssertionError as error:
            print(error, flush=True)
            os._exit(86)
