#!/usr/bin/env python3
"""ballastctl towards people: completion in each shell, --version, manual pages, and options that services/tools/README.md names.

Usage: shell_test.py BIN ROOT     BIN: folder of the programs; ROOT: the tree
A shell that is not installed is skipped, and named.
"""
import os
import pathlib
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time

BIN, ROOT = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
CTL = BIN / 'ballastctl'
# Line to be completed -> words that must be offered, words that must not.
CASES = {
    'ballastctl do': (['doctor'], ['drop']),
    'ballastctl status --': (['--json', '--servers', '--timeout'], ['--job', '--rebuild']),
    'ballastctl unpin --v': (['--version'], ['--servers']),
    'ballastctl completion ': (['bash', 'zsh', 'fish'], ['status']),
    'ballastctl plan --profile SCRATCH/prof': (['profile-a.yaml', 'profile-b.yaml'], ['--params']),
    'ballastctl drop --job prof': ([], ['profile-a.yaml', '--servers']),
}


def output(*command, **options):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, f'{command} ended with {done.returncode}:\n{done.stdout}'
    return done.stdout


def bash(script, line, folder):
    words = line.split(' ')
    asked = '\n'.join([f'source {script}', f'COMP_WORDS=({" ".join(word or chr(39) * 2 for word in words)})',
                       f'COMP_CWORD={len(words) - 1}', '_ballastctl', 'printf "%s\\n" "${COMPREPLY[@]}"',
                       'complete -p ballastctl'])
    answer = output('bash', '--norc', '-ec', asked, cwd=folder)
    assert 'complete -F _ballastctl ballastctl' in answer, answer
    return answer.replace('complete -F _ballastctl ballastctl', '')


def fish(script, line, folder):
    return output('fish', '--no-config', '-c', f'source {script}; complete -C "{line}"', cwd=folder, env={**os.environ, 'HOME': folder})


def zsh(script, line, folder):
    """Types the line and TAB into an interactive zsh: its completion system runs nowhere else."""
    (pathlib.Path(folder) / '.zshrc').write_text(
        "PS1='> '; LISTMAX=0; unsetopt auto_menu\nautoload -U compinit; compinit -u -D\n"
        f'setopt list_rows_first no_list_ambiguous no_auto_list\nsource {script}\nbindkey "^I" list-choices\nprint READY\n')
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(ZDOTDIR=folder, TERM='dumb', COLUMNS='200', LINES='60', HOME=folder)
        os.execvp('zsh', ['zsh', '-d', '-i'])
    seen = ''

    def until(what, seconds=60):
        nonlocal seen
        end = time.monotonic() + seconds
        while what not in seen and time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 65536).decode(errors='replace')
        assert what in seen, f'zsh: no {what!r} in {seen!r}'
    try:
        until('READY')
        time.sleep(0.2)
        seen = ''
        os.write(terminal, line.encode() + b'\t')
        time.sleep(0.7)
        os.write(terminal, b'\x15print -r -- DO""NE\n')
        until('DONE')
        return seen.split('print -r')[0].replace(line, '', 1)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def test_completion():
    for shell, complete in (('bash', bash), ('zsh', zsh), ('fish', fish)):
        if shutil.which(shell) is None:
            print(f'SKIPPED: completion in {shell}, which is not installed')
            continue
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / 'script').write_text(output(CTL, 'completion', shell))
            for name in ('profile-a.yaml', 'profile-b.yaml'):
                (pathlib.Path(folder) / name).touch()
            for line, (offered, others) in CASES.items():
                answer = complete('./script', line.replace('SCRATCH', '.'), folder)  # the folder's own path may have a space
                for word in offered:
                    assert word in answer, f'{shell}: {line!r} does not offer {word}:\n{answer}'
                for word in others:
                    assert not re.search(rf'(^|\s){re.escape(word)}(\s|$)', answer), f'{shell}: {line!r} offers {word}:\n{answer}'
        print(f'completion in {shell}: {len(CASES)} lines')
    done = subprocess.run([str(CTL), 'completion', 'tcsh'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 2 and 'bash' in done.stdout, done.stdout


def programs():
    return [program for program in (BIN / name for name in ('ballastd', 'ballastctl', 'train_bytes_lm')) if program.exists()]


def test_version():
    wanted = re.search(r'project\(Ballast VERSION ([0-9.]+)', (ROOT / 'CMakeLists.txt').read_text()).group(1)
    for program in programs():
        assert output(program, '--version') == f'{program.name} {wanted}\n', output(program, '--version')
    python = re.search(r"__version__ = '([^']+)'", (ROOT / 'client/python/ballast/__init__.py').read_text()).group(1)
    assert python == wanted, f'the Python package says {python}, CMake {wanted}'


def long_options(text):
    return set(re.findall(r'--[a-z][a-z0-9-]*', text)) - {'--help', '--help-all'}


def commands():
    """{command: its long options} of ballastctl, from its own help."""
    found, name = {}, None
    for line in output(CTL, '--help-all').split('Subcommands:')[1].splitlines():
        if re.match(r'[a-z-]+$', line):
            name = line
            found[name] = set()
        elif match := re.match(r' {4}(--[a-z-]+)', line):
            found[name].add(match.group(1))
    return found


def test_readme():
    """Each command's entry in services/tools/README.md names its options: those that there are, and no other. Options before the entries
    are those of each command with --servers."""
    section = (ROOT / 'services/tools/README.md').read_text().split('## Commands\n')[1].split('\n## ')[0]
    entries = {}
    for entry in re.split(r'\n- ', '\n' + section.split('\n\n|')[0])[1:]:
        entries[re.match(r'`ballastctl ([a-z-]+)', entry).group(1)] = long_options(entry.split('\n\n')[0])
    there = commands()
    common = long_options(section.split('\n- ')[0])
    for command in entries:
        if '--servers' in there.get(command, ()):
            entries[command] |= common
    assert len(there) >= 9, there
    for command in sorted(there.keys() | entries.keys()):
        assert command in entries, f'services/tools/README.md has no entry of ballastctl {command}'
        assert command in there, f'services/tools/README.md has an entry of ballastctl {command}, which there is not'
        only_there, only_told = there[command] - entries[command], entries[command] - there[command]
        assert not only_there, f'services/tools/README.md: ballastctl {command} also takes {sorted(only_there)}'
        assert not only_told, f'services/tools/README.md: ballastctl {command} has no {sorted(only_told)}'


def test_manual():
    folder = BIN.parent / 'man'
    pages = sorted(folder.glob('*.[18]')) if folder.exists() else []
    if not pages:
        print('SKIPPED: manual pages, which need help2man')
        return
    page = (folder / 'ballastctl.1').read_text().replace('\\-', '-')
    for command, options in commands().items():
        assert command in page, f'ballastctl.1 lacks {command}'
        assert not options - long_options(page), f'ballastctl.1 lacks {options - long_options(page)}'
    print(f'manual: {", ".join(page.name for page in pages)}')


for test in (test_completion, test_version, test_readme, test_manual):
    test()
    print(f'{test.__name__} passed')
