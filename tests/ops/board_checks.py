"""What a board must be, and whether a live Prometheus answers it: each function returns texts of what is wrong."""

import enum
import importlib.util
import json
import math
import re
import subprocess
import tempfile
import time
import typing

import board_answers
import ops
import watched

FAMILY = re.compile(r'\b(?:ballast|process)_\w+')
SELECTOR = re.compile(r'\b(?:ballast_\w+|process_\w+|up)(?:\{[^}]*\})?')
FUNCTIONS_OF_COUNTERS = r'(?:rate|increase|changes)\('


def layout(board):
    """Rules of Grafana's dashboard-linter, and ours: identity, variables, places, titles, ranges, matchers, counters."""
    wrong = []
    if board.get('id') is not None:
        wrong.append('has an id: Grafana gives a board its id')
    if not re.fullmatch(r'ballast-[a-z]{1,30}', board.get('uid', '')):
        wrong.append(f'uid {board.get("uid")}')
    if board.get('editable') is not False:
        wrong.append('is editable: a change in Grafana would be lost at the next provisioning')
    variables = board['templating']['list']
    names = [variable['name'] for variable in variables]
    if [variable['type'] for variable in variables].count('datasource') != 1 or names[0] != 'datasource':
        wrong.append('the first variable, and no other, is the data source')
    for variable in variables:
        if variable['type'] == 'query' and variable['refresh'] != 2:
            wrong.append(f'variable {variable["name"]} is not read again with the time range')
    ids, cells = set(), {}
    for panel in board['panels']:
        title = panel.get('title') or f'panel {panel.get("id")}'
        if panel['id'] in ids:
            wrong.append(f'{title}: id {panel["id"]} is there twice')
        ids.add(panel['id'])
        grid = panel['gridPos']
        for cell in [(x, y) for x in range(grid['x'], grid['x'] + grid['w']) for y in range(grid['y'], grid['y'] + grid['h'])]:
            if cell[0] >= 24:
                wrong.append(f'{title}: is right of the grid')
                break
            if cells.setdefault(cell, title) != title:
                wrong.append(f'{title}: lies over {cells[cell]}')
                break
        if panel['type'] != 'row':
            wrong += [f'{title}: {what}' for what in content(panel, names)]
    return wrong


def content(panel, variables):
    from grafana_foundation_sdk.models import units

    known = {value for value in vars(units).values() if isinstance(value, str)}
    for name in ('title', 'description'):
        if not panel.get(name):
            yield f'has no {name}'
    field = panel['fieldConfig']
    given = [field['defaults'].get('unit')] + [
        p['value'] for override in field['overrides'] for p in override['properties'] if p['id'] == 'unit'
    ]
    for unit in given:
        if unit not in known:
            yield f"unit {unit} is not one of Grafana's"
    if not panel['targets']:
        yield 'has no query'
    references = [target['refId'] for target in panel['targets']]
    if len(set(references)) != len(references):
        yield f'refId twice among {references}'
    for target in panel['targets']:
        for source in (panel['datasource'], target['datasource']):
            if source.get('uid') != '${datasource}':
                yield f'asks {source}, not the chosen data source'
        yield from ranges_and_matchers(target['expr'], variables)
        for label in re.findall(r'\{\{(.*?)\}\}', target['legendFormat']):
            if label not in target['expr']:
                yield f'legend {{{{{label}}}}}: the query has no such label'


def ranges_and_matchers(query, variables):
    for found in re.findall(r'(?:rate|increase|changes)\([^\[]*\[([^\]]*)\]', query):
        if found not in ('$__rate_interval', '$__range'):
            yield f'range [{found}] is fixed: [$__rate_interval] follows the scrape interval'
    for used in set(re.findall(r'\$(\w+)', query)) - {'__rate_interval', '__range'} - set(variables):
        yield f'variable ${used} is not one of the board'
    for selector in SELECTOR.findall(query):
        if 'job=~"$job"' not in selector or 'instance=~"$instance"' not in selector:
            yield f'{selector} does not choose job and instance'
        if (
            re.search(r'_(total|bucket|count|sum)\{', selector)
            and not re.search(FUNCTIONS_OF_COUNTERS + re.escape(selector), query)
            and ('max by' not in query)
        ):
            yield f'{selector}: a counter without rate'


