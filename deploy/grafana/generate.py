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


def boards():
    """{file name: text} of all boards."""
    return {f'{board.name}.json': text(board) for board in (part.board() for part in (overview, tiers, steps, disk, wire, jobs))}


def stale():
    """Names of files in boards/ that are not what boards() says."""
    wanted = boards()
    there = {path.name: path.read_text() for path in FOLDER.glob('*.json')}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def main():
    if sys.argv[1:] == ['--check']:
        if names := stale():
            sys.exit(f'boards: run deploy/grafana/generate.py: {", ".join(names)} in boards/ are not what it writes')
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        FOLDER.mkdir(exist_ok=True)
        for name in stale():
            if name in boards():
                (FOLDER / name).write_text(boards()[name])
            else:
                (FOLDER / name).unlink()


if __name__ == '__main__':
    main()
