"""Files: what is written comes back, whatever the offset, size, memory, stripes and faults; and nothing is reported done that is not."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.programs import run
from zk.offload import nvme, scratch
from zk.offload.nvme import ALIGN, Engine, Excerpt, Excerpts, File, aligned, identity_of
from zk.offload.scratch import Scratch


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(num_threads=3, block_nbytes=2 * ALIGN)
    yield engine
    engine.close()


def pattern(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Faults(nvme.System):
    """System calls that fail, stall and come up short as told."""

    def __init__(self) -> None:
        self.short = self.delay = 0.0
        self.fail: dict[str, list[int]] = {}  # call -> errnos to raise, one for each call, 0 to succeed
        self.zero = False
        self.calls = 0
        self.lock = threading.Lock()
        self.answers = threading.Event()  # calls wait for it
        self.answers.set()

    def _before(self, name: str) -> None:
        with self.lock:
            self.calls += 1
            number = self.fail[name].pop(0) if self.fail.get(name) else 0
        time.sleep(self.delay)
        self.answers.wait()
        if number:
            raise OSError(number, os.strerror(number))

    def _cut(self, buffers: list[memoryview]) -> list[memoryview]:
        (buffer,) = buffers
        return [buffer[: max(1, int(len(buffer) * self.short))]] if self.short else [buffer]

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self._before("preadv")
        if self.zero:
            return 0
        (part,) = self._cut(buffers)
        # a short transfer as the kernel gives it: the rest of the buffer is untouched
        return os.preadv(descriptor, [part], offset) if len(part) % 512 == 0 else self._misaligned(descriptor, part, offset)

    def _misaligned(self, descriptor: int, part: memoryview, offset: int) -> int:
        with open(f"/proc/self/fd/{descriptor}", "rb") as again:
            again.seek(offset)
            part[:] = again.read(len(part))
        return len(part)

    def pwritev(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self._before("pwritev")
        (part,) = self._cut(buffers)
        if len(part) % 512 == 0:
            return os.pwritev(descriptor, [part], offset)
        with open(f"/proc/self/fd/{descriptor}", "r+b") as again:
            again.seek(offset)
            return again.write(part)

    def posix_fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:  # type: ignore[override]
        self._before("posix_fallocate")
        os.posix_fallocate(descriptor, offset, nbytes)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults()
    monkeypatch.setattr(nvme, "SYSTEM", faults)
    return faults


# ---- what is written comes back --------------------------------------------------------------------------------------------------------


sizes = st.sampled_from([0, 1, 511, 512, ALIGN - 1, ALIGN, ALIGN + 1, 2 * ALIGN, 2 * ALIGN + 1, 5 * ALIGN + 123, 40_000])


@settings(max_examples=60, deadline=None)
@given(offset=sizes, nbytes=sizes, shift=st.sampled_from([0, 1, 64, 512]), stripes=st.integers(1, 3), seed=st.integers(0, 9))
def test_any_offset_size_memory_and_stripes(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, offset: int, nbytes: int, shift: int, stripes: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    before, data = pattern(100_000, seed), pattern(nbytes, seed + 10)
    source, target = aligned(nbytes + shift)[shift:], aligned(nbytes + shift)[shift:]
    source.copy_(data)
    target.fill_(7)
    with File([folder / str(index) for index in range(stripes)], 100_000, engine=engine) as file:
        file.write(before)
        file.write(source, offset)
        file.read(target, offset)
        assert torch.equal(target, data)
        whole = torch.empty_like(before)
        file.read(whole)
    before[offset : offset + nbytes] = data
    assert torch.equal(whole, before)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int16, torch.float64, torch.bool))
def test_any_dtype_and_shape(dtype: torch.dtype, tmp_path: Path, engine: Engine) -> None:
    data = (torch.randn(31, 17) * 3).to(dtype)
    with File(tmp_path / "x", data.nbytes, engine=engine) as file:
        file.write(data)
        again = torch.zeros_like(data)
        file.read(again)
    assert torch.equal(again, data)


def test_many_requests_at_once_and_a_file_opened_again(tmp_path: Path, engine: Engine) -> None:
    parts = [pattern(3 * ALIGN + 5, seed) for seed in range(20)]
    with File(tmp_path / "x", 20 * 4 * ALIGN, engine=engine) as file:
        requests = [file.write_async(part, index * 4 * ALIGN) for index, part in enumerate(parts)]
        file.flush()
        assert all(request.done for request in requests)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600
    with File(tmp_path / "x", writable=False, engine=engine) as file:
        assert file.nbytes == 20 * 4 * ALIGN
        targets = [torch.empty_like(part) for part in parts]
        for index, target in enumerate(targets):
            file.read_async(target, index * 4 * ALIGN)
        file.wait()
        assert all(torch.equal(a, b) for a, b in zip(targets, parts, strict=True))
        with pytest.raises(ValueError, match="opened for reading"):
            file.write(parts[0])
    with pytest.raises(ValueError, match="read on a closed file"):
        file.read(parts[0])


def test_blocks_go_to_stripes_in_turn(tmp_path: Path, engine: Engine) -> None:
    block = engine.block_nbytes
    data = torch.cat([torch.full((block,), value, dtype=torch.uint8) for value in range(5)])
    with File([tmp_path / "a", tmp_path / "b"], data.nbytes, engine=engine) as file:
        file.write(data)
        file.flush()
    assert [(tmp_path / "a").read_bytes()[index * block] for index in range(3)] == [0, 2, 4]
    assert [(tmp_path / "b").read_bytes()[index * block] for index in range(2)] == [1, 3]


def test_misuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one path"):
        File([])
    with pytest.raises(FileNotFoundError):
        File(tmp_path / "none")
    with pytest.raises(ValueError, match="only to a writable file"):
        File(tmp_path / "x", 10, writable=False)
    with pytest.raises(ValueError, match="multiple of 4096"):
        Engine(block_nbytes=1000)
    with File(tmp_path / "x", 100) as file:
        with pytest.raises(ValueError, match="outside the 100 bytes"):
            file.read(torch.zeros(26), 0)
        with pytest.raises(ValueError, match="outside the 100 bytes"):
            file.write(torch.zeros(1), -4)
        with pytest.raises(ValueError, match="contiguous"):
            file.write(torch.zeros(4, 4).t(), 0)


# ---- faults ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", (0.4, 0.02))  # the last bytes one by one
def test_short_transfers_are_resumed(short: float, tmp_path: Path, engine: Engine, faults: Faults) -> None:
    data = pattern(5 * ALIGN + 77)
    faults.short = short
    with File(tmp_path / "x", data.nbytes, engine=engine) as file:
        file.write(data)
        again = torch.zeros_like(data)
        file.read(again)
    assert torch.equal(again, data) and faults.calls > 10


def test_interrupted_calls_are_repeated(tmp_path: Path, engine: Engine, faults: Faults) -> None:
    data = pattern(4 * ALIGN)
    faults.fail = {"pwritev": [errno.EINTR] * 3, "preadv": [errno.EINTR] * 3}
    with File(tmp_path / "x", data.nbytes, engine=engine) as file:
        file.write(data)
        again = torch.zeros_like(data)
        file.read(again)
    assert torch.equal(again, data) and faults.calls >= 6


@pytest.mark.parametrize(("call", "number"), (("pwritev", errno.EIO), ("pwritev", errno.ENOSPC), ("preadv", errno.EIO)))
def test_what_the_drive_refuses_is_raised_where_it_is_waited_for(call: str, number: int, tmp_path: Path, engine: Engine, faults: Faults) -> None:
    data = aligned(6 * ALIGN)
    data.copy_(pattern(6 * ALIGN))
    with File(tmp_path / "x", data.nbytes, engine=engine) as file:
        file.write(data)
        faults.fail = {call: [0, number]}
        request = file.write_async(data) if call == "pwritev" else file.read_async(data)
        with pytest.raises(OSError) as caught:
            request.wait()
        assert caught.value.errno == number and caught.value.filename == str(tmp_path / "x")
        assert f"{2 * ALIGN} bytes at offset" in str(caught.value)
        file.write(data)  # and the file goes on working
        faults.fail = {call: [number]}
        file.write_async(data) if call == "pwritev" else file.read_async(data)
        with pytest.raises(OSError):
            file.wait()
        file.wait()


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path, engine: Engine, faults: Faults) -> None:
    with File(tmp_path / "x", 4 * ALIGN, engine=engine) as file:
        faults.zero = True
        with pytest.raises(OSError, match="has become shorter"):
            file.read(aligned(ALIGN))


def test_waiting_is_bounded_and_says_for_what(tmp_path: Path, engine: Engine, faults: Faults) -> None:
    with File(tmp_path / "x", ALIGN, engine=engine, timeout_s=0.05) as file:
        faults.answers.clear()
        request = file.read_async(aligned(ALIGN))
        with pytest.raises(TimeoutError, match=r"read of 4096 bytes at offset 0 of .*x has not ended after 0\.05 s"):
            request.wait()
        faults.answers.set()
        while not request.done:
            time.sleep(0.001)
        request.wait()


def test_too_little_room_is_refused_with_needed_and_free_bytes(tmp_path: Path, faults: Faults) -> None:
    with pytest.raises(OSError, match=r"bytes .* are needed and \d+ \(.*\) are free") as caught:
        File(tmp_path / "x", 1 << 50)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    faults.fail = {"posix_fallocate": [errno.EOPNOTSUPP]}
    with File(tmp_path / "y", 10 * ALIGN) as file:  # a file system that cannot reserve
        assert (tmp_path / "y").stat().st_size == 10 * ALIGN == file.nbytes


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_small_file_system_that_fills_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        nvme.can_bypass_cache.cache_clear()
        with pytest.raises(OSError, match="are needed and") as caught:
            File(tmp_path / "x", 4 << 20)
        assert caught.value.errno == errno.ENOSPC and not (tmp_path / "x").exists()
        data = pattern(500_001)
        with File(tmp_path / "y", data.nbytes) as file:  # and one without O_DIRECT on older kernels
            file.write(data)
            again = torch.zeros_like(data)
            file.read(again)
            assert torch.equal(again, data)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_folder_without_o_direct_is_used_through_the_page_cache_with_one_warning(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    data = pattern(3 * ALIGN + 9)
    for name in ("x", "y"):
        with File(tmp_path / name, data.nbytes, engine=engine) as file:
            assert file.direct == [-1]
            file.write(data)
            again = torch.zeros_like(data)
            file.read(again)
        assert torch.equal(again, data)
    assert caplog.text.count("does not take O_DIRECT") == 1


def test_a_changed_byte_is_found_by_its_checksum(tmp_path: Path, engine: Engine) -> None:
    data = pattern(6 * ALIGN)
    with File(tmp_path / "x", data.nbytes, engine=engine, checksum=True) as file:
        file.write(data)
        file.read(torch.empty_like(data))
        with open(tmp_path / "x", "r+b") as other:
            other.seek(3 * ALIGN)
            other.write(bytes([1 ^ int(data[3 * ALIGN])]))
        file.read(torch.empty(2 * ALIGN, dtype=torch.uint8))  # another place is fine
        with pytest.raises(OSError, match=r"bytes at offset 8192 are not what was written"):
            file.read(torch.empty_like(data))
        file.write(data[: 3 * ALIGN + 1])  # written anew, partly over the bad piece: nothing is known of its rest
        file.read(torch.empty_like(data))


# ---- scratch folders -------------------------------------------------------------------------------------------------------------------


def test_scratch_folders_are_private_and_go_when_closed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    made = Scratch([str(tmp_path / "a"), str(tmp_path / "b")], rank=3)
    for folder in made.folders:
        assert folder.name.startswith("zk-scratch-") and folder.name.endswith("-rank3") and str(os.getpid()) in folder.name
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with File(made.paths("state"), 10_000) as file:
        assert {stat.S_IMODE(path.stat().st_mode) for path in made.paths("state")} == {0o600}
        file.write(pattern(10_000))
    made.close()
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b") == []
    made.close()


def leave_behind(path: Path, how: str) -> str:
    """A process that makes a scratch folder and ends in the given way. Returns the folder's name."""
    program = (
        "import sys, os, signal, torch\nfrom zk.offload.scratch import Scratch\nfrom zk.offload.nvme import File\n"
        f"made = Scratch([{str(path)!r}], 0); file = File(made.paths('state'), 100_000)\n"
        "print(made.folders[0].name, flush=True)\n"
        f"{how}\n"
    )
    return run("-c", program).stdout.strip()


