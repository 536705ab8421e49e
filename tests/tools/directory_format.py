#!/usr/bin/env python3
"""Fails if what a data directory's files are made of has changed and the format's number has not been looked at.

Usage: directory_format.py ROOT                       compares with directory_format.txt beside this script
       directory_format.py ROOT --write [--harmless]  writes directory_format.txt. --harmless: the number stays
       directory_format.py ROOT --self-test           plants changes, each of which must be found

Each line has a part's name and a digest of its text without comments and white space: the messages of log.proto and of
the mark, all messages and enums that these use, the records' types, the structures on disk, the catalog's keys.
"""
import hashlib
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
KNOWN = HERE / 'directory_format.txt'
NUMBER = 'storage/catalog/directory_format.h'
PROTOS = ('types', 'state_service', 'log', 'registry')
# Written to disk as they are. log.proto says which messages of the other files are records.
ROOTS = ('PinnedVersion', 'LogSnapshot', 'Epoch', 'OpenRequest', 'PushRequest', 'PreparedRecord', 'Decision', 'DirectoryMark')
# What of C++ sources lies on the disk: all matches of a file.
SOURCES = {
    'services/job_state/job_entry.h': r'constexpr char kCatalog\w+\[\] = "[^"]*";',
    'services/journal/log_records.h': r'enum class RecordType[^}]*\};',
    'services/journal/data_files.h': r'constexpr char k\w+\[\] = "[^"]*";',
    'services/daemon/marked_directory.h': r'constexpr char kMarkFile\[\] = "[^"]*";',
    'storage/log/log_format.h': r'constexpr uint32_t kLogFormat = \d+;|struct (?:FileHead|LogMark|SegmentHead|BatchHead|RecordHead) \{.*?\n\};',
    'storage/store/extent_label.cc': r'constexpr uint32_t kFormat = \d+;|struct Label \{.*?\n\};',
    'storage/store/extent_label.h': r'struct DurableChunk \{.*?\n\};',
}


def without_comments(text):
    return re.sub(r'//[^\n]*', '', text)


def blocks(text):
    """{name: text} of the messages and enums at the outermost level"""
    return {match[2]: match[0] for match in re.finditer(r'^(message|enum) (\w+) (?:\{\s*\}|\{\s*\n.*?\n\})$', text, re.S | re.M)}


def digest(text):
    return hashlib.sha256(re.sub(r'\s+', ' ', text).strip().encode()).hexdigest()[:12]


def parts(read):
    """{name: digest}. `read`: the text of a path below the root"""
    declared = {}
    for name in PROTOS:
        declared.update(blocks(without_comments(read(f'proto/ballast/v1/{name}.proto'))))
    found, wanted = {}, list(ROOTS)
    while wanted:
        name = wanted.pop()
        if f'proto {name}' in found:
            continue
        found[f'proto {name}'] = digest(declared[name])
        wanted += [word for word in set(re.findall(r'\w+', declared[name])) if word in declared and word != name]
    for path, pattern in SOURCES.items():
        matches = re.findall(pattern, without_comments(read(path)), re.S)
        assert matches, f'{path} has nothing like {pattern}: tell tests/tools/directory_format.py where it went'
        found[path] = digest('\n'.join(matches))
    return found


def number(read):
    return ' '.join(re.search(r'kDirectoryFormat\{\.version = (\d+), \.least_reader = (\d+)\};', read(NUMBER)).groups())


def show(read):
    return [f'format {number(read)}'] + [f'{name} {value}' for name, value in sorted(parts(read).items())]


def changed(now, known):
    return sorted({line.rsplit(' ', 1)[0] for line in set(now) ^ set(known) if not line.startswith('format ')})


def complaint(now, known):
    """What is wrong, with what to do; empty: nothing"""
    what = changed(now, known)
    if not what and now[0] == known[0]:
        return ''
    if what and now[0] == known[0]:
        return (f'What a data directory keeps has changed: {", ".join(what)}; and the format is still {now[0][7:]}.\n'
                f'Would a program of before free, misread or call damaged what this one writes? Then raise both numbers of '
                f'kDirectoryFormat in {NUMBER}, say in a line there what is new, and run\n  {sys.argv[0]} . --write\n'
                f'If not (a field that never gets to the disk), run\n  {sys.argv[0]} . --write --harmless\n'
                'and say in the commit why older programs do no harm.')
    return f'{NUMBER} says {now[0]}, {KNOWN.name} {known[0]}; changed: {", ".join(what) or "nothing"}. Run\n  {sys.argv[0]} . --write'


def self_test(read):
    known = show(read)
    planted = {
        'a new field of a record': ('proto/ballast/v1/log.proto', 'uint64 age = 2;', 'uint64 age = 2;\n  bool late = 3;', 'ChangedRun'),
        'a field of a nested message': ('proto/ballast/v1/types.proto', 'fixed64 disk = 3;', 'fixed64 disk = 3;\n  bool far = 99;', 'Member'),
        'a value of an enum': ('proto/ballast/v1/types.proto', 'ASSIST_STATE = 2;', 'ASSIST_STATE = 2;\n  ASSIST_ALL = 3;', 'Assist'),
        'a key of the catalog': ('services/job_state/job_entry.h', '[] = "had_state";', '[] = "state";', 'job_entry.h'),
        'a type of record': ('services/journal/log_records.h', 'kSnapshot = 6', 'kSnapshot = 6, kMore = 7', 'log_records.h'),
        'a field of a label': ('storage/store/extent_label.cc', 'char job[128] = {};', 'char job[120] = {};', 'extent_label.cc'),
    }
    for what, (path, old, new, name) in planted.items():
        assert old in read(path), f'{path} has no {old}'
        text = complaint(show(lambda asked: read(asked).replace(old, new) if asked == path else read(asked)), known)
        assert name in text and 'raise both numbers' in text, f'{what} was not found: {text}'
    commented = show(lambda asked: read(asked).replace('uint64 age = 2;', 'uint64  age = 2;  // in steps'))
    assert complaint(commented, known) == '', 'a comment is no change'
    raised = show(lambda asked: re.sub(r'version = \d+', 'version = 99', read(asked)) if asked == NUMBER else read(asked))
    assert '--write' in complaint(raised, known)


def main():
    root, options = pathlib.Path(sys.argv[1]), set(sys.argv[2:])

    def read(path):
        return (root / path).read_text()
    if options == {'--self-test'}:
        return self_test(read)
    now, known = show(read), KNOWN.read_text().splitlines() if KNOWN.exists() else ['format 0 0']
    if '--write' not in options:
        return complaint(now, known) or None
    if changed(now, known) and now[0] == known[0] and '--harmless' not in options:
        return complaint(now, known)
    KNOWN.write_text('\n'.join(now) + '\n')
    return None


sys.exit(main())
