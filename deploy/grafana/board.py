"""A board of panels as Grafana's JSON. No dependencies: what a panel needs is stated here once."""

import re

DATA_SOURCE = {'type': 'prometheus', 'uid': '${datasource}'}
# Matchers of every query: servers that the reader chose; families of a job also choose the job.
SERVERS = 'job=~"$job", instance=~"$instance"'
JOBS = SERVERS + ', training_job=~"$training_job"'
RATE = '[$__rate_interval]'
COLUMNS = 24
TAG = 'ballast'
SCHEMA_VERSION = 39
# Colours of series that several boards show, so that a stage or a tier looks alike everywhere.
COLORS = {
    'tier': {'hbm': 'purple', 'dram': 'blue', 'nvme': 'orange'},
    'stage': {
        'push': 'blue',
        'seal_wait': 'purple',
        'log_sync': 'yellow',
        'state_read': 'orange',
        'kernel': 'green',
        'state_write': 'red',
        'flush': 'semi-dark-orange',
        'pin': 'super-light-purple',
        'move': 'light-blue',
        'idle': 'text',
    },
    'part': {
        'state': 'green',
        'working': 'blue',
        'slices': 'yellow',
        'buffers': 'purple',
        'staging': 'light-blue',
        'log': 'orange',
        'pins': 'super-light-purple',
        'spare': 'text',
        'other': 'red',
    },
}


def rate(metric, matchers=SERVERS):
    return f'rate({metric}{{{matchers}}}{RATE})'


def per_step(numerator):
    """`numerator` per second, by training_job and more labels, over the job's steps per second."""
    return f'{numerator} / on (training_job) group_left () (max by (training_job) ({rate("ballast_step_seconds_count", JOBS)}) > 0)'


def per_server(family, names=None):
    """A family per second, by server and job; of the stages `names`."""
    matchers = JOBS if names is None else f'{JOBS}, stage=~"{names}"'
    return f'sum by (instance, training_job) ({rate(family, matchers)})'


def stages():
    """Seconds of a step by training_job and stage, mean over servers, without the stages that took none."""
    return per_step(f'avg by (training_job, stage) ({rate("ballast_step_stage_seconds_total", JOBS)})') + ' > 0'


def quantile(q, metric, by='', matchers=SERVERS):
    return f'histogram_quantile({q}, sum by ({by + ", " if by else ""}le) ({rate(metric + "_bucket", matchers)}))'


def mean(metric, by='', matchers=SERVERS):
    group = f'by ({by}) ' if by else ''
    return f'sum {group}({rate(metric + "_sum", matchers)}) / (sum {group}({rate(metric + "_count", matchers)}) > 0)'


def thresholds(*steps):
    """Pairs (value or None, colour), ascending."""
    return {'mode': 'absolute', 'steps': [{'color': color, 'value': value} for value, color in steps]}


GREEN = thresholds((None, 'green'))
RED_FROM_1 = thresholds((None, 'green'), (1, 'red'))


def _variable(name, label, query, multi=True):
    variable = {
        'name': name,
        'label': label,
        'type': 'query',
        'datasource': DATA_SOURCE,
        'query': {'query': query, 'refId': name},
        'refresh': 2,
        'multi': multi,
        'includeAll': True,
        'allValue': '.*',
        'sort': 1,
        'hide': 0,
        'current': {'text': ['All'], 'value': ['$__all']},
    }
    return variable


VARIABLES = [
    {'name': 'datasource', 'label': 'Data source', 'type': 'datasource', 'query': 'prometheus', 'refresh': 1, 'hide': 0, 'current': {}},
    _variable('job', 'Scrape job', 'label_values(ballast_server_state, job)'),
    _variable('instance', 'Server', 'label_values(up{job=~"$job"}, instance)'),
    # No allValue: the rows that repeat for each job need the jobs' names.
    {
        key: value
        for key, value in _variable(
            'training_job', 'Training job', 'label_values(ballast_job_committed_version{job=~"$job", instance=~"$instance"}, training_job)'
        ).items()
        if key != 'allValue'
    },
]


