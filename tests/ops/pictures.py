#!/usr/bin/env python3
"""Makes the pictures of the page and of `ballastctl top` in their READMEs, from two servers in training.

Usage: pictures.py      as root, after tests/ops/prepare.sh; writes services/monitoring/page/page.png and services/tools/top/top.png
"""
import html
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import browser
import ops
import page_test
import top_test

COLUMNS, ROWS = 110, 18
PALETTE = ['#1c2126', '#e06c60', '#7fd89a', '#e5c07b', '#4d8fd0', '#b58bd8', '#4fb8c4', '#d5dadf']
BRIGHT = ['#6d7a86', *PALETTE[1:7], '#ffffff']


def style_of(codes):
    """CSS of the parameters of one SGR sequence, as terminals draw them."""
    text, ground, more = '#d5dadf', None, ''
    for code in map(int, codes or [0]):
        if code == 0:
            text, ground, more = '#d5dadf', None, ''
        elif code == 39:
            text = '#d5dadf'
        elif code == 49:
            ground = None
        elif code == 1:
            more += 'font-weight:bold;'
        elif code == 2:
            text = '#9aa5af'
        elif code == 7:
            text, ground = '#1c2126', '#d5dadf'
        elif 30 <= code <= 37:
            text = PALETTE[code - 30]
        elif 40 <= code <= 47:
            ground = PALETTE[code - 40]
        elif 90 <= code <= 97:
            text = BRIGHT[code - 90]
        elif 100 <= code <= 107:
            ground = BRIGHT[code - 100]
    return f'color:{text};' + (f'background:{ground};' if ground else '') + more


def drawn(screen):
    """A screen of tmux with its escape sequences, as HTML."""
    out, codes = [], []
    for piece in re.split(r'(\x1b\[[0-9;]*m)', screen):
        if match := re.fullmatch(r'\x1b\[([0-9;]*)m', piece):
            new = [code for code in match.group(1).split(';') if code]
            codes = [] if new in ([], ['0']) else codes + new
        elif piece:
            # The font of braille is another one: each character is held to a column.
            text = re.sub('([\u2800-\u28ff])', r'<span class="braille">\1</span>', html.escape(piece))
            out.append(f'<span style="{style_of(codes)}">{text}</span>')
    return ('<meta charset="utf-8"><style>.braille{display:inline-block;width:1ch}</style><body style="margin:0;background:#1c2126">'
            '<pre style="margin:0;padding:12px;display:inline-block;'
            'font:14px/1.25 DejaVu Sans Mono,monospace">' + ''.join(out) + '</pre>')


def make():
    servers = [page_test.Server('node1', 'node1', 7070), page_test.Server('node2', 'node2', 7071)]
    addresses = ','.join(server.address for server in servers)
    ranks = [page_test.endless(addresses, 'bytes-lm', '--rank', rank, '--world-size', 2, '--rendezvous', 'meeting') for rank in range(2)]
    page_test.trained(*servers, job='warm-up')
    terminal = top_test.Tmux(COLUMNS, ROWS)
    terminal.keys(top_test.command(*servers), 'Enter')
    with browser.Browser() as chromium:
        page = chromium.open(servers[0].page, width=1100, height=900)
        page.select_option('#job', 'bytes-lm')
        page.wait_for_timeout(65000)  # a minute of rates
        page.screenshot(path='page.png', full_page=True)
        terminal.shows(top_test.KEYS)
        pathlib.Path('top.html').write_text(drawn(terminal.screen(colours=True).rstrip('\n')))
        shot = chromium.chromium.new_page(viewport={'width': 1100, 'height': 400})
        shot.goto(f'file://{os.getcwd()}/top.html')
        shot.locator('pre').screenshot(path='top.png')
    terminal.keys('q')
    for rank in ranks:
        ops.kill(rank)
    for name, to in (('page.png', 'services/monitoring/page/page.png'), ('top.png', 'services/tools/top/top.png')):
        data = pathlib.Path(name).read_bytes()
        assert len(data) < 200 * 1024, f'{name} has {len(data)} bytes'
        (ops.ROOT / to).write_bytes(data)
        print(to, len(data), 'bytes')


if __name__ == '__main__':
    if '--inside' not in sys.argv:  # a network of its own, so that the ports are free
        sys.exit(subprocess.run(['unshare', '--net', '--pid', '--fork', '--kill-child', '--mount-proc', 'sh', '-c',
                                 'ip link set lo up && exec "$0" "$@"', sys.executable, __file__, '--inside'], check=False).returncode)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make()
