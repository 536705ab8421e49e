"""Asks a Prometheus the queries of a board, with its variables put in. No dependencies."""

import copy
import json
import re
import urllib.error
import urllib.parse
import urllib.request


class Prometheus:
    """The HTTP API at `url`."""

    def __init__(self, url):
        self.url = url

    def get(self, path, **parameters):
        """`data` of the answer. Raises ValueError with Prometheus' words where it refuses."""
        address = f'{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}'
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.load(answer)['data']
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error).get('error', str(error))) from None

    def label_values(self, label, match):
        return self.get(f'label/{label}/values', **{'match[]': match})


def one_of(values):
    """Grafana's form of several chosen values in a regular expression."""
    # Two levels: of the expression, and of the string in the query.
    return '(' + '|'.join(re.escape(value).replace('\\', '\\\\') for value in values) + ')'


def substitute(query, variables, rate_interval, span):
    """`variables`: {name: text}; rate_interval: such as '15s'; span: of the time range, in seconds."""
    builtin = {'__rate_interval': rate_interval, '__range': f'{span}s'}
    return re.sub(r'\$(\w+)', lambda found: {**variables, **builtin}[found[1]], query)


def variables(prometheus, board):
    """{name: all values that the variable can take}, in order, each with those before put in."""
    found = {}
    for variable in board['templating']['list']:
        if variable['type'] != 'query':
            continue
        query = substitute(variable['query']['query'], {name: one_of(values) for name, values in found.items()}, '', 0)
        selector, label = re.fullmatch(r'label_values\((.*), (\w+)\)', query).groups()
        found[variable['name']] = prometheus.label_values(label, selector)
    return found


def panels(board, values):
    """[(panel, {variable: text})] as Grafana lays them out: a repeated row, with its panels, comes once for each value."""
    everything = {name: one_of(several) for name, several in values.items()}
    sections = []
    for panel in board['panels']:
        if panel['type'] == 'row' or not sections:
            sections.append([])
        sections[-1].append(panel)
    laid, shift = [], 0
    for section in sections:
        repeat = section[0].get('repeat')
        height = max(panel['gridPos']['y'] + panel['gridPos']['h'] for panel in section) - section[0]['gridPos']['y']
        chosen = [{**everything, repeat: re.escape(value)} for value in values[repeat]] if repeat else [everything]
        for i, texts in enumerate(chosen):
            for panel in section:
                panel = copy.deepcopy(panel)
                panel['gridPos']['y'] += shift + i * height
                panel['title'] = substitute(panel['title'], texts, '', 0)
                laid.append((panel, texts))
        shift += (len(chosen) - 1) * height
    return laid


def ask(prometheus, target, texts, end, span, step, rate_interval):
    """Series of a target: [(labels, [(time, value)])]; an instant target has a single time."""
    query = substitute(target['expr'], texts, rate_interval, span)
    if target.get('instant'):
        result = prometheus.get('query', query=query, time=end)['result']
        return [(series['metric'], [(float(series['value'][0]), float(series['value'][1]))]) for series in result]
    result = prometheus.get('query_range', query=query, start=end - span, end=end, step=step)['result']
    return [(series['metric'], [(float(time), float(value)) for time, value in series['values']]) for series in result]
