"""Rows of figures, as a table and as a picture."""

from dataclasses import dataclass, field

from fire.run import SCHEDULE
from fire.score import Return, Swept


@dataclass
class Row:
    system: str
    versions: str
    tokens_per_s: list[float]  # without faults: before and after
    counted_per_s: float  # tokens that count in the end, per second under fire
    goodput: float
    goodput_without_starts: float
    lost_steps: int
    lost_tokens: int
    differing_elements: int | None  # None: there is nothing to compare with
    elements: int
    operator: list[str]
    flip: str  # what became of the byte
    steps: int
    deaths: int  # of groups, by no fault of the schedule
    returns: list[Return]
    interval: int = 0
    sweep: list[Swept] = field(default_factory=list)
    curve: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # of the picture: seconds, thousand tokens that count


def read_row(fields: dict) -> Row:
    """As dataclasses.asdict has written it."""
    returns, swept = [Return(**each) for each in fields['returns']], [Swept(**each) for each in fields['sweep']]
    return Row(**{**fields, 'returns': returns, 'sweep': swept})


def curve(events: list[dict], seconds: float, tokens: int) -> tuple[list[float], list[float]]:
    begin = next(event['t'] for event in events if event['what'] == 'begin')
    times, counts = [0.0], [0.0]
    for event in (event for event in events if event['what'] in ('step', 'opened') and event['rank'] == 0):
        if event['t'] > begin + seconds:
            break
        if event['what'] == 'opened':  # what a lost step had made is gone
            times.append(event['t'] - begin)
            counts.append(counts[-1])
        times.append(event['t'] - begin)
        counts.append(event['step'] * tokens / 1000)
    return [*times, seconds], [*counts, counts[-1]]


def table(rows: list[Row]) -> str:
    lines = [f'{"system":18} {"tokens/s alone":>14} {"under fire":>10} {"goodput":>8} {"without starts":>14} {"lost steps":>10} '
             f'{"lost tokens":>11} {"differing elements":>20} {"operator":>8}  flipped byte']
    for row in rows:
        differ = 'not compared' if row.differing_elements is None else f'{row.differing_elements} of {row.elements}'
        alone = ' '.join(f'{rate:.0f}' for rate in row.tokens_per_s)
        lines.append(f'{row.system:18} {alone:>14} {row.counted_per_s:10.0f} {row.goodput:8.3f} {row.goodput_without_starts:14.3f} '
                     f'{row.lost_steps:10} {row.lost_tokens:11} {differ:>20} {len(row.operator):8}  {row.flip}')
    for row in rows:
        died = f', and {row.deaths} groups died by no fault of the schedule' if row.deaths else ''
        lines += ['', f'{row.system} ({row.versions}): {row.steps} steps count{died}']
        if row.sweep:
            lines.append('  a checkpoint every K steps, measured: ' + '; '.join(
                f'K {each.interval}: {each.step_s:.2f} s a step, whole after {each.lag_s:.2f} s, goodput {each.goodput:.2f} expected'
                for each in row.sweep) + f'; chosen: {row.interval}')
        for back in row.returns:
            what = next(text for _, fault, text in SCHEDULE if fault == back.fault)
            if back.seconds is None:
                lines.append(f'  at {back.at_s:5.1f} s {what}: no step counted any more')
                continue
            stages = ', '.join(f'{stage} {seconds:.2f}' for stage, seconds in back.stages.items())
            lines.append(f'  at {back.at_s:5.1f} s {what}: {back.lost_steps} steps lost, {back.seconds:.2f} s to the next step that counts '
                         f'({stages})')
        lines += [f'  operator: {action}' for action in row.operator]
    return '\n'.join(lines)


def draw(path: str, rows: list[Row], seconds: float, machine: str) -> None:
    """A PNG: tokens that count over time, one line a system; faults as marks."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(9, 4.5), dpi=110)
    for row in rows:
        axes.plot(*row.curve, label=row.system, linewidth=1.6)
    for at, fault, _ in SCHEDULE:
        axes.axvline(at * seconds, color='0.75', linewidth=0.8, zorder=0)
        axes.text(at * seconds, axes.get_ylim()[1], ' ' + fault, rotation=90, va='top', ha='left', fontsize=8, color='0.4')
    axes.set_title(machine, fontsize=8, color='0.4', loc='right')
    axes.set_xlabel('seconds')
    axes.set_ylabel('thousand tokens that count')
    axes.legend(loc='lower right', frameon=False)
    axes.spines[['top', 'right']].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