def syntax(board):
    """promtool reads every query, with variables put in, as a recording rule."""
    rules, places = [], {}
    for panel in board['panels']:
        for target in panel.get('targets', []):
            texts = dict.fromkeys(re.findall(r'\$(\w+)', target['expr']), 'x')
            name = f'board:query{len(rules)}'
            places[name] = panel['title']
            rules.append({'record': name, 'expr': board_answers.substitute(target['expr'], texts, '1m', 60)})
    with tempfile.NamedTemporaryFile('w', suffix='.yml') as file:
        json.dump({'groups': [{'name': 'board', 'rules': rules}]}, file)
        file.flush()
        done = subprocess.run(['promtool', 'check', 'rules', file.name], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    return [
        f'{places.get((re.search("board:query[0-9]+", line) or [""])[0], "?")}: {line.strip()}'
        for line in (done.stdout + done.stderr).splitlines()
        if 'error' in line
    ]


def schema(board):
    """A round trip through the models of Grafana 11.6: a field that the schema lacks is lost, and an enum has its values only."""
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    try:
        model = Dashboard.from_json(board)
        back = json.loads(JSONEncoder().encode(model))
    except Exception as error:  # noqa: BLE001
        return [f"is not read by Grafana's model: {type(error).__name__}: {error}"]
    return list(lost(board, back, '')) + list(enums(model, ''))


def lost(given, back, path):
    if isinstance(given, dict) and isinstance(back, dict):
        for key, value in given.items():
            if key in back:
                yield from lost(value, back[key], f'{path}.{key}')
            elif value is not None:
                yield f'{path}.{key} is not in the schema'
    elif isinstance(given, list) and isinstance(back, list):
        for i, (left, right) in enumerate(zip(given, back)):
            yield from lost(left, right, f'{path}[{i}]')
    elif given != back:
        yield f'{path}: {given!r} became {back!r}'


def enums(value, path):
    """The models keep an enum's text unchecked; the annotations of their attributes name the enum, or the literals."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from enums(item, f'{path}[{i}]')
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from enums(item, f'{path}.{key}')
    elif hasattr(value, '__dict__') and not isinstance(value, enum.Enum) and type(value).__module__.startswith('grafana_foundation_sdk'):
        module = importlib.import_module(type(value).__module__)
        hints = typing.get_type_hints(type(value), vars(module))
        for name, item in vars(value).items():
            allowed = values_of(hints.get(name))
            if allowed and isinstance(item, (str, int)) and not isinstance(item, enum.Enum) and item not in allowed:
                yield f'{path}.{name}: {item!r} is none of {sorted(map(str, allowed))}'
            yield from enums(item, f'{path}.{name}')


def values_of(hint):
    """Values that an enum or literals of an annotation allow; empty where any other type is allowed beside them."""
    if hint is None:
        return set()
    if typing.get_origin(hint) is typing.Union:
        parts = [values_of(part) for part in typing.get_args(hint) if part is not type(None)]
        return set().union(*parts) if all(parts) else set()
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    return {member.value for member in hint} if isinstance(hint, type) and issubclass(hint, enum.Enum) else set()


def static(board):
    return layout(board) + syntax(board) + schema(board)


def shown(boards):
    """Families that panels and annotations name."""
    queries = [target['expr'] for board in boards for panel in board['panels'] for target in panel.get('targets', [])]
    queries += [annotation['expr'] for board in boards for annotation in board['annotations']['list']]
    return {re.sub(r'_(bucket|sum|count)$', '', family) for query in queries for family in FAMILY.findall(query)}


def live(prometheus, board, span, rate_interval):
    """(answers with a finite number, answers without) as {(panel, query)}; raises where a query or a variable has no answer."""
    values = board_answers.variables(prometheus, board)
    for name, found in values.items():
        assert found, f'{board["title"]}: variable {name} has no value'
    end, full, empty = time.time(), set(), set()
    for panel, texts in board_answers.panels(board, values):
        for target in panel.get('targets', []):
            series = board_answers.ask(prometheus, target, texts, end, span, 1, rate_interval)
            finite = any(math.isfinite(value) for _, points in series for _, value in points)
            (full if finite else empty).add((board['title'].split('/ ')[1], panel['title'], target['expr']))
    return full, empty


def all_boards():
    return {path.stem: json.loads(path.read_text()) for path in sorted((watched.GRAFANA / 'boards').glob('*.json'))}


def need_schema():
    if importlib.util.find_spec('grafana_foundation_sdk') is None:
        raise ops.Skip('no grafana_foundation_sdk: tests/ops/requirements.txt')
