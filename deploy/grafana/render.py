#!/usr/bin/env python3
"""Draws a board as HTML from a live Prometheus: the board's own grid and queries, inline SVG. Ballast's renderer, not Grafana.

Usage: render.py PROMETHEUS_URL BOARD.json OUT.html [--span SECONDS] [--step SECONDS] [--rate-interval TEXT]
Prints the height in pixels for a window of WIDTH pixels; `chromium --headless --screenshot` makes a picture.
"""

import argparse
import html
import json
import math
import pathlib
import re
import time

import answers

WIDTH = 1280
CELL = (WIDTH - 8) / 24
LINE = 36
HEADER = 40
PALETTE = ['#7eb26d', '#eab839', '#6ed0e0', '#ef843c', '#e24d42', '#1f78c1', '#ba43a9', '#705da0', '#508642', '#cca300']
NAMED = {
    'green': '#73bf69',
    'orange': '#ff9830',
    'red': '#f2495c',
    'blue': '#5794f2',
    'purple': '#b877d9',
    'yellow': '#fade2a',
    'text': '#9fa7b3',
    'light-blue': '#8ab8ff',
    'semi-dark-orange': '#ff780a',
    'super-light-purple': '#deb6f2',
}
STYLE = """body{margin:0;background:#111217;color:#ccccdc;font:12px DejaVu Sans,sans-serif}#grid{position:relative;margin:0 0 0 8px}
.panel{position:absolute;background:#181b1f;border:1px solid #2c3235;border-radius:3px;overflow:hidden}
h1{font-size:15px;font-weight:500;margin:0;padding:10px 8px}h3{font-size:12px;font-weight:500;margin:6px 8px}small{color:#8e8e9e;font-weight:400}
.row{position:absolute;padding:9px 2px;font-size:13px}.none{text-align:center;padding-top:26px;color:#777}
.stat{display:flex;justify-content:center;gap:22px;text-align:center;padding-top:12px}
.stat b{display:block;font-size:26px;font-weight:500;white-space:nowrap}.several b{font-size:19px;line-height:32px}.stat span{color:#8e8e9e;font-size:11px}
svg text{fill:#8e8e9e;font-size:10px}.legend{font-size:10.5px;line-height:15px;padding:0 8px;white-space:nowrap}
.legend i{display:inline-block;width:12px;height:3px;margin:3px 6px 3px 0}.legend b{float:right;font-weight:400;color:#8e8e9e}
table{border-collapse:collapse;width:100%;font-size:11.5px}th{color:#8ab8ff;font-weight:500}
th,td{text-align:left;padding:4px 8px;border-bottom:1px solid #2c3235}"""


