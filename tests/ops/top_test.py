"""`ballastctl top` in a real terminal (tmux), and without one."""
import json
import os
import pathlib
import re
import signal
import subprocess

import ops
import page_test

KEYS = 'q quit'


class Tmux:
    """A terminal of a given size with a shell, in a tmux of its own."""

    def __init__(self, columns, rows, **environment):
        ops.need('tmux')
        self.columns, self.rows = columns, rows
        self.socket = f'tmux-{columns}'
        variables = [word for name, value in {'LC_ALL': 'C.UTF-8', **environment}.items() for word in ('-e', f'{name}={value}')]
        pathlib.Path('rc').write_text('PS1="ready$ "\n')
        self('-f', '/dev/null', 'new-session', '-d', '-x', columns, '-y', rows, *variables, 'bash --noprofile --rcfile rc')
        self.shows('ready$')
        self.modes = self.stty()

    def __call__(self, *words):
        return ops.run('tmux', '-S', self.socket, *words)

    def keys(self, *keys):
        self('send-keys', *keys)

    def screen(self, colours=False):
        return self('capture-pane', '-p', *(['-e'] if colours else []))

    def shows(self, text, seconds=60):
        pattern = re.compile(re.escape(text)) if isinstance(text, str) else text

        def found():
            screen = self.screen()
            return pattern.search(screen) and screen
        try:
            return ops.wait_for(found, f'the screen shows {pattern.pattern!r}', seconds)
        except AssertionError as error:
            raise AssertionError(f'{error}; it shows\n{self.screen()}') from None

    def stty(self):
        tty = self('display-message', '-p', '#{pane_tty}').strip()
        return ops.run('stty', '-a', '-F', tty)

    def restored(self, before):
        """The shell is back, on the screen as it was, with cursor, echo and lines."""
        self.shows(re.compile(r'ready\$ *\n*$'))
        state = self('display-message', '-p', '#{alternate_on} #{cursor_flag}').split()
        assert state == ['0', '1'], f'alternate screen and cursor: {state}'
        assert self.stty() == self.modes, 'the terminal has other modes than before'
        assert before in self.screen(), 'what was on the screen is gone'
        self.keys('echo back $((40 + 2))', 'Enter')
        self.shows('back 42')

    def pid(self):
        """Of top, the only child of the shell."""
        shell = self('display-message', '-p', '#{pane_pid}').strip()
        return int(ops.wait_for(lambda: pathlib.Path(f'/proc/{shell}/task/{shell}/children').read_text().split(), 'top runs')[0])


def command(*servers):
    return f"{ops.BIN / 'ballastctl'} top --servers {','.join(server.address for server in servers)}"


def test_screens():
    """At 80x24 and 200x50: one frame without a line too long, with verdict, tiers, jobs and keys; q leaves the terminal as it was."""
    one, two = page_test.Server('one', 'one', 7070), page_test.Server('two', 'two', 7071)
    page_test.trained(one, two)
    for columns, rows in ((80, 24), (200, 50)):
        terminal = Tmux(columns, rows)
        terminal.keys('echo before', 'Enter')
        terminal.keys(command(one, two), 'Enter')
        screen = terminal.shows(KEYS)
        print(screen)
        lines = screen.rstrip('\n').split('\n')
        assert len(lines) == rows and lines[-1].startswith(KEYS), len(lines)
        assert re.match(r'Ballast  HEALTHY  2 server\(s\), 1 job\(s\) +\d\d:\d\d:\d\d$', lines[0]), lines[0]
        text = ops.run(ops.BIN / 'ballastctl', 'status', '--json', '--servers', f'{one.address},{two.address}')
        status = json.loads(text)
        for tier in ('dram', 'nvme'):
            line = next(line for line in lines if line.startswith(tier))
            used = sum(int(t['used_bytes']) for s in status['servers'] for t in s['status']['tiers'] if t['tier'] == tier)
            assert f'{used / 2**20:.1f} MiB of ' in line, (used, line)
            bar = re.search(r'\[(.*)\]', line).group(1)
            filled, share = len(bar.rstrip()), used / (2 * {'dram': 64, 'nvme': 512}[tier] * 2**20)
            assert len(bar) > columns / 3 and abs(filled - share * len(bar)) <= 1 and bar[0] in 'sl', line
        row = next(line for line in lines if line.startswith('page '))
        assert row.split()[1] == str(status['jobs'][0]['committed_max']), row
        bound = status['jobs'][0]['bound_by']
        shown = re.search(rf"  {bound['stage' if columns == 80 else 'words']} (\d+) % ", row)
        assert shown and abs(int(shown[1]) - 100 * bound['share']) <= 0.51, (row, bound)  # the JSON has four digits
        terminal.keys('q')
        terminal.restored('echo before')


