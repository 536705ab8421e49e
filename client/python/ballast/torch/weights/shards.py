"""Files of safetensors: a header that is checked as a whole, and tensors that are read one at a time.

A file has 8 bytes with the header's length, the header in JSON, and the tensors' bytes one behind the other.
Source: the format's description in safetensors' README."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ballast.errors import Error

# As safetensors has it.
_HEADER_BYTES_MAX = 100_000_000
_LENGTH = struct.Struct('<Q')
_SAMPLE_BYTES = 256
# Rows of which only some columns are wanted are read so many bytes at a time.
_BLOCK_BYTES = 4 << 20
DTYPES = {torch.float64: 'F64', torch.float32: 'F32', torch.float16: 'F16', torch.bfloat16: 'BF16', torch.int64: 'I64', torch.int32: 'I32',
          torch.int16: 'I16', torch.int8: 'I8', torch.uint8: 'U8', torch.bool: 'BOOL'}
_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
_OTHER_BYTES = {'U16': 2, 'U32': 4, 'U64': 8, 'F8_E4M3': 1, 'F8_E5M2': 1, 'F8_E8M0': 1, 'C64': 8}

Box = Sequence[tuple[int, int]]


class Entry(NamedTuple):
    """One tensor of a file."""
    file: File
    name: str
    kind: str  # its dtype, as the file names it
    shape: tuple[int, ...]
    begin: int  # of its bytes in the file
    end: int

    @property
    def dtype(self) -> torch.dtype | None:
        """None: torch has none, or Ballast does not read it."""
        return _OF_NAME.get(self.kind)

    @property
    def where(self) -> str:
        return f"tensor '{self.name}' in '{self.file.path}'"

    def read(self, box: Box | None = None) -> torch.Tensor:
        """Returns a part of the tensor, or all of it, in memory of its own. box: (begin, end) of each dimension.

        Errors: as File.read()'s."""
        assert self.dtype is not None
        box = [(0, size) for size in self.shape] if box is None else box
        part = torch.empty([end - begin for begin, end in box], dtype=self.dtype, device='cpu')
        if part.numel() == 0:
            return part
        if not self.shape:
            self.file.read(self, self.begin, part)
            return part
        row, (first, last) = math.prod(self.shape[1:]) * self.dtype.itemsize, box[0]
        if all((begin, end) == (0, size) for (begin, end), size in zip(box[1:], self.shape[1:])):
            self.file.read(self, self.begin + first * row, part)
            return part
        count = max(1, _BLOCK_BYTES // row)
        rows = torch.empty([min(count, last - first), *self.shape[1:]], dtype=self.dtype, device='cpu')
        for at in range(first, last, count):
            here = rows[:min(count, last - at)]
            self.file.read(self, self.begin + at * row, here)
            part[at - first:at - first + len(here)] = here[(slice(None), *(slice(begin, end) for begin, end in box[1:]))]
        return part


class File:
    """A file whose header was read. It is open only while something is read of it."""

    def __init__(self, path: str) -> None:
        """Errors: CHECKSUM if the file is cut off or its header is damaged; BAD_CONFIG if it cannot be opened."""
        self.path = path
        try:
            with open(path, 'rb') as file:
                self._id = _id_of(os.fstat(file.fileno()))
                self.header = _header(path, file.read(_LENGTH.size), file.read, self._id.size)
        except (OSError, ValueError) as error:  # a name may have a null byte
            raise Error(f"'{path}' cannot be read: {getattr(error, 'strerror', None) or error}", 'BAD_CONFIG') from error
        self.data = _LENGTH.size + len(self.header)  # where the tensors' bytes begin
        self.entries = _entries(self, self._id.size - self.data)

    def samples(self) -> int:
        """Returns a digest of the header, and of some bytes amid each tensor."""
        digest = zlib.crc32(self.header)
        try:
            with open(self.path, 'rb') as file:
                for entry in sorted(self.entries.values(), key=lambda entry: entry.begin):
                    digest = zlib.crc32(os.pread(file.fileno(), _SAMPLE_BYTES, (entry.begin + entry.end) // 2), digest)
        except OSError as error:
            raise Error(f"'{self.path}' cannot be read: {error.strerror or error}", 'BAD_CONFIG') from error
        return digest

    def read(self, entry: Entry, begin: int, to: torch.Tensor) -> None:
        """Fills a contiguous tensor with bytes of the file. It reads and does not map the file, since a file that another process cuts off
        would end this process by SIGBUS. entry: which they are of, for messages.

        Errors: CHECKSUM if the file has changed or is cut off; BAD_CONFIG if it cannot be read."""
        memory = memoryview((ctypes.c_ubyte * to.nbytes).from_address(to.data_ptr())).cast('B')
        done = 0
        try:
            with open(self.path, 'rb', buffering=0) as file:
                now = os.fstat(file.fileno())
                if now.st_size < begin + to.nbytes:
                    raise self._cut_off(entry, begin + to.nbytes, now.st_size)
                if _id_of(now) != self._id:
                    raise Error(f"'{self.path}' has changed since its header was read; leave a checkpoint alone until the job has begun",
                                'CHECKSUM')
                while done < to.nbytes:
                    count = os.preadv(file.fileno(), [memory[done:]], begin + done)
                    if count == 0:
                        raise self._cut_off(entry, begin + to.nbytes, begin + done)
                    done += count
        except OSError as error:
            raise Error(f"'{self.path}' cannot be read: {error.strerror or error}", 'BAD_CONFIG') from error

    def _cut_off(self, entry: Entry, expected: int, came: int) -> Error:
        return Error(f"'{self.path}' was cut off since its header was read: tensor '{entry.name}' is expected up to byte {expected}, and "
                     f'the file ends at byte {came}. Take another copy of the checkpoint, and leave it alone until the job has begun',
                     'CHECKSUM')


class _Id(NamedTuple):
    device: int
    inode: int
    size: int
    written: int


def _id_of(stat: os.stat_result) -> _Id:
    return _Id(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _header(path: str, length: bytes, read: Any, size: int) -> bytes:
    count = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else -1
    if not 2 <= count <= min(_HEADER_BYTES_MAX, size - _LENGTH.size):
        raise _damaged(path, f'its {size} bytes do not begin with the length of a header that fits in')
    header: bytes = read(count)
    return header


def _entries(file: File, size: int) -> dict[str, Entry]:
    """size: of the tensors' bytes in the file."""
    try:
        fields = json.loads(file.header, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _damaged(file.path, f'its header is no JSON: {error}') from error
    if not isinstance(fields, dict):
        raise _damaged(file.path, 'its header is no JSON object')
    fields.pop('__metadata__', None)
    entries = {name: _entry(file, name, field) for name, field in fields.items()}
    at = file.data
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != at:
            raise _damaged(file.path, f"tensor '{entry.name}' begins at byte {entry.begin - file.data} of the data; expected "
                                      f'{at - file.data}, the end of the one before')
        at = entry.end
    if at - file.data != size:
        raise _damaged(file.path, f'its header speaks of {at - file.data} bytes of data, and it has {size}')
    return entries


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError('a name comes twice')
    return found


def _entry(file: File, name: str, field: Any) -> Entry:
    try:
        kind, shape, (begin, end) = field['dtype'], tuple(field['shape']), field['data_offsets']
        if not isinstance(kind, str) or not all(type(each) is int and each >= 0 for each in (*shape, begin, end)):
            raise ValueError('numbers below 0, or none')
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(file.path, f"what its header says of tensor '{name}' is not a dtype, a shape and two offsets ({error})") from error
    width = _OF_NAME[kind].itemsize if kind in _OF_NAME else _OTHER_BYTES.get(kind)
    if end < begin or (width is not None and end - begin != width * math.prod(shape)):
        raise _damaged(file.path, f"tensor '{name}' of shape {list(shape)} and dtype {kind} has {end - begin} bytes there")
    return Entry(file, name, kind, shape, file.data + begin, file.data + end)


def _damaged(path: str, what: str) -> Error:
    return Error(f"'{path}' is damaged or cut off: {what}. Take another copy of the checkpoint", 'CHECKSUM')


# --- writing

class Planned(NamedTuple):
    """A tensor of a file that is to be written."""
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def sync(path: str | os.PathLike[str]) -> None:
    """Returns when the file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Writing:
    """A file that is being written, tensor by tensor in the order of its header. It has its name from end() on."""

    def __init__(self, path: str, planned: Sequence[Planned]) -> None:
        self._path, self._planned = path, iter(planned)
        fields: dict[str, Any] = {'__metadata__': {'format': 'pt'}}  # without which transformers refuses a file
        at = 0
        for each in planned:
            fields[each.name] = {'dtype': DTYPES[each.dtype], 'shape': list(each.shape), 'data_offsets': [at, at + each.bytes]}
            at += each.bytes
        header = json.dumps(fields, separators=(',', ':')).encode()
        header += b' ' * (-len(header) % 8)
        self._file = open(path + '.tmp', 'wb', buffering=0)
        try:
            self._write(_LENGTH.pack(len(header)) + header)
        except BaseException:
            self.drop()
            raise

    def add(self, pieces: Iterable[torch.Tensor]) -> None:
        """pieces: of the next tensor, in the order of its elements, contiguous and on the host."""
        planned, size = next(self._planned), 0
        for piece in pieces:
            assert piece.dtype == planned.dtype and piece.is_contiguous()
            size += piece.nbytes
            if piece.nbytes > 0:
                # torch gives its memory away by numpy, which need not be installed.
                self._write(memoryview((ctypes.c_ubyte * piece.nbytes).from_address(piece.data_ptr())).cast('B'))
        assert size == planned.bytes

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view) > 0:
            view = view[self._file.write(view):]

    def end(self) -> None:
        """The file gets its name once it is on disk."""
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._path + '.tmp', self._path)

    def drop(self) -> None:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path + '.tmp')
