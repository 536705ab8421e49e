"""One byte flips in the newest state on a disk."""

import os


def newest(directories: list[str]) -> dict[str, object]:
    """Flips the middle byte of the largest file of what was written last. Returns what was flipped."""
    files = [os.path.join(folder, name) for directory in directories for folder, _, names in os.walk(directory) for name in names]
    path = max(files, key=lambda file: (os.path.getsize(file) > 1 << 20, os.path.getmtime(file)))
    at = os.path.getsize(path) // 2
    with open(path, 'r+b') as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
    return {'file': os.path.basename(path), 'offset': at}