def show(value, unit, decimals=None):
    """The value in Grafana's way for the units that the boards use."""
    if value is None or math.isnan(value):
        return '-'
    if unit in ('bytes', 'Bps'):
        power = min(5, max(0, int(math.log(abs(value), 1024)))) if abs(value) >= 1 else 0
        return f'{value / 1024**power:.3g} {["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}' + ('/s' if unit == 'Bps' else '')
    if unit == 'percentunit':
        return f'{100 * value:.{1 if decimals is None else decimals}f} %'
    if unit == 's':
        if value >= 120:
            return f'{value / 60:.3g} min'
        factor, name = next(((f, n) for f, n in ((1, 's'), (1e3, 'ms')) if abs(value) * f >= 1), (1e6, 'µs'))
        return f'{value * factor:.3g} {name}'
    if unit == 'short' and abs(value) >= 1000:
        power = min(3, int(math.log10(abs(value)) // 3))
        return f'{value / 1000**power:.3g} {["", "K", "Mil", "Bil"][power]}'
    text = f'{value:.{decimals}f}' if decimals is not None else f'{value:.4g}' if abs(value) < 10000 else f'{value:.0f}'
    return text + {'reqps': ' req/s', 'ops': ' ops/s', 'd': ' days'}.get(unit, '')


def finite(points):
    return [value for _, value in points if math.isfinite(value)]


class Picture:
    """A board's answers over the last `span` seconds."""

    def __init__(self, prometheus, board, span, step, rate_interval):
        self.board, self.span, self.end = board, span, time.time()
        self.parts = [
            (
                panel,
                [
                    (target, answers.ask(prometheus, target, texts, self.end, span, step, rate_interval))
                    for target in panel.get('targets', [])
                ],
            )
            for panel, texts in answers.panels(board, answers.variables(prometheus, board))
        ]

    def html(self):
        drawn, bottom = [], 0
        for panel, answered in self.parts:
            grid = panel['gridPos']
            bottom = max(bottom, grid['y'] + grid['h'])
            width, height = grid['w'] * CELL - 8, grid['h'] * LINE - 8
            place = f'left:{grid["x"] * CELL:.0f}px;top:{grid["y"] * LINE}px;width:{width:.0f}px'
            title = html.escape(panel['title'])
            if panel['type'] == 'row':
                drawn.append(f'<div class=row style="{place}">▾ {title}</div>')
                continue
            draw = {'stat': self.stat, 'timeseries': self.series, 'heatmap': self.heatmap, 'table': self.table}[panel['type']]
            body = draw(panel, answered, width, height) if any(series for _, series in answered) else '<div class=none>No data</div>'
            hover = html.escape(panel['description'])
            drawn.append(f'<div class=panel title="{hover}" style="{place};height:{height}px"><h3>{title}</h3>{body}</div>')
        pixels = HEADER + bottom * LINE
        when = time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(self.end))
        return pixels, (
            f'<!doctype html><meta charset=utf-8><title>{html.escape(self.board["title"])}</title><style>{STYLE}</style>'
            f"<h1>{html.escape(self.board['title'])} <small>drawn by Ballast's deploy/grafana/render.py from a live Prometheus, {when}; "
            f'not Grafana</small></h1><div id=grid style="height:{bottom * LINE}px">{"".join(drawn)}</div>'
        )

    @staticmethod
    def stat(panel, answered, width, height):
        defaults = panel['fieldConfig']['defaults']
        shown = []
        for target, series in answered:
            for labels, points in series:
                values = finite(points)
                value = values[-1] if values else None
                steps = defaults['thresholds']['steps']
                color = [s['color'] for s in steps if s['value'] is None or (value is not None and value >= s['value'])][-1]
                text = show(value, defaults['unit'], defaults.get('decimals'))
                name = html.escape(answers.legend(target, labels))
                shown.append(
                    (
                        name if panel['options']['textMode'] == 'name' else text,
                        NAMED[color],
                        '' if panel['options']['textMode'] == 'name' else name,
                    )
                )
        return (
            f'<div class="stat{" several" if len(shown) > 1 else ""}">'
            + ''.join(f'<div><b style="color:{color}">{text}</b><span>{name}</span></div>' for text, color, name in shown[:3])
            + '</div>'
        )

    def axes(self, top, unit, width, height):
        """(x of a time, y of a value, the grid's SVG)."""

        def across(at):
            return 66 + (at - self.end + self.span) / self.span * (width - 78)

        def down(value):
            return 8 + (height - 30) * (1 - value / top)

        lines = ''.join(
            f'<line x1=66 x2={width - 12:.0f} y1={down(top * k / 4):.1f} y2={down(top * k / 4):.1f} stroke=#2c3235 />'
            f'<text x=60 y={down(top * k / 4) + 4:.1f} text-anchor=end>{show(top * k / 4, unit)}</text>'
            for k in range(5)
        )
        lines += ''.join(
            f'<text x={across(at):.0f} y={height - 6:.0f} text-anchor=middle>{time.strftime("%H:%M:%S", time.gmtime(at))}</text>'
            for at in (self.end - self.span * 0.9, self.end - self.span / 2, self.end - self.span * 0.1)
        )
        return across, down, lines

    def series(self, panel, answered, width, height):
        field = panel['fieldConfig']
        unit, stacked = field['defaults']['unit'], field['defaults']['custom']['stacking']['mode'] == 'normal'
        named = sorted(
            ((answers.legend(target, labels), points) for target, series in answered for labels, points in series), key=lambda s: s[0]
        )
        rows = max(1, min(len(named), int(height * 0.45 / 15)))
        drawn, below = [], {}
        for i, (name, points) in enumerate(named):
            properties = {
                p['id']: p['value'] for override in field['overrides'] if matches(override['matcher'], name) for p in override['properties']
            }
            color = NAMED.get(properties.get('color', {}).get('fixedColor'), PALETTE[i % len(PALETTE)])
            stack = stacked and properties.get('custom.stacking', {}).get('mode') != 'none'
            line = []
            for at, value in points:
                if math.isfinite(value):
                    low = below.get(at, 0) if stack else 0
                    line.append((at, low, low + value))
                    if stack:
                        below[at] = low + value
            drawn.append((color, stack, 'custom.lineStyle' in properties, line))
        top = max([high for *_, line in drawn for _, _, high in line] + [field['defaults'].get('max', 0)]) * 1.05 or 1
        chart = height - 34 - 15 * rows
        across, down, svg = self.axes(top, unit, width, chart)
        for color, stack, dashed, line in reversed(drawn):
            upper = ' '.join(f'{across(at):.1f},{down(high):.1f}' for at, _, high in line)
            lower = ' '.join(f'{across(at):.1f},{down(low):.1f}' for at, low, _ in reversed(line))
            if not dashed:
                svg += f'<polygon points="{upper} {lower}" fill="{color}" fill-opacity="{0.45 if stack else 0.07}"/>'
            svg += f'<polyline points="{upper}" fill=none stroke="{color}" stroke-width=1.4 {"stroke-dasharray=6" if dashed else ""} />'
        legends = ''
        for (color, *_), (name, points) in list(zip(drawn, named))[:rows]:
            values = finite(points)
            figures = f'mean {show(sum(values) / len(values), unit)} · last {show(values[-1], unit)}' if values else '-'
            legends += f'<div class=legend><i style="background:{color}"></i>{html.escape(name)}<b>{figures}</b></div>'
        return f'<svg width={width:.0f} height={chart:.0f}>{svg}</svg>{legends}'

    def heatmap(self, panel, answered, width, height):
        """Buckets as rows, coloured by how many steps fell inside."""
        rows = sorted(((float(labels['le']), dict(points)) for labels, points in answered[0][1]), key=lambda row: row[0])
        counts, before = [], {}
        for bound, row in rows:
            counts.append((bound, {at: max(0, value - before.get(at, 0)) for at, value in row.items()}))
            before = row
        used = [i for i, (_, row) in enumerate(counts) if any(row.values())]
        if not used:
            return '<div class=none>No steps</div>'
        counts = counts[max(0, used[0] - 1) : used[-1] + 2]
        most = max(value for _, row in counts for value in row.values())
        chart, svg = height - 34, ''
        tall = (chart - 30) / len(counts)
        across, _, _ = self.axes(1, '', width, chart)
        for i, (bound, row) in enumerate(counts):
            y = chart - 22 - (i + 1) * tall
            times = sorted(row)
            wide = (width - 78) / max(1, len(times))
            svg += f'<text x=60 y={y + tall / 2 + 3:.1f} text-anchor=end>{show(bound, "s") if math.isfinite(bound) else "more"}</text>'
            svg += ''.join(
                f'<rect x={across(at) - wide:.1f} y={y:.1f} width={wide:.1f} height={max(1, tall - 1):.1f} fill=#ff9830 '
                f'fill-opacity={0.1 + 0.9 * math.sqrt(row[at] / most):.2f} />'
                for at in times
                if row[at] > 0
            )
        return f'<svg width={width:.0f} height={chart:.0f}>{svg}</svg>'

    @staticmethod
    def table(panel, answered, width, height):
        """Grafana's `merge`: rows that agree in the labels that they share become a single row."""
        organize = next(t['options'] for t in panel['transformations'] if t['id'] == 'organize')
        rows = []
        for target, series in answered:
            value = 'Value' if len(answered) == 1 else f'Value #{target["refId"]}'
            for labels, points in series:
                fields = {**labels, value: points[-1][1]}
                into = [
                    row
                    for row in rows
                    if value not in row
                    and row.keys() & labels.keys()
                    and all(row[name] == labels[name] for name in row.keys() & labels.keys())
                ]
                if into:
                    into[0].update(fields)
                else:
                    rows.append(fields)
        units = {o['matcher']['options']: {p['id']: p['value'] for p in o['properties']} for o in panel['fieldConfig']['overrides']}
        names = sorted((name for name in organize['renameByName'] if any(name in row for row in rows)), key=organize['indexByName'].get)
        first = names[0]
        body = ''
        for row in sorted(rows, key=lambda row: str(row.get(first, ''))):
            cells = ''
            for name in names:
                value, properties = row.get(name, ''), units.get(organize['renameByName'][name], {})
                mapped = properties.get('mappings', [{'options': {}}])[0]['options'].get(
                    show(value, 'none') if isinstance(value, float) else value
                )
                text = mapped['text'] if mapped else show(value, properties.get('unit', 'none')) if isinstance(value, float) else value
                cells += f'<td{" style=color:" + NAMED[mapped["color"]] if mapped else ""}>{html.escape(text)}</td>'
            body += f'<tr>{cells}</tr>'
        return '<table><tr>' + ''.join(f'<th>{html.escape(organize["renameByName"][name])}</th>' for name in names) + f'</tr>{body}</table>'


def matches(matcher, name):
    if matcher['id'] == 'byRegexp':
        return re.search(matcher['options'].strip('/'), name) is not None
    return matcher['options'] == name


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('prometheus')
    parser.add_argument('board', type=pathlib.Path)
    parser.add_argument('out', type=pathlib.Path)
    parser.add_argument('--span', type=int, default=3600, help='seconds (default: 3600)')
    parser.add_argument('--step', type=float, default=15, help='seconds (default: 15)')
    parser.add_argument('--rate-interval', default='1m', help='four scrape intervals at least (default: 1m)')
    options = parser.parse_args()
    board = json.loads(options.board.read_text())
    pixels, page = Picture(answers.Prometheus(options.prometheus), board, options.span, options.step, options.rate_interval).html()
    options.out.write_text(page)
    print(pixels)


if __name__ == '__main__':
    main()