class Board:
    """Panels from left to right, row under row. A target is (query, legend)."""

    def __init__(self, name, title, description):
        self.name, self.title, self.description = name, title, description
        self.panels = []
        self.x = self.y = self.height = 0

    def row(self, title, repeat=None):
        self._break()
        row = {'type': 'row', 'title': title, 'collapsed': False, 'gridPos': {'x': 0, 'y': self.y, 'w': COLUMNS, 'h': 1}, 'panels': []}
        if repeat:
            row['repeat'] = repeat
        self._append(row)
        self.y += 1

    def stat(self, title, description, unit, targets, w=4, h=4, steps=GREEN, name=False, **defaults):
        """The last value, large. `name`: shows the series' name in place of its value."""
        options = {
            'reduceOptions': {'calcs': ['lastNotNull'], 'fields': '', 'values': False},
            'colorMode': 'value',
            'graphMode': 'none' if name else 'area',
            'textMode': 'name' if name else 'auto',
            'justifyMode': 'auto',
            'orientation': 'auto',
        }
        defaults = {'unit': unit, 'color': {'mode': 'thresholds'}, 'thresholds': steps, 'noValue': '-', **defaults}
        self._panel('stat', title, description, targets, w, h, defaults, options, instant=name)

    def series(self, title, description, unit, targets, w=8, h=8, stack=False, line=None, steps=None, **defaults):
        """Lines over time, or stacked areas. `line`: the legend of a target drawn above the stack as a dashed bound."""
        custom = {
            'drawStyle': 'line',
            'lineWidth': 1,
            'fillOpacity': 40 if stack else 10,
            'showPoints': 'never',
            'spanNulls': False,
            'stacking': {'mode': 'normal' if stack else 'none', 'group': 'A'},
        }
        if steps:
            custom['thresholdsStyle'] = {'mode': 'line'}
        options = {
            'legend': {'displayMode': 'table', 'placement': 'bottom', 'showLegend': True, 'calcs': ['mean', 'max', 'lastNotNull']},
            'tooltip': {'mode': 'multi', 'sort': 'desc'},
        }
        defaults = {
            'unit': unit,
            'color': {'mode': 'palette-classic'},
            'thresholds': steps or GREEN,
            'custom': custom,
            'min': 0,
            **defaults,
        }
        overrides = [
            self._override(f'/(^| ){value}$/', {'color': {'mode': 'fixed', 'fixedColor': color}}, 'byRegexp')
            for label in COLORS
            if any(legend.endswith('{{' + label + '}}') for _, legend in targets)
            for value, color in COLORS[label].items()
        ]
        if line:
            overrides.append(
                self._override(
                    line,
                    {
                        'color': {'mode': 'fixed', 'fixedColor': 'text'},
                        'custom.stacking': {'mode': 'none'},
                        'custom.fillOpacity': 0,
                        'custom.lineStyle': {'fill': 'dash', 'dash': [8, 8]},
                    },
                )
            )
        self._panel('timeseries', title, description, targets, w, h, defaults, options, overrides=overrides)

    def heatmap(self, title, description, unit, query, w=8, h=8):
        options = {
            'calculate': False,
            'color': {
                'mode': 'scheme',
                'scheme': 'Oranges',
                'fill': 'dark-orange',
                'scale': 'exponential',
                'exponent': 0.5,
                'steps': 64,
                'reverse': False,
            },
            'yAxis': {'unit': unit, 'axisPlacement': 'left'},
            'rowsFrame': {'layout': 'auto'},
            'cellGap': 1,
            'filterValues': {'le': 1e-9},
            'legend': {'show': True},
            'showValue': 'never',
            'tooltip': {'mode': 'single', 'yHistogram': False},
            'exemplars': {'color': 'rgba(255,0,255,0.7)'},
        }
        self._panel('heatmap', title, description, [(query, '{{le}}')], w, h, {'unit': unit}, options, format='heatmap')

    def table(self, title, description, columns, targets, w=24, h=6, sort=None, mappings=None):
        """Rows of series that agree in their labels.

        columns: {label, or 'Value #A' for the values of target A: heading or (heading, unit)}, in order.
        mappings: {'Value #A': Grafana's value mappings}.
        """
        options = {
            'showHeader': True,
            'cellHeight': 'sm',
            'frameIndex': 0,
            'footer': {'show': False, 'reducer': ['sum'], 'countRows': False},
        }
        if sort:
            options['sortBy'] = [{'displayName': sort, 'desc': False}]
        headings = {name: heading if isinstance(heading, str) else heading[0] for name, heading in columns.items()}
        overrides = [
            self._override(heading[0], {'unit': heading[1], **({'mappings': mappings[name]} if name in (mappings or {}) else {})})
            for name, heading in columns.items()
            if not isinstance(heading, str)
        ]
        transformations = [
            {'id': 'merge', 'options': {}},
            {
                'id': 'organize',
                'options': {
                    'excludeByName': {'Time': True},
                    'indexByName': {name: i for i, name in enumerate(columns)},
                    'renameByName': headings,
                },
            },
        ]
        self._panel(
            'table',
            title,
            description,
            [(query, '') for query in targets],
            w,
            h,
            {
                'unit': 'none',
                'color': {'mode': 'thresholds'},
                'thresholds': GREEN,
                'custom': {'align': 'auto', 'cellOptions': {'type': 'auto'}},
            },
            options,
            overrides=overrides,
            format='table',
            instant=True,
            transformations=transformations,
        )

    def json(self):
        return {
            'uid': f'ballast-{self.name}',
            'id': None,
            'title': f'Ballast / {self.title}',
            'description': self.description,
            'tags': [TAG],
            'schemaVersion': SCHEMA_VERSION,
            'version': 1,
            'editable': False,
            'graphTooltip': 1,
            'refresh': '10s',
            'time': {'from': 'now-1h', 'to': 'now'},
            'timezone': 'browser',
            'templating': {'list': VARIABLES},
            'annotations': {
                'list': [
                    {
                        'name': 'Server starts',
                        'datasource': DATA_SOURCE,
                        'enable': True,
                        'iconColor': 'orange',
                        'expr': f'changes(process_start_time_seconds{{{SERVERS}}}{RATE}) > 0',
                    }
                ]
            },
            'links': [
                {
                    'title': 'Ballast',
                    'type': 'dashboards',
                    'tags': [TAG],
                    'asDropdown': True,
                    'includeVars': True,
                    'keepTime': True,
                    'icon': 'external link',
                    'targetBlank': False,
                    'tooltip': '',
                    'url': '',
                }
            ],
            'panels': self.panels,
        }

    @staticmethod
    def _override(name, properties, matcher='byName'):
        return {
            'matcher': {'id': matcher, 'options': name},
            'properties': [{'id': key, 'value': value} for key, value in properties.items()],
        }

    def _panel(
        self, kind, title, description, targets, w, h, defaults, options, overrides=(), format=None, instant=False, transformations=()
    ):
        if self.x + w > COLUMNS:
            self._break()
        queries = []
        for i, (query, legend) in enumerate(targets):
            query = {'refId': chr(ord('A') + i), 'datasource': DATA_SOURCE, 'expr': query, 'legendFormat': legend}
            if format:
                query['format'] = format
            if instant:
                query.update(instant=True, range=False)
            queries.append(query)
        metrics = sorted({name for query, _ in targets for name in re.findall(r'\b(?:ballast|process)_\w+', query)})
        if metrics:
            description += '\n\nMetrics: ' + ', '.join(f'`{name}`' for name in metrics)
        panel = {
            'type': kind,
            'title': title,
            'description': description,
            'datasource': DATA_SOURCE,
            'gridPos': {'x': self.x, 'y': self.y, 'w': w, 'h': h},
            'fieldConfig': {'defaults': defaults, 'overrides': list(overrides)},
            'options': options,
            'targets': queries,
        }
        if transformations:
            panel['transformations'] = list(transformations)
        self._append(panel)
        self.x, self.height = self.x + w, max(self.height, h)

    def _append(self, panel):
        panel['id'] = len(self.panels) + 1
        self.panels.append(panel)

    def _break(self):
        self.y, self.x, self.height = self.y + self.height, 0, 0
