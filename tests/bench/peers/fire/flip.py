"""One byte flips in the newest state that a disk has."""

import glob
import os
import struct
from collections.abc import Iterator

BLOCK = 4096


def of_checkpoints(folder: str) -> dict[str, object] | None:
    """The middle byte of the largest file of the newest checkpoint: of optimizer state, in every format. None: there is no checkpoint."""
    tag = newest(folder)
    if tag is None:
        return None
    if os.path.isdir(os.path.join(folder, tag + '_universal')):
        tag += '_universal'  # which the next group loads
    files = [os.path.join(inner, name) for inner, _, names in os.walk(os.path.join(folder, tag)) for name in names]
    path = max(files, key=os.path.getsize)
    return {'step': int(tag.removesuffix('_universal')), **_flip(path, os.path.getsize(path) // 2)}


def newest(folder: str) -> str | None:
    """The newest whole checkpoint."""
    # DeepSpeed names it; one of Distributed Checkpoint is whole once it has its .metadata.
    latest = os.path.join(folder, 'latest')
    if os.path.exists(latest):
        with open(latest, encoding='ascii') as file:
            return file.read().strip()
    whole = [os.path.basename(os.path.dirname(metadata)) for metadata in glob.glob(os.path.join(folder, '*', '.metadata'))]
    return max(whole, key=int, default=None)


def of_server(directory: str) -> dict[str, object]:
    """The middle byte of the newest slice of a decided step in the gradient log of the server's job; without a log, the middle of the
    file of extents."""
    for path in glob.glob(os.path.join(directory, 'log-*')):
        place = _newest_decided(path)
        if place is not None:
            return _flip(path, place)
    path = os.path.join(directory, 'nvme.tier')
    return _flip(path, os.path.getsize(path) // 2)


def _flip(path: str, at: int) -> dict[str, object]:
    with open(path, 'r+b') as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
    return {'file': os.path.join(os.path.basename(os.path.dirname(path)), os.path.basename(path)), 'offset': at}


# storage/log/log_format.h
_FILE = struct.Struct('<QIIQ')  # magic, digest, format, segment bytes
_SEGMENT = struct.Struct('<QIIQQ')  # magic, digest, salt, incarnation, first batch
_BATCH = struct.Struct('<QIIQQQQQQQII')  # magic, digest, copy, incarnation, batch, offset, meta, payload, synced, oldest, records, salt
_RECORD = struct.Struct('<QIIQQII')  # lsn, type, body bytes, payload at, payload bytes, digest, parity
_SEGMENT_MAGIC, _BATCH_MAGIC = 0x4d474553_4c4c4142, 0x48435442_4c4c4142
_FIRST_SEGMENT, _DECISION = 4 * BLOCK, 5


def _newest_decided(path: str) -> int | None:
    """Where the newest slice lies that a decision follows."""
    with open(path, 'rb') as file:
        segment_bytes = _FILE.unpack(file.read(_FILE.size))[3]
        found: list[tuple[int, int]] = []  # incarnation, offset
        for begin in range(_FIRST_SEGMENT, os.path.getsize(path), segment_bytes):
            file.seek(begin)
            magic, _, _, incarnation, _ = _SEGMENT.unpack(file.read(_SEGMENT.size))
            if magic == _SEGMENT_MAGIC:
                found.append((incarnation, begin))
        decided = False
        for incarnation, begin in sorted(found, reverse=True):
            for kind, place, size in reversed(list(_records(file, begin, begin + segment_bytes, incarnation))):
                decided = decided or kind == _DECISION
                if decided and size >= BLOCK:
                    return place + size // 2
    return None


def _records(file, begin: int, end: int, incarnation: int) -> Iterator[tuple[int, int, int]]:
    """(type, place of the payload, bytes of the payload), in the order of the log."""
    at = begin + 2 * BLOCK
    while at < end:
        file.seek(at)
        head = file.read(_BATCH.size)
        magic, _, _, lives, _, _, meta, payload, _, _, records, _ = _BATCH.unpack(head)
        if magic != _BATCH_MAGIC or lives != incarnation:
            return
        body = file.read(meta - _BATCH.size)
        into = 0
        for _ in range(records):
            _, kind, body_bytes, payload_at, size, _, _ = _RECORD.unpack_from(body, into)
            into += _RECORD.size + (body_bytes + 7) // 8 * 8
            yield kind, at + 2 * meta + payload_at, size
        at += 2 * meta + payload
