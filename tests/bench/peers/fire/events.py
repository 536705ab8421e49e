"""What trainers and launcher tell of a run: lines of JSON in one file, in the order of the system's monotonic clock."""

import json
import os
import time


class Events:
    def __init__(self, path: str, **always: object) -> None:
        """always: fields that every event has, such as the rank."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._always = always

    def tell(self, what: str, **fields: object) -> None:
        line = json.dumps({'t': time.monotonic(), 'what': what, **self._always, **fields}) + '\n'
        os.write(self._file, line.encode())


def read(path: str) -> list[dict]:
    if not os.path.exists(path):
        return []
    with open(path, encoding='utf-8') as file:
        lines = file.read().split('\n')
    return sorted((json.loads(line) for line in lines[:-1]), key=lambda event: event['t'])
