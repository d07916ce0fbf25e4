"""Memory of a device: tensors of a launch, and a program's shared memory, which keeps who touched it when."""

import ctypes

import numpy as np
from torch import Tensor

POISON = 0xFF


class GlobalMemory:
    """The tensors that a launch was given. Any other address is refused."""

    def __init__(self, tensors: list[Tensor]) -> None:
        found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        self.parts = [
            (start, np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start)))
            for start, nbytes in found.items()
            if nbytes
        ]

    def _at(self, address: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
        for start, part in self.parts:
            if start <= address[0] < start + len(part):
                index = (address - np.uint64(start)).astype(np.int64)
                if index.min() < 0 or index.max() + nbytes > len(part):
                    break
                if (address % np.uint64(nbytes)).any():
                    raise MemoryError(f"an address is not a multiple of {nbytes}")
                return part, index[:, None] + np.arange(nbytes)
        raise MemoryError(f"addresses outside of every tensor: {address[:4]} ..")

    def read(self, address: np.ndarray, nbytes: int) -> np.ndarray:
        """Bytes [lanes, nbytes]."""
        part, index = self._at(address, nbytes)
        return part[index]

    def write(self, address: np.ndarray, data: np.ndarray) -> None:
        part, index = self._at(address, data.shape[1])
        part[index] = data


class SharedMemory:
    """Of one program. Touching what another warp touched since the last barrier is refused, unless both read.

    Asynchronous copies arrive when they are waited for, and no sooner: until then their target is NaN.
    """

    def __init__(self, nbytes: int) -> None:
        self.data = np.full(nbytes, POISON, dtype=np.uint8)
        self.phase = 1  # one more behind each barrier
        self.written, self.writer = (np.zeros(nbytes // 2 + 1, dtype=np.int64) for _ in range(2))
        self.readers = np.zeros((nbytes // 2 + 1, 32), dtype=np.int64)  # the phase in which each warp last read

    def _halves(self, address: np.ndarray, nbytes: int) -> np.ndarray:
        if (address % nbytes).any():
            raise MemoryError(f"a shared address is not a multiple of {nbytes}")
        if address.max() + nbytes > len(self.data):
            raise MemoryError(f"shared address {address.max()} of {len(self.data)} bytes")
        halves = (address[:, None] + np.arange(0, nbytes, 2)) // 2
        return halves.ravel()

    def read(self, address: np.ndarray, nbytes: int, warp: int) -> np.ndarray:
        address = address.astype(np.int64)
        halves = self._halves(address, nbytes)
        if ((self.written[halves] == self.phase) & (self.writer[halves] != warp)).any():
            raise RuntimeError("race: read what another warp has written since the last barrier")
        self.readers[halves, warp] = self.phase
        return self.data[address[:, None] + np.arange(nbytes)]

    def write(self, address: np.ndarray, data: np.ndarray, warp: int) -> None:
        address, nbytes = address.astype(np.int64), data.shape[1]
        at = address[:, None] + np.arange(nbytes)
        halves = self._halves(address, nbytes)
        readers = self.readers[halves] == self.phase
        readers[:, warp] = False
        touched = readers.any(axis=1) | ((self.written[halves] == self.phase) & (self.writer[halves] != warp))
        differs = (self.data[at].view(np.uint16) != np.ascontiguousarray(data).view(np.uint16)).ravel()
        if (touched & differs).any():  # the same once more harms nobody
            raise RuntimeError("race: write what another warp has touched since the last barrier")
        mine = halves[~touched]
        self.written[mine], self.writer[mine] = self.phase, warp
        self.data[at] = data