@pytest.mark.parametrize("how", ("pass", "sys.exit(3)", "raise ValueError('user')"))
def test_scratch_folders_go_at_exit(how: str, tmp_path: Path) -> None:
    assert leave_behind(tmp_path, how).startswith("zk-scratch-")
    assert os.listdir(tmp_path) == []


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="must be an existing folder"):
        Scratch([str(tmp_path / "none")], 0)
    assert scratch.PREFIX == "zk-scratch-"


def test_one_path_twice_is_refused_and_so_are_sizes_that_no_file_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be another file"):
        File([tmp_path / "x", tmp_path / "." / "x"], 1 << 20)
    for nbytes in (1 << 63, 1 << 70):
        with pytest.raises(ValueError, match="nbytes must be"):
            File(tmp_path / "x", nbytes)
    with pytest.raises(OSError, match="are needed and"):
        File([tmp_path / "a", tmp_path / "b"], 1 << 55)
    assert not list(tmp_path.iterdir())


def test_checksums_bear_writes_that_overlap(tmp_path: Path, engine: Engine) -> None:
    data = aligned(1 << 20)
    with File(tmp_path / "x", 1 << 20, checksum=True, engine=engine) as file:
        for request in [file.write_async(data[: 4096 * count]) for count in (256, 1, 3, 256, 2)]:
            request.wait()
        file.wait()
        file.read(data)


