"""What a run's events say: steps that count, lost work, and where the time went."""

from dataclasses import dataclass, field

WARM_UP = 3  # first steps of a process are slower, and in no rate


@dataclass
class Return:
    """From a fault to the next step that counts."""
    fault: str
    at_s: float  # since the beginning
    seconds: float | None = None  # None: no step counted any more
    stages: dict[str, float] = field(default_factory=dict)  # seconds of each, in order
    lost_steps: int = 0


@dataclass
class Score:
    seconds: float
    steps: int = 0  # that count in the end
    lost_steps: int = 0
    starts_s: float = 0.0  # of process starts and `import torch`
    deaths: int = 0  # of groups, by no fault of the schedule
    returns: list[Return] = field(default_factory=list)


def of_rank_0(events: list[dict], what: str) -> list[dict]:
    return [event for event in events if event['what'] == what and event['rank'] <= 0]


def step_seconds(events: list[dict], first: int = WARM_UP, last: int | None = None) -> tuple[float, int]:
    """Mean seconds of a step, between the ends of steps number `first` and `last` of an undisturbed run, and how many steps these are."""
    ends = [event['t'] for event in of_rank_0(events, 'step')][:last]
    if len(ends) < first + 2:
        raise ValueError(f'{len(ends)} steps, expected at least {first + 2}: give more seconds')
    return (ends[-1] - ends[first - 1]) / (len(ends) - first), len(ends) - first


def score(events: list[dict], seconds: float) -> Score:
    begin = next(event['t'] for event in events if event['what'] == 'begin')
    later = [event for event in events if event['t'] > begin + seconds]
    events = [event for event in events if event['t'] <= begin + seconds]
    result = Score(seconds)
    result.returns = [_return(events, fault, begin) for fault in of_rank_0(events, 'fault')]

    def lose(steps: int, at: float) -> None:
        result.lost_steps += max(0, steps)
        if faults := [each for each in result.returns if begin + each.at_s < at]:
            faults[-1].lost_steps += max(0, steps)
    now = 0
    for event in events:
        if event['rank'] == 0 and event['what'] == 'step':
            now = event['step']
        elif event['rank'] == 0 and event['what'] == 'opened':
            lose(now - event['step'], event['t'])
            now = event['step']
    died = max((event['t'] for event in events if event['what'] == 'ended_badly'), default=begin)
    if not any(event['t'] > died for event in of_rank_0(events, 'opened')):
        # The last group had not found its state by the end. What it then found counts, or nothing if it never did.
        found = next((event['step'] for event in of_rank_0(later, 'opened')), 0)
        lose(now - found, begin + seconds)
        now = min(now, found)
    result.steps = now
    for event in of_rank_0(events, 'spawned'):
        ended = [other['t'] for other in events if other['what'] == 'imported' and other['generation'] == event['generation']]
        cut = [other['t'] for other in events if other['what'] in ('fault', 'ended_badly') and other['t'] > event['t']]
        result.starts_s += (max(ended) if len(ended) == event['world'] else min([*cut, begin + seconds])) - event['t']
    result.deaths = sum(event['what'] == 'ended_badly' and event['by_itself'] for event in events)
    return result


# Ends of stages on the way of a new group, and what they end.
_STAGES = (('operator', 'operator'), ('server_spawned', 'noticed'), ('server_ready', 'server: start, replay'), ('spawned', 'noticed'),
           ('imported', 'process start, import torch'), ('grouped', 'rendezvous'), ('modelled', 'imports, model'), ('opened', 'state'))


def _return(events: list[dict], fault: dict, begin: float) -> Return:
    result = Return(fault['fault'], fault['t'] - begin)
    before = max((event['step'] for event in of_rank_0(events, 'step') if event['t'] <= fault['t']), default=0)
    step = next((event for event in of_rank_0(events, 'step') if event['t'] > fault['t'] and event['step'] > before), None)
    if step is None:
        return result
    result.seconds = step['t'] - fault['t']
    last = fault['t']
    for what, stage in _STAGES:
        if what.startswith('server_') and fault['fault'] != 'server':
            continue  # beside the trainers' start
        ends = [event['t'] for event in events if event['what'] == what and fault['t'] < event['t'] <= step['t']
                and event.get('generation', step['generation']) == step['generation']]
        if ends:
            result.stages[stage] = max(ends) - last
            last = max(ends)
    result.stages['steps until one counts'] = step['t'] - last
    return result


@dataclass
class Swept:
    interval: int
    step_s: float  # of a step, checkpoints included
    lag_s: float  # from the end of a step to its checkpoint being whole
    goodput: float  # predicted


def sweep(events: list[dict], alone: int, kills: int, seconds: float) -> list[Swept]:
    """By interval: what checkpoints cost, and the goodput to expect under so many kills in so many seconds."""
    plain, _ = step_seconds(events, last=alone)
    result = []
    for start in of_rank_0(events, 'sweep'):
        end = next(event['t'] for event in of_rank_0(events, 'swept') if event['interval'] == start['interval'])
        within = [event for event in events if start['t'] < event['t'] <= end and event['rank'] == 0]
        step_s = (end - start['t']) / sum(event['what'] == 'step' for event in within)
        lags = []
        for saved in (event for event in events if event['what'] == 'saved' and event['rank'] == 0 and event['t'] >= start['t']):
            made = [event['t'] for event in events if event['what'] == 'step' and event['step'] == saved['step']]
            lags.append(saved['t'] - made[-1])
        lag = sum(lags[:2]) / max(1, len(lags[:2]))
        lost = kills * (start['interval'] / 2 * step_s + lag)
        result.append(Swept(start['interval'], step_s, lag, plain / step_s * max(0.0, 1 - lost / seconds)))
    return result
