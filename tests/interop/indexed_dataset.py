"""Reads a data set as Megatron-LM's IndexedDataset does, with the standard library alone.

PREFIX.idx: nine bytes "MMIDIDX\\0\\0", version 1 (u64), the code of the token type (u8), numbers of sequences and of document
bounds (u64 each), then an array each of lengths (i32, in tokens), pointers (i64, in bytes of PREFIX.bin) and bounds of
documents (i64, in sequences). A reader maps both files and takes sequence i from pointers[i], lengths[i] tokens long.
"""

import mmap
import struct
import sys

# The type's code in the index: what `struct` and `array` call it, and its bytes.
TYPES = {1: ("B", 1), 2: ("b", 1), 3: ("h", 2), 4: ("i", 4), 5: ("q", 8), 6: ("d", 8), 7: ("f", 4), 8: ("H", 2)}


class IndexedDataset:
    def __init__(self, prefix):
        assert sys.byteorder == "little"
        with open(prefix + ".idx", "rb") as file:
            if file.read(9) != b"MMIDIDX\x00\x00":
                raise ValueError(f"{prefix}.idx has another header")
            (version,) = struct.unpack("<Q", file.read(8))
            if version != 1:
                raise ValueError(f"{prefix}.idx has version {version}")
            (code,) = struct.unpack("<B", file.read(1))
            self.letter, self.width = TYPES[code]
            self.sequence_count, bounds = struct.unpack("<QQ", file.read(16))
            offset = file.tell()
        with open(prefix + ".idx", "rb") as file:
            self._index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(self._index)

        def array(letter, width, count):
            nonlocal offset
            begin, offset = offset, offset + width * count
            return view[begin:offset].cast(letter)

        self.lengths = array("i", 4, self.sequence_count)
        self.pointers = array("q", 8, self.sequence_count)
        self.bounds = array("q", 8, bounds)
        if self.sequence_count != self.bounds[-1]:
            raise ValueError(f"{prefix}.idx: the last document ends at {self.bounds[-1]} of {self.sequence_count} sequences")
        with open(prefix + ".bin", "rb") as file:
            self._bin = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def __len__(self):
        return self.sequence_count

    def get(self, sequence, offset=0, length=None):
        """Tokens of a sequence from `offset` on."""
        length = self.lengths[sequence] - offset if length is None else length
        begin = self.pointers[sequence] + offset * self.width
        return self._bin[begin:begin + length * self.width].cast(self.letter).tolist()

    def documents(self):
        for first, last in zip(self.bounds[:-1], self.bounds[1:]):
            yield [token for sequence in range(first, last) for token in self.get(sequence)]


def documents_of(prefix):
    return IndexedDataset(prefix).documents()
