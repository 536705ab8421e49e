"""A board of panels, by Grafana's builders of its JSON: what all panels share is stated here once."""

import re

from grafana_foundation_sdk.builders import (
    common,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import dashboard

DATA_SOURCE = dashboard.DataSourceRef('prometheus', '${datasource}')
# Matchers of every query: servers that the reader chose; families of a job also choose the job.
SERVERS = 'job=~"$job", instance=~"$instance"'
JOBS = SERVERS + ', training_job=~"$training_job"'
RATE = '[$__rate_interval]'
TAG = 'ballast'
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
    return build.ThresholdsConfig().mode('absolute').steps([dashboard.Threshold(value, color) for value, color in steps])


GREEN = thresholds((None, 'green'))
RED_FROM_1 = thresholds((None, 'green'), (1, 'red'))


def _variable(name, label, query):
    return (
        build.QueryVariable(name)
        .label(label)
        .datasource(DATA_SOURCE)
        .query({'query': query, 'refId': name})
        .refresh(2)
        .multi(True)
        .include_all(True)
        .sort(1)
        .current(dashboard.VariableOption(text=['All'], value=['$__all']))
    )


VARIABLES = [
    build.DatasourceVariable('datasource').label('Data source').type('prometheus'),
    _variable('job', 'Scrape job', 'label_values(ballast_server_state, job)').all_value('.*'),
    _variable('instance', 'Server', 'label_values(up{job=~"$job"}, instance)').all_value('.*'),
    # No all_value: the rows that repeat for each job need the jobs' names.
    _variable(
        'training_job', 'Training job', 'label_values(ballast_job_committed_version{job=~"$job", instance=~"$instance"}, training_job)'
    ),
]


def _properties(**values):
    """Of an override; a name's dots are written `__`."""
    return [dashboard.DynamicConfigValue(name.replace('__', '.'), value) for name, value in values.items()]


def _fixed(color):
    return {'mode': 'fixed', 'fixedColor': color}


class Board:
    """Panels from left to right, row under row. A target is (query, legend)."""

    def __init__(self, name, title, description):
        self.name = name
        self.board = (
            build.Dashboard(f'Ballast / {title}')
            .uid(f'ballast-{name}')
            .description(description)
            .tags([TAG])
            .version(1)
            .readonly()
            .tooltip(1)
            .refresh('10s')
            .time('now-1h', 'now')
            .timezone('browser')
            .variables(VARIABLES)
            .annotation(
                build.AnnotationQuery()
                .name('Server starts')
                .datasource(DATA_SOURCE)
                .enable(True)
                .icon_color('orange')
                .expr(f'changes(process_start_time_seconds{{{SERVERS}}}{RATE}) > 0')
            )
            .link(
                build.DashboardLink('Ballast')
                .type('dashboards')
                .icon('external link')
                .tags([TAG])
                .as_dropdown(True)
                .include_vars(True)
                .keep_time(True)
            )
        )
        self.panels = 0

    def row(self, title, repeat=None):
        row = build.Row(title).id(self._id())
        self.board.with_row(row.repeat(repeat) if repeat else row)

    def stat(self, title, description, unit, targets, w=4, h=4, steps=GREEN, name=False, **more):
        """The last value, large. `name`: shows the series' name in place of its value."""
        panel = (
            stat.Panel()
            .thresholds(steps)
            .color_scheme(build.FieldColor().mode('thresholds'))
            .no_value('-')
            .reduce_options(common.ReduceDataOptions().calcs(['lastNotNull']).values(False))
            .color_mode('value')
            .graph_mode('none' if name else 'area')
            .text_mode('name' if name else 'auto')
        )
        self._add(panel, title, description, unit, targets, w, h, instant=name, **more)

    def series(self, title, description, unit, targets, w=8, h=8, stack=False, line=None, steps=None, **more):
        """Lines over time, or stacked areas. `line`: the legend of a target drawn above the stack as a dashed bound."""
        panel = (
            timeseries.Panel()
            .thresholds(steps or GREEN)
            .color_scheme(build.FieldColor().mode('palette-classic'))
            .draw_style('line')
            .line_width(1)
            .fill_opacity(40 if stack else 10)
            .show_points('never')
            .span_nulls(False)
            .stacking(common.StackingConfig().mode('normal' if stack else 'none').group('A'))
            .legend(
                common.VizLegendOptions().display_mode('table').placement('bottom').show_legend(True).calcs(['mean', 'max', 'lastNotNull'])
            )
            .tooltip(common.VizTooltipOptions().mode('multi').sort('desc'))
        )
        if steps:
            panel.thresholds_style(common.GraphThresholdsStyleConfig().mode('line'))
        for label, colors in COLORS.items():
            if any(legend.endswith('{{' + label + '}}') for _, legend in targets):
                for value, color in colors.items():
                    panel.override_by_regexp(f'/(^| ){value}$/', _properties(color=_fixed(color)))
        if line:
            dashed = {'fill': 'dash', 'dash': [8, 8]}
            properties = _properties(
                color=_fixed('text'), custom__stacking={'mode': 'none'}, custom__fillOpacity=0, custom__lineStyle=dashed
            )
            panel.override_by_name(line, properties)
        self._add(panel, title, description, unit, targets, w, h, **{'min': 0, **more})

    def heatmap(self, title, description, unit, query, w=8, h=8):
        panel = (
            heatmap.Panel()
            .color(
                heatmap.HeatmapColorOptions()
                .mode('scheme')
                .scheme('Oranges')
                .fill('dark-orange')
                .scale('exponential')
                .exponent(0.5)
                .steps(64)
            )
            .y_axis(heatmap.YAxisConfig().unit(unit).axis_placement('left'))
            .rows_frame(heatmap.RowsHeatmapOptions().layout('auto'))
            .cell_gap(1)
            .filter_values(heatmap.FilterValueRange().le(1e-9))
            .show_value('never')
        )
        self._add(panel, title, description, unit, [(query, '{{le}}')], w, h, format='heatmap')

    def table(self, title, description, columns, targets, w=24, h=6, sort=None, mappings=None):
        """Rows of series that agree in their labels.

        columns: {label, or 'Value #A' for the values of target A: heading or (heading, unit)}, in order.
        mappings: {'Value #A': Grafana's value mappings}.
        """
        panel = table.Panel().thresholds(GREEN).color_scheme(build.FieldColor().mode('thresholds')).align('auto').cell_height('sm')
        if sort:
            panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(False)])
        for name, heading in columns.items():
            if not isinstance(heading, str):
                mapped = {'mappings': mappings[name]} if name in (mappings or {}) else {}
                panel.override_by_name(heading[0], _properties(unit=heading[1], **mapped))
        organized = {
            'excludeByName': {'Time': True},
            'indexByName': {name: i for i, name in enumerate(columns)},
            'renameByName': {name: heading if isinstance(heading, str) else heading[0] for name, heading in columns.items()},
        }
        for what, options in (('merge', {}), ('organize', organized)):
            panel.with_transformation(dashboard.DataTransformerConfig(what, options=options))
        self._add(panel, title, description, 'none', [(query, '') for query in targets], w, h, format='table', instant=True)

    def _add(self, panel, title, description, unit, targets, w, h, format=None, instant=False, **more):
        """`more`: what the panel's builder has by that name."""
        metrics = sorted({name for query, _ in targets for name in re.findall(r'\b(?:ballast|process)_\w+', query)})
        if metrics:
            description += '\n\nMetrics: ' + ', '.join(f'`{name}`' for name in metrics)
        panel.id(self._id()).title(title).description(description).datasource(DATA_SOURCE).unit(unit).span(w).height(h)
        for name, value in more.items():
            getattr(panel, name)(value)
        for i, (expression, legend) in enumerate(targets):
            query = prometheus.Dataquery().ref_id(chr(ord('A') + i)).datasource(DATA_SOURCE).expr(expression).legend_format(legend)
            if format:
                query.format(format)
            if instant:
                query.instant()
            panel.with_target(query)
        self.board.with_panel(panel)

    def _id(self):
        self.panels += 1
        return self.panels
