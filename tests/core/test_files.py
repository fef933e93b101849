"""Files: what is written comes back, whatever the offset, size, memory, stripes and faults; nothing is reported done that is not."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from zk.memory import aligned
from zk.offload import file as file_module
from zk.offload.file import ALIGN, Engine, File, System


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(num_threads=3, block_nbytes=2 * ALIGN)
    yield engine
    engine.close()


def pattern(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Faults(System):
    """System calls that fail, stall and come up short as told."""

    def __init__(self) -> None:
        self.short, self.zero, self.calls = 0.0, False, 0
        self.change = -1  # the byte of what is read that is another one
        self.fail: dict[str, list[int]] = {}  # call -> errnos to raise, one for each call, 0 to succeed
        self.lock, self.answers = threading.Lock(), threading.Event()
        self.answers.set()

    def before(self, name: str, buffers: list[memoryview]) -> memoryview:
        with self.lock:
            self.calls += 1
            number = self.fail[name].pop(0) if self.fail.get(name) else 0
        self.answers.wait()
        if number:
            raise OSError(number, os.strerror(number))
        (buffer,) = buffers
        cut = int(len(buffer) * self.short) // 512 * 512
        return buffer[:cut] if cut else buffer

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        buffer = self.before("preadv", buffers)
        moved = 0 if self.zero else os.preadv(descriptor, [buffer], offset)
        if offset <= self.change < offset + moved:
            buffer[self.change - offset] ^= 1
        return moved

    def pwritev(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        return os.pwritev(descriptor, [self.before("pwritev", buffers)], offset)

    def posix_fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:  # type: ignore[override]
        self.before("posix_fallocate", [memoryview(b"")])
        os.posix_fallocate(descriptor, offset, nbytes)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults()
    monkeypatch.setattr(file_module, "SYSTEM", faults)
    return faults


@pytest.mark.parametrize("stripes", (1, 3))
@pytest.mark.parametrize("direct", (True, False))
def test_any_offset_size_and_memory(stripes: int, direct: bool, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / str(number) for number in range(stripes)]
    for folder in folders:
        folder.mkdir()
    if not direct:
        monkeypatch.setattr(file_module, "open_direct", lambda path, flags: -1)
    whole, random = pattern(100_000), Random(0)
    file = File(folders, 100_000, engine=engine)
    file.write_async(whole).wait()
    for seed in range(60):
        nbytes = random.choice((0, 1, 511, ALIGN - 1, ALIGN, ALIGN + 1, 2 * ALIGN, 5 * ALIGN + 123, 40_000))
        offset, shift = random.choice((0, 1, ALIGN, ALIGN + 3, 3 * ALIGN, 50_001)), random.choice((0, 1, 64))
        source, target = (aligned(nbytes + shift)[shift:] for _ in range(2))
        source.copy_(pattern(nbytes, seed))
        whole[offset : offset + nbytes] = source
        file.write_async(source, offset).wait()
        file.read_async(target, offset).wait()
        assert torch.equal(source, target)
    found = torch.empty_like(whole)
    file.read_async(found).wait()
    assert torch.equal(found, whole)
    file.close()
    assert all(os.listdir(folder) == [] for folder in folders)


def test_a_file_has_no_name_and_reads_as_zeros(tmp_path: Path) -> None:
    file, found = File([tmp_path], 10_000), torch.ones(2_500)
    assert os.listdir(tmp_path) == []  # so nothing is left however the process ends
    file.read_async(found).wait()
    assert not found.any()
    found.fill_(3)
    assert file.extend(20_000) == 12_288 and file.nbytes == 32_288  # from the next page on
    file.write_async(found, 12_288).wait()
    file.read_async(found, 22_288).wait()
    assert not found.any()
    file.close()


def test_short_and_interrupted_calls_are_resumed(tmp_path: Path, engine: Engine, faults: Faults) -> None:
    data, found = pattern(5 * ALIGN + 77), torch.zeros(5 * ALIGN + 77, dtype=torch.uint8)
    faults.short, faults.fail = 0.4, {"pwritev": [errno.EINTR] * 3, "preadv": [errno.EINTR] * 3}
    file = File([tmp_path], data.nbytes, engine=engine)
    file.write_async(data).wait()
    file.read_async(found).wait()
    assert torch.equal(found, data) and faults.calls > 12


@pytest.mark.parametrize(("call", "number"), (("pwritev", errno.EIO), ("pwritev", errno.ENOSPC), ("preadv", errno.EIO)))
def test_what_the_drive_refuses_is_raised_by_name_to_each_who_waits(call: str, number: int, tmp_path: Path, engine: Engine, faults: Faults) -> None:
    data = aligned(6 * ALIGN)
    file = File([tmp_path], data.nbytes, engine=engine)
    file.write_async(data).wait()
    faults.fail = {call: [0, number]}
    request, errors = file.write_async(data) if call == "pwritev" else file.read_async(data), []
    for _ in range(2):
        with pytest.raises(OSError, match=f"{2 * ALIGN} bytes at offset") as raised:
            request.wait()
        errors.append(raised.value)
    assert errors[0] is not errors[1] and errors[0].errno == number and str(errors[0].filename).startswith(str(tmp_path))
    file.write_async(data).wait()  # and the file goes on working
    file.close()


def test_a_byte_that_has_changed_is_found(tmp_path: Path, engine: Engine, faults: Faults) -> None:
    data, found = pattern(6 * ALIGN), aligned(6 * ALIGN)
    file = File([tmp_path], data.nbytes, engine=engine)
    file.write_async(data).wait()
    faults.change = 3 * ALIGN + 5
    file.read_async(found[: 2 * ALIGN]).wait()  # another place is fine
    with pytest.raises(OSError, match=f"the {2 * ALIGN} bytes at offset {2 * ALIGN} are not what was written"):
        file.read_async(found).wait()
    file.write_async(data[: 2 * ALIGN + 1]).wait()  # written anew over a part of the block: nothing is known of its rest
    file.read_async(found).wait()
    unchecked = File([tmp_path], data.nbytes, engine=engine, checksum=False)
    unchecked.write_async(data).wait()
    unchecked.read_async(found).wait()
    assert not torch.equal(found, data)


def test_waiting_is_bounded_and_says_for_what(tmp_path: Path, engine: Engine, faults: Faults) -> None:
    file = File([tmp_path], ALIGN, engine=engine, timeout_s=0.05)
    faults.answers.clear()
    request = file.read_async(aligned(ALIGN))
    with pytest.raises(TimeoutError, match=r"read of 4096 bytes at offset 0 of .*zk-.* has not ended after 0\.05 s"):
        request.wait()
    faults.answers.set()
    while not request.done:
        time.sleep(0.001)
    request.wait()


def test_a_write_comes_after_what_fills_its_memory(tmp_path: Path, engine: Engine) -> None:
    class Late:
        def wait(self) -> None:
            source.fill_(7)

    source, found = torch.zeros(100), torch.zeros(100)
    file = File([tmp_path], 400, engine=engine)
    file.write_async(source, after=Late()).wait()
    file.read_async(found).wait()
    assert found.eq(7).all()


def test_a_drive_without_room_and_folders_that_cannot_be_used_are_named(tmp_path: Path, faults: Faults) -> None:
    with pytest.raises(OSError, match=r"bytes .* are needed and \d+ \(.*\) are free"):
        File([tmp_path], 1 << 50)
    faults.fail = {"posix_fallocate": [errno.EOPNOTSUPP]}
    File([tmp_path], 10 * ALIGN).close()  # a file system that cannot reserve
    with pytest.raises(FileNotFoundError, match="must be an existing folder") as raised:
        File([tmp_path / "none"], ALIGN)
    assert raised.value.filename == str(tmp_path / "none") and os.listdir(tmp_path) == []


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path, engine: Engine, faults: Faults) -> None:
    file = File([tmp_path], 4 * ALIGN, engine=engine)
    faults.zero = True
    with pytest.raises(OSError, match="has become shorter"):
        file.read_async(aligned(ALIGN)).wait()


def test_misuse_is_refused(tmp_path: Path) -> None:
    file = File([tmp_path], 100)
    for tensor, offset, says in ((torch.zeros(26), 0, "outside of"), (torch.zeros(1), -4, "outside"), (torch.zeros(4, 4).t(), 0, "contiguous")):
        with pytest.raises(ValueError, match=says):
            file.write_async(tensor, offset)


def test_a_folder_without_o_direct_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real = os.open

    def refuse(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    for _ in range(2):
        data = pattern(3 * ALIGN + 9)
        file, found = File([tmp_path], data.nbytes), torch.zeros_like(data)
        file.write_async(data).wait()
        file.read_async(found).wait()
        assert torch.equal(found, data)
    assert caplog.text.count("does not take O_DIRECT") == 1