def test_a_part_that_is_read_apart_is_checked_too(tmp_path: Path, engine: Engine) -> None:
    path, data = tmp_path / "x", aligned(5 * ALIGN).fill_(7)
    with File(path, 5 * ALIGN, checksum=True, cuts=[2 * ALIGN, 3 * ALIGN], engine=engine) as file:
        file.write(data)
        with open(path, "r+b") as other:
            other.seek(3 * ALIGN + 5)
            other.write(b"x")
        file.read(data[: 3 * ALIGN])
        with pytest.raises(OSError, match=f"at offset {3 * ALIGN} are not what was written"):
            file.read(data[: 2 * ALIGN], 3 * ALIGN)


def test_each_wait_for_a_request_that_failed_raises_an_error_of_its_own(tmp_path: Path, engine: Engine) -> None:
    """What one listener notes on its error must not be there for the next."""
    data = aligned(ALIGN)
    with File(tmp_path / "x", ALIGN, checksum=True, engine=engine) as file:
        file.write(data)
        with open(tmp_path / "x", "r+b") as other:
            other.write(b"x")
        request, errors = file.read_async(data), []
        for _ in range(2):
            with pytest.raises(OSError, match="are not what was written") as raised:
                request.wait()
            errors.append(raised.value)
        assert errors[0] is not errors[1] and str(errors[0]) == str(errors[1])


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    own = Engine(1)
    with File(tmp_path / "x", 4096, engine=own) as file:
        own.close()
        with pytest.raises(RuntimeError, match="this engine was closed"):
            file.write(torch.ones(10))


