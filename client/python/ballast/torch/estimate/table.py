"""An estimate's table of processes, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ballast.torch.estimate.processes import Job, Row, on_a_host

_PLACES = 'card', 'memory', 'disk'


def of(rows: Sequence[Row], job: Job, elements: int) -> str:
    """Returns the lines of each process and of what it is made of. elements: parameters of the model."""
    if not rows:
        return ''
    lines = ['', '  Bytes of each process, beside what Python, torch and activations take:',
             f'  {"":<44} {"card":>11} {"memory":>11} {"disk":>11} {"a parameter":>11}']
    for process, count in (('trainer', job.ranks), ('server', max(job.servers, 1))):
        mine = [row for row in rows if row.process == process]
        if mine:
            lines.append(_line(process if count == 1 else f'{process}, each of {count}', _by_place(mine), elements))
            lines += [_line('  ' + row.what, {row.place: row.size}, elements) for row in mine]
    if job.servers == 0 and job.ranks > 1:
        lines.append(_line('the host, with shared memory once', {'memory': on_a_host(rows, job.ranks)}, elements))
    return '\n'.join(lines) + '\n'


def _by_place(rows: Iterable[Row]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.place] = sizes.get(row.place, 0) + row.size
    return sizes


def _line(what: str, sizes: Mapping[str, int], elements: int) -> str:
    cells = ' '.join(f'{f"{sizes[where] / 2**30:.2f} GiB" if where in sizes else "":>11}' for where in _PLACES)
    return f'  {what:<44} {cells} {sum(sizes.values()) / max(elements, 1):>9.2f} B'
