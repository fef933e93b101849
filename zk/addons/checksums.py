"""Checksums on the drive: one that lies is heard. What a short read cuts is not checked.

Every optimizer has them. Uses of the core: the seam ``tier``; ``Drive.file``, ``File.system``.
"""

import errno
from typing import Any

from xxhash import xxh3_64_intdigest as checksum  # as fast as memory is read

from zk.addon import Addon
from zk.offload import file
from zk.offload.drive import Drive


class Checksums(Addon):
    """It stands before the file's system calls: notes what is written, checks what is read."""

    def __init__(self) -> None:
        # by file and block: start -> stop and checksum of parts, which do not overlap
        self.parts: dict[Any, Any] = {}

    def tier(self, unit: Any, what: str, tier: Any) -> Any:
        if isinstance(tier, Drive) and tier.file.system is not self:
            self.system, tier.file.system = tier.file.system, self
        return tier

    def pwritev(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        parts = self.parts.setdefault((descriptor, offset // file.BLOCK_NBYTES), {})
        for start, (stop, _) in parts.copy().items():  # in one go: other threads write to it
            if start < offset + len(buffers[0]) and offset < stop:
                parts.pop(start, None)
        moved: int = self.system.pwritev(descriptor, buffers, offset)
        parts[offset] = offset + moved, checksum(buffers[0][:moved])
        return moved

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        moved: int = self.system.preadv(descriptor, buffers, offset)
        parts = self.parts.get((descriptor, offset // file.BLOCK_NBYTES), {})
        for start, (stop, value) in parts.copy().items():
            here = buffers[0][max(start - offset, 0) : max(min(stop - offset, moved), 0)]
            if len(here) == stop - start and checksum(here) != value:
                raise OSError(
                    errno.EIO,
                    f"the {len(here)} bytes at offset {start} are not what was written there (their "
                    "checksum differs): the drive, or another process, has changed them",
                )
        return moved
