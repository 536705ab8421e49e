"""What took longest in a build folder: the slowest compile units and tests of its last run.

Usage: slowest.py BUILD_FOLDER [--count 20]. Reads ninja's log, and tests.xml, where tests/run.sh has ctest write its results.
"""
import argparse
import pathlib
import xml.etree.ElementTree as ElementTree


def compile_units(folder):
    """(seconds, output) of each edge of the newest build that ninja has logged: version 5 or 6 of its format, one line an edge,
    start and end in milliseconds since that build began."""
    lines = (folder / '.ninja_log').read_text(encoding='utf-8').splitlines()
    if not lines or not lines[0].startswith('# ninja log v'):
        raise SystemExit(f'slowest: {folder}/.ninja_log does not begin with "# ninja log v"')
    seconds = {}
    for line in lines[1:]:
        start, end, _, output, _ = line.split('\t')
        seconds[output] = (int(end) - int(start)) / 1000  # the last entry of an output is the newest
    return sorted(((value, output) for output, value in seconds.items()), reverse=True)


def tests(folder):
    """(seconds, name) of each test that ran; empty where none did."""
    path = folder / 'tests.xml'
    if not path.exists():
        return []
    cases = ElementTree.parse(path).getroot().iter('testcase')
    return sorted(((float(case.get('time', 0)), case.get('name')) for case in cases), reverse=True)


def show(title, rows, count):
    print(f'{title}: {sum(row[0] for row in rows):.0f} s in all, {len(rows)} of them; the slowest:')
    for seconds, name in rows[:count]:
        print(f'  {seconds:7.1f} s  {name}')


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('--count', type=int, default=20)
    arguments = parser.parse_args()
    show(f'{arguments.folder.name}: build steps', compile_units(arguments.folder), arguments.count)
    show(f'{arguments.folder.name}: tests', tests(arguments.folder), arguments.count)


if __name__ == '__main__':
    main()
