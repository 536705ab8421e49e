#!/usr/bin/env python3
"""Writes Ballast's Grafana boards.

Usage: generate.py           writes boards/*.json beside this file
       generate.py --check   fails where a file differs from what would be written
"""

import json
import pathlib
import sys

from grafana_foundation_sdk.cog.encoder import JSONEncoder

HERE = pathlib.Path(__file__).resolve().parent
FOLDER = HERE / 'boards'
sys.path.insert(0, str(HERE))
from definitions import disk, jobs, overview, steps, tiers, wire


def text(board):
    """The board as JSON: a line for each panel and each other part, which keeps files small and differences readable."""
    fields = json.loads(JSONEncoder(sort_keys=True).encode(board.board.build()))
    panels = ',\n  '.join(json.dumps(panel) for panel in fields.pop('panels'))
    parts = ',\n '.join(f'{json.dumps(name)}: {json.dumps(value)}' for name, value in fields.items())
    return f'{{\n {parts},\n "panels": [\n  {panels}\n ]\n}}\n'


def main():
    if sys.argv[1:] not in ([], ['--check']):
        sys.exit(__doc__)
    boards = [part.board() for part in (overview, tiers, steps, disk, wire, jobs)]
    wanted = {FOLDER / f'{board.name}.json': text(board) for board in boards}
    there = {path: path.read_text() for path in FOLDER.glob('*.json')}
    stale = sorted(path for path in wanted.keys() | there.keys() if wanted.get(path) != there.get(path))
    if sys.argv[1:] and stale:
        names = ', '.join(path.name for path in stale)
        sys.exit(f'boards: run deploy/grafana/generate.py: {names} in boards/ are not what it writes')
    for path in stale:
        path.write_text(wanted[path]) if path in wanted else path.unlink()


if __name__ == '__main__':
    main()
