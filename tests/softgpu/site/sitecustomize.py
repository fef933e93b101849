"""A Python program that a test started: it has the software GPU, and must not race."""

import atexit
import os

if os.environ.get("ZK_SOFTGPU") == "1":
    from tests import softgpu

    softgpu.install()

    @atexit.register
    def _report() -> None:
        try:
            softgpu.check()
        except AssertionError as error:
            print(error, flush=True)
            os._exit(86)
