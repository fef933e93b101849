"""Files: what is written comes back, whatever the offset, size, stripes and faults; nothing is reported done that is not."""

import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.programs import run
from zk.memory import aligned
from zk.offload import file as file_module
from zk.offload.file import ALIGN, File


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "BLOCK_NBYTES", 2 * ALIGN)


def pattern(pages: int, seed: int = 0) -> Tensor:
    values = torch.randint(0, 256, (pages * ALIGN,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return aligned(pages * ALIGN).copy_(values)


class Faults:
    """System calls that fail, stall, come late and come up short as told."""

    def __init__(self) -> None:
        self.short, self.zero, self.is_late, self.random = 0.0, False, False, Random(0)
        self.change = -1  # the byte of what is read that is another one
        self.fail: dict[str, list[int]] = {}  # call -> errnos to raise, one for each call, 0 to succeed
        self.lock, self.answers = threading.Lock(), threading.Event()
        self.answers.set()

    def before(self, name: str, buffers: list[memoryview]) -> memoryview:
        if self.is_late:
            time.sleep(self.random.random() * 2e-3)
        with self.lock:
            number = self.fail[name].pop(0) if self.fail.get(name) else 0
        self.answers.wait()
        if number:
            raise OSError(number, os.strerror(number))
        (buffer,) = buffers
        cut = int(len(buffer) * self.short) // 512 * 512
        return buffer[:cut] if cut else buffer

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        buffer = self.before("preadv", buffers)
        moved = 0 if self.zero else os.preadv(descriptor, [buffer], offset)
        if offset <= self.change < offset + moved:
            buffer[self.change - offset] ^= 1
        return moved

    def pwritev(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return os.pwritev(descriptor, [self.before("pwritev", buffers)], offset)

    def posix_fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        self.before("posix_fallocate", [memoryview(b"")])
        os.posix_fallocate(descriptor, offset, nbytes)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults()
    monkeypatch.setattr(file_module, "SYSTEM", faults)
    return faults


@pytest.mark.parametrize(("stripes", "direct"), ((1, True), (3, False)))
def test_any_pages(stripes: int, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults) -> None:
    """Of several folders and through the page cache, where calls are short too."""
    faults.short = 0.0 if direct else 0.4
    folders = [tmp_path / str(number) for number in range(stripes)]
    for folder in folders:
        folder.mkdir()
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    whole, random = pattern(25), Random(0)
    file = File(folders, whole.nbytes)
    file.write_async(whole).wait()
    for seed in range(60):
        offset = random.randrange(25)
        pages = random.randrange(26 - offset)
        source, target = pattern(pages, seed), aligned(pages * ALIGN)
        whole[offset * ALIGN :][: source.nbytes] = source
        file.write_async(source, offset * ALIGN).wait()
        file.read_async(target, offset * ALIGN).wait()
        assert torch.equal(source, target)
    found = aligned(whole.nbytes)
    file.read_async(found).wait()
    assert torch.equal(found, whole) and found.nbytes < file.read_nbytes == file.written_nbytes
    file.close()
    assert all(os.listdir(folder) == [] for folder in folders)


def test_a_file_has_no_name_and_reads_as_zeros(tmp_path: Path) -> None:
    file, found = File([tmp_path], 3 * ALIGN - 100), aligned(2 * ALIGN).fill_(1)
    assert os.listdir(tmp_path) == []  # so nothing is left however the process ends
    file.read_async(found).wait()
    assert not found.any()
    found.fill_(3)
    assert file.extend(4 * ALIGN) == 3 * ALIGN and file.nbytes == 7 * ALIGN  # from the next page on
    file.write_async(found, 3 * ALIGN).wait()
    file.read_async(found, 5 * ALIGN).wait()
    assert not found.any()
    file.close()


@pytest.mark.parametrize(("call", "number"), (("pwritev", errno.EIO), ("pwritev", errno.ENOSPC), ("preadv", errno.EIO)))
def test_what_the_drive_refuses_is_raised_by_name_to_each_who_waits(call: str, number: int, tmp_path: Path, faults: Faults) -> None:
    data = aligned(6 * ALIGN)
    file = File([tmp_path], data.nbytes)
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


def test_waiting_is_bounded_and_says_for_what(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    file = File([tmp_path], ALIGN, timeout_s=0.05)
    faults.answers.clear()
    request = file.read_async(aligned(ALIGN))
    with pytest.raises(TimeoutError, match=r"read of 4096 bytes at offset 0 of .* has not ended after 0\.05 s"):
        request.wait()
    monkeypatch.setattr(file_module, "PATIENCE_S", 0.05)
    file.close()
    os.fstat(file.descriptors[0])  # it is not closed under a call
    faults.answers.set()
    while not request.done:
        time.sleep(0.001)
    request.wait()


def test_a_write_comes_after_what_fills_its_memory(tmp_path: Path) -> None:
    source, found = (aligned(ALIGN).view(torch.float32) for _ in range(2))
    file = File([tmp_path], ALIGN)
    late = SimpleNamespace(wait=lambda: source.add_(7))
    file.write_async(source, after=[late, late]).wait()
    file.read_async(found).wait()
    assert found.eq(14).all()


def test_a_drive_without_room_folders_that_cannot_be_used_and_files_that_became_shorter_are_named(tmp_path: Path, faults: Faults) -> None:
    with pytest.raises(OSError, match=r"[\d,.]+ MiB are needed and [\d,.]+ MiB are free"):
        File([tmp_path], 1 << 50)
    faults.fail = {"posix_fallocate": [errno.EOPNOTSUPP]}
    file = File([tmp_path], 10 * ALIGN)  # on a file system that cannot reserve
    faults.zero = True
    with pytest.raises(OSError, match="has become shorter"):
        file.read_async(aligned(ALIGN)).wait()
    with pytest.raises(FileNotFoundError, match="must be an existing folder") as raised:
        File([tmp_path / "none"], ALIGN)
    assert raised.value.filename == str(tmp_path / "none") and os.listdir(tmp_path) == []


def test_misuse_is_refused(tmp_path: Path) -> None:
    file, pages = File([tmp_path], 4 * ALIGN), aligned(8 * ALIGN)
    aside, turned = pages[8 : 8 + ALIGN], pages[: 4 * ALIGN].view(4, ALIGN).t()
    for tensor, offset, says in (
        *((pages, 0, "outside of"), (pages[:ALIGN], -ALIGN, "outside"), (pages[:10], 0, "whole pages"), (aside, 0, "whole pages")),
        *((pages[:ALIGN], 8, "whole pages"), (turned, 0, "view size is not compatible")),
    ):
        with pytest.raises((ValueError, RuntimeError), match=says):
            file.write_async(tensor, offset)
    file.close()
    with pytest.raises(RuntimeError, match="is closed"):
        file.read_async(pages[:ALIGN])


def test_a_forked_process_is_refused(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom zk.memory import aligned\nfrom zk.offload.file import File\n"
        "file = File([sys.argv[1]], 4096)\n"
        "if os.fork() == 0:\n    file.read_async(aligned(4096))\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    ended = run("-c", program, str(tmp_path))
    assert ended.stdout.split() == ["1"] and "the process that forked this" in ended.stderr


def test_a_file_is_closed_wherever_it_is_collected(tmp_path: Path) -> None:
    """The garbage collector may run while ``threading`` holds a lock that threads ask for in the end."""
    file = File([tmp_path], ALIGN)
    descriptor = file.descriptors[0]
    with threading._active_limbo_lock:
        del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_folder_that_takes_the_flag_o_direct_and_no_more_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    write = os.pwritev

    def pwritev(descriptor: int, *given: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, *given)

    monkeypatch.setattr(os, "pwritev", pwritev)
    data = pattern(3)
    file, found = File([tmp_path], data.nbytes), aligned(data.nbytes)
    file.write_async(data).wait()
    file.read_async(found).wait()
    assert torch.equal(found, data) and caplog.text.count(f"{tmp_path} does not take O_DIRECT (Invalid argument)") == 1
