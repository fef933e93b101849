"""A drive that lies is heard: what is read is what was written there."""

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.core.test_files import Faults, faults, pattern, small_blocks  # noqa: F401
from tests.core.test_tiers import Blocks, drive_of, held, step
from zk.addons.checksums import Checksums
from zk.memory import aligned
from zk.offload.file import ALIGN, File


def beside(system: Any) -> Checksums:
    checksums = Checksums()
    checksums.system = system
    return checksums


def test_a_byte_that_has_changed_is_found_after_short_writes_too(tmp_path: Path, faults: Faults) -> None:  # noqa: F811
    data, found = pattern(6), aligned(6 * ALIGN)
    file = File([tmp_path], data.nbytes)
    file.system = beside(faults)
    file.write_async(data).wait()
    faults.change = 3 * ALIGN + 5
    file.read_async(found[: 2 * ALIGN]).wait()  # another place is fine
    with pytest.raises(OSError, match=f"the {2 * ALIGN} bytes at offset {2 * ALIGN} are not what was written") as raised:
        file.read_async(found).wait()
    assert raised.value.filename == str(tmp_path)
    file.write_async(data[: 3 * ALIGN]).wait()  # written anew over a part of the block: nothing is known of its rest
    file.read_async(found[2 * ALIGN :], 2 * ALIGN).wait()
    faults.change = 2 * ALIGN
    with pytest.raises(OSError, match=f"the {ALIGN} bytes at offset {2 * ALIGN} are not"):
        file.read_async(found).wait()
    faults.short, faults.change = 0.4, -1
    file.write_async(data).wait()  # in parts
    file.read_async(found).wait()
    faults.short, faults.change = 0.0, 100
    with pytest.raises(OSError, match="bytes at offset 0 are not what was written"):
        file.read_async(found).wait()


def test_a_changed_byte_ends_the_run(tmp_path: Path, faults: Faults) -> None:  # noqa: F811
    model = Blocks()
    optimizer = held(model, tmp_path)
    found = drive_of(optimizer).file.system
    assert isinstance(found, Checksums) and found.system is faults  # by default, and once
    step(model, optimizer)
    faults.change = 100
    with pytest.raises(OSError, match="not what was written there"):
        for seed in range(3):
            step(model, optimizer, seed)


@pytest.mark.parametrize("call", ("pwritev", "preadv"))
def test_threads_of_one_block_do_not_disturb_each_other(call: str) -> None:
    """Another thread may run wherever the garbage collector does, as finalizers are Python."""
    checks = beside(mock.Mock(pwritev=lambda *_: ALIGN, preadv=lambda *_: ALIGN))
    data = memoryview(bytearray(ALIGN))
    parts = checks.parts[0, 0] = {start: (start + 1, 0) for start in range(ALIGN, ALIGN + 5000)}

    def other_thread(phase: str, info: object) -> None:
        parts[next(reversed(parts)) + 1] = parts.pop(next(iter(parts)))

    threshold = gc.get_threshold()
    gc.callbacks.append(other_thread)
    gc.set_threshold(20)
    try:
        getattr(checks, call)(0, [data], 0)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(other_thread)
