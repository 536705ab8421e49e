"""Files of safetensors: a header that is checked as a whole, and tensors that are mapped one at a time.

A file has 8 bytes with the header's length, the header in JSON, and the tensors' bytes one behind the other.
Source: the format's description in safetensors' README."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
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
        """Returns a part of the tensor, or all of it, in memory of its own or in the file's, which ends with the result. Pages of the file
        come as they are read. box: (begin, end) of each dimension."""
        assert self.dtype is not None
        box = [(0, size) for size in self.shape] if box is None else box
        rows = box[0] if box else (0, 1)
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        if rows[0] >= rows[1] or row == 0:
            return torch.empty([end - begin for begin, end in box], dtype=self.dtype, device='cpu')
        values = self.file.map(self.begin + rows[0] * row, (rows[1] - rows[0]) * row, self.dtype)
        if not self.shape:
            return values.view(())
        cut = values.view(rows[1] - rows[0], *self.shape[1:])[(slice(None), *(slice(begin, end) for begin, end in box[1:]))]
        return cut.contiguous()


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

    def map(self, begin: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns bytes of the file as a tensor of one dimension. It maps the file, so its memory is the operating system's to take."""
        first = begin - begin % mmap.ALLOCATIONGRANULARITY
        try:
            with open(self.path, 'rb') as file:
                if _id_of(os.fstat(file.fileno())) != self._id:
                    raise Error(f"'{self.path}' has changed since its header was read; leave a checkpoint alone until the job has begun",
                                'CHECKSUM')
                # A private mapping, since torch warns of one that it could not write to. Nobody writes.
                mapped = mmap.mmap(file.fileno(), begin - first + size, access=mmap.ACCESS_COPY, offset=first)
        except OSError as error:
            raise Error(f"'{self.path}' cannot be read: {error.strerror or error}", 'BAD_CONFIG') from error
        for advice in ('MADV_SEQUENTIAL', 'MADV_WILLNEED'):
            if hasattr(mmap, advice):
                mapped.madvise(getattr(mmap, advice))
        if (begin - first) % dtype.itemsize == 0:
            return torch.frombuffer(mapped, dtype=dtype, count=size // dtype.itemsize, offset=begin - first)
        return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=begin - first).clone().view(dtype)


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
