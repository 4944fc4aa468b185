"""Pinned memory for what is on its way, made once: transfers lease ranges of it.

What comes in and what goes out have a share each: of two workers that send to each other, neither waits for the other
to take what it has. A range is free again when nobody has it any more. Streams keep what their operations were given
until those are done, transports what they were given until the transfer is: so nothing is written over.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from typing import Any

import numpy as np

from services.worker.device.cuda.driver import Driver, Pinned
from services.worker.device.device import Way
from shared.errors import TransportError
from shared.transport.base import Buffer

SHARE_BYTES = 512 << 20
"""Of each way: as much as ``kv_admission.staging`` lets come at once."""
ALIGN_BYTES = 4096


class Share:
    """One way's. Any thread."""

    def __init__(self, memory: Pinned) -> None:
        self._memory = memory
        self._address = int(memory.array.ctypes.data)
        self._free = [(0, memory.array.nbytes)]
        """Ranges ``begin, end``, in order, no two of which touch."""
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, int]] = deque()
        """Not in the list yet: ranges come back wherever the interpreter frees them, also under the lock."""

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return sum(end - begin for begin, end in self._free)

    def lease(self, num_bytes: int) -> Buffer | None:
        """``[num_bytes]`` uint8, which is leased for as long as anybody has it or a part of it; None: there is no
        such range now."""
        needed = max(1, -(-num_bytes // ALIGN_BYTES)) * ALIGN_BYTES
        with self._lock:
            self._take_back()
            for index, (begin, end) in enumerate(self._free):
                if end - begin >= needed:
                    self._free[index : index + 1] = [(begin + needed, end)] if end - begin > needed else []
                    break
            else:
                return None
        return np.asarray(_Lease(self, begin, begin + needed, num_bytes))

    def address(self, begin: int) -> int:
        return self._address + begin

    def give_back(self, begin: int, end: int) -> None:
        self._returned.append((begin, end))

    def _take_back(self) -> None:
        while self._returned:
            insort(self._free, self._returned.popleft())
        joined: list[tuple[int, int]] = []
        for begin, end in self._free:
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        self._free = joined


class _Lease:
    """What numpy's arrays over a range keep."""

    def __init__(self, share: Share, begin: int, end: int, num_bytes: int) -> None:
        self._share, self._begin, self._end = share, begin, end
        self.__array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (share.address(begin), False),
            "version": 3,
        }

    def __del__(self) -> None:
        self._share.give_back(self._begin, self._end)


class StagingMemory:
    """A device's. Any thread."""

    def __init__(self, driver: Driver, share_bytes: int) -> None:
        self._driver = driver
        self.shares: dict[Way, Share] = {way: Share(driver.pinned(share_bytes)) for way in ("out", "into")}

    def lease(self, num_bytes: int, way: Way) -> Buffer:
        """See ``Device.staging``. What finds no room has memory of its own, which takes the time to pin it: nobody
        waits for what another holds."""
        leased = self.shares[way].lease(num_bytes)
        if leased is not None:
            return leased
        try:
            return self._driver.pinned(num_bytes).array
        except RuntimeError as error:  # PyTorch's, of whatever CUDA says
            raise TransportError(f"CUDA pins no {num_bytes} bytes: {error}") from error