# ---- excerpts of other files -------------------------------------------------------------------------------------------------------------


def excerpts_of(paths: Sequence[Path], seed: int) -> tuple[list[Excerpt], bytes]:
    """Some bytes of each file in another order, with gaps, and what they are together."""
    random = Random(seed)
    excerpts, whole = list[Excerpt](), b""
    for _ in range(random.randint(1, 12)):
        path = random.choice(paths)
        data = path.read_bytes()
        offset = random.choice((0, 1, ALIGN, ALIGN + 3, random.randrange(len(data))))
        nbytes = random.choice((0, 1, ALIGN, random.randrange(len(data) - offset + 1)))
        nbytes = min(nbytes, len(data) - offset)
        whole += bytes(random.choice((0, 0, 1, 62, ALIGN)))
        for part in (slice(0, nbytes // 3), slice(nbytes // 3, nbytes)):  # neighbours
            excerpts.append(Excerpt(str(path), identity_of(path.stat()), offset + part.start, part.stop - part.start, len(whole)))
            whole += data[offset + part.start : offset + part.stop]
    return Random(seed).sample(excerpts, len(excerpts)), whole + bytes(random.choice((0, 5, ALIGN)))


@pytest.mark.parametrize("direct", (True, False))
def test_excerpts_are_read_as_one_file_whatever_their_place(direct: bool, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.setattr(nvme, "_past_cache", lambda path: -1)
    paths = [tmp_path / str(number) for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(pattern(5 * ALIGN + 17 * number, number).numpy().tobytes())
    for seed in range(40):
        excerpts, whole = excerpts_of(paths, seed)
        random = Random(seed)
        with Excerpts(excerpts, len(whole), checksum=True, cuts=[random.randrange(len(whole) + 1) for _ in range(3)], engine=engine) as file:
            assert file.nbytes == len(whole) and len(file.excerpts) <= len(excerpts) / 2  # neighbours are one
            for _ in range(4):
                begin = random.randrange(len(whole) + 1)
                end = random.choice((len(whole), random.randrange(begin, len(whole) + 1)))
                got = torch.full((end - begin + 3,), 255, dtype=torch.uint8)[3:] if random.random() < 0.5 else aligned(end - begin).fill_(255)
                file.read(got, begin)
                assert got.numpy().tobytes() == whole[begin:end]
            assert file.read_nbytes <= 4 * sum(excerpt.nbytes for excerpt in excerpts) and file.written_nbytes == 0
            with pytest.raises(ValueError, match="opened for reading"):
                file.write(torch.zeros(1), 0)
    assert sorted(tmp_path.iterdir()) == paths


def test_nothing_but_gaps_is_read_as_zeros(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "x").write_bytes(b"x")
    with Excerpts([Excerpt(str(tmp_path / "x"), identity_of((tmp_path / "x").stat()), 0, 0)], 100, checksum=True, engine=engine) as file:
        got = torch.ones(100, dtype=torch.uint8)
        file.read(got)
        assert not got.any() and file.read_nbytes == 0


def test_excerpts_say_which_bytes_of_which_file_have_changed(tmp_path: Path, engine: Engine) -> None:
    """Also where size and time of change are as before: what is read twice is compared."""
    excerpts = []
    for number, name in enumerate("ab"):
        (tmp_path / name).write_bytes(pattern(ALIGN, number).numpy().tobytes())
        excerpts.append(Excerpt(str(tmp_path / name), identity_of((tmp_path / name).stat()), 0, ALIGN, number * ALIGN))
    with Excerpts(excerpts, 2 * ALIGN, checksum=True, cuts=[ALIGN], engine=engine) as file:
        got = aligned(2 * ALIGN)
        file.read(got)
        times = (tmp_path / "b").stat()
        (tmp_path / "b").write_bytes(pattern(ALIGN, 7).numpy().tobytes())
        os.utime(tmp_path / "b", ns=(times.st_atime_ns, times.st_mtime_ns))
        file.read(got[:ALIGN])
        with pytest.raises(OSError, match=rf"{ALIGN} bytes at offset {ALIGN} are not what was read there.*{tmp_path / 'b'}"):
            file.read(got)
        (tmp_path / "a").write_bytes(b"")
        with pytest.raises(OSError, match=rf"has been changed since.*{tmp_path / 'a'}"):
            file.read(got[:ALIGN])