def test_keys():
    """s sorts, 1 shows each server, a new size is taken."""
    one, two = page_test.Server('one', 'one', 7070), page_test.Server('two', 'two', 7071)
    for job in ('alpha', 'beta'):
        page_test.trained(one, two, job=job)
    terminal = Tmux(100, 30)
    terminal.keys(command(one, two), 'Enter')
    terminal.shows('sort by name')
    assert two.address not in terminal.screen()
    terminal.keys('1')
    terminal.shows(f'{two.address}  two')
    ops.wait_for(lambda: terminal.screen().count('dram ') == 2, 'a bar of each server')
    terminal.keys('1')
    terminal.shows('each server')
    for order in ('rate', 'version', 'parameters', 'name'):
        terminal.keys('s')
        terminal.shows(f'sort by {order}')
    terminal('resize-window', '-x', '70', '-y', '12')
    ops.wait_for(lambda: len(lines := terminal.screen().rstrip('\n').split('\n')) == 12 and lines[-1].startswith(KEYS),
                 'a frame of the new size')
    terminal.keys('q')


def test_moves():
    """A training job's version moves, with its rate; a stopped server shows as down, and keys work meanwhile."""
    one, two = page_test.Server('one', 'one', 7070), page_test.Server('two', 'two', 7071)
    trainer = page_test.endless(f'{one.address},{two.address}', 'page')
    ops.wait_for(lambda: ops.committed(f'{one.address},{two.address}') >= 3, 'some steps')
    terminal = Tmux(120, 30)
    terminal.keys(command(one, two), 'Enter')
    row = terminal.shows(re.compile(r'(?m)^page +\d+(\.\.\d+)? +[0-9.]+ ')).split('\npage ')[1]
    terminal.shows(re.compile(r'[\u2801-\u28ff]'))  # the sparkline
    print(row.split('\n')[0])
    ops.kill(two.process)
    terminal.shows('DEGRADED')
    terminal.shows(f'server {two.address} does not answer')
    two.start()
    terminal.shows('HEALTHY')
    terminal.keys('q')
    ops.kill(trainer)


def test_restored_after_signals():
    """SIGTERM, SIGINT, SIGHUP and a crash leave the terminal as it was; a stop and its end bring the frame back."""
    server = page_test.Server()
    terminal = Tmux(80, 24)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSEGV, signal.SIGABRT):
        terminal.keys('clear; echo before', 'Enter')
        terminal.keys(command(server), 'Enter')
        terminal.shows(KEYS)
        assert terminal.stty() != terminal.modes
        os.kill(terminal.pid(), number)
        terminal.restored('before')
    terminal.keys(command(server), 'Enter')
    terminal.shows(KEYS)
    terminal.keys('C-z')
    terminal.restored('before')
    terminal.keys('fg', 'Enter')
    terminal.shows(KEYS)
    terminal.keys('q')
    terminal.restored('before')


def test_colours():
    """NO_COLOR and TERM=dumb are honoured; the text is the same."""
    server = page_test.Server()
    page_test.trained(server)
    frames = {}
    for name, environment in {'with': {}, 'without': {'NO_COLOR': '1'}}.items():
        terminal = Tmux(81 + len(frames), 24, **environment)
        terminal.keys(command(server), 'Enter')
        terminal.shows(KEYS)
        frames[name] = terminal.screen(colours=True)
        terminal.keys('q')
    assert '\x1b[' in frames['with'] and '\x1b[' not in frames['without'], frames
    dumb = Tmux(90, 24)
    dumb.keys(f'TERM=dumb {command(server)}', 'Enter')
    dumb.shows('HEALTHY')
    assert KEYS not in dumb.screen() and dumb('display-message', '-p', '#{alternate_on}').strip() == '0'


def lines_of(words, begin, count):
    """What a command that goes on prints, until so many lines begin like that; then it is ended."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        lines = []
        while sum(line.startswith(begin) for line in lines) < count:
            lines.append(process.stdout.readline())
            assert lines[-1], f'it ended with {process.wait()}: {lines}'
        process.kill()
    return lines


def test_without_a_terminal():
    """--once is a frame of plain text, --json a line of JSON, with status' exit codes; without a terminal frames follow each other."""
    server = page_test.Server()
    page_test.trained(server)
    words = command(server).split()
    once = ops.run(*words, '--once')
    assert once.startswith('Ballast  HEALTHY') and '\x1b' not in once and KEYS not in once, once
    assert 'page ' in once and 'dram [st' in once
    parsed = json.loads(ops.run(*words, '--once', '--json'))
    assert parsed['verdict'] == 'healthy' and parsed['jobs'][0]['name'] == 'page'
    frames = lines_of([*words, '--interval', '0.5'], 'Ballast  HEALTHY', 3)
    assert not any('\x1b' in line for line in frames), frames
    lines = lines_of([*words, '--interval', '0.5', '--json'], '{', 3)
    assert len(lines) == 3 and all(json.loads(line)['verdict'] == 'healthy' for line in lines)
    ops.kill(server.process)
    degraded = subprocess.run([*words, '--once'], stdout=subprocess.PIPE, text=True, check=False)
    assert degraded.returncode == 1 and 'does not answer' in degraded.stdout, degraded
