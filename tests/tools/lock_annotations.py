#!/usr/bin/env python3
"""Clang's check of ABSL_GUARDED_BY and its like (-Wthread-safety), over the sources of the libraries, without compiling them.

Usage: lock_annotations.py BUILD       BUILD: a build folder with compile_commands.json
       lock_annotations.py --self-test
The preset `clang` (tests/run.sh clang) compiles everything so, tests too; this check takes two minutes at most, so that it runs with the
tests. All sources of a folder are one unit of it, since reading the headers takes most of the time, and what ccache has seen without a
warning is not read again.
"""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

CLANG = next(filter(None, map(shutil.which, ('clang++', 'clang++-14'))), None)
CCACHE = list(filter(None, [shutil.which('ccache')]))
# Of paths within the build folder: the folders above may have any name.
FOLDERS = re.compile(r'(?:storage|services|client|kernels|proto/base|proto/model)/CMakeFiles/|(?:storage|services|client)/\w+/CMakeFiles/')
SKIPPED = re.compile(r'tests/|client/(?:python|examples)/')  # the preset's; nanobind's and BLAS' headers
GCC_ONLY = ('-Wno-restrict', '-Wno-subobject-linkage', '--param=ggc-')
CHECK = ['-fsyntax-only', '-Wthread-safety', '-Werror', '-O0']
PLANTED = '''#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
struct Counter {
  absl::Mutex mutex;
  int count ABSL_GUARDED_BY(mutex) = 0;
  int Get() { return count; }
};
'''


def in_a_library(entry):
    path = os.path.relpath(entry['file'], entry['directory'])
    return FOLDERS.match(path) and not SKIPPED.match(path)


def library_units(build):
    with open(os.path.join(build, 'compile_commands.json'), encoding='utf-8') as file:
        return [entry for entry in json.load(file) if in_a_library(entry)]


def command(entry):
    """Without the source."""
    words = [word for word in shlex.split(entry['command']) if not word.endswith('ccache') and not word.startswith(GCC_ONLY)]
    at = words.index('-o')
    words = words[1:at] + words[at + 2:]
    assert words[-2] == '-c', words
    return [*CCACHE, CLANG, *words[:-2], *CHECK]


def sources(unit):
    """Of a unit that CMake has put together; else the source itself."""
    with open(unit, encoding='utf-8') as file:
        return re.findall(r'^#include "(/.*)"', file.read(), re.M) or [unit]


def together(entries):
    """[(directory, name, command, sources)]: what is compiled alike and is of one folder goes together, for no two sources of a folder use
    the same name."""
    found = {}
    for entry in entries:
        target, of = os.path.relpath(entry['file'], entry['directory']).partition('.dir/')[0], sources(entry['file'])
        folders = {os.path.dirname(source) for source in of}
        key = entry['directory'], target, tuple(command(entry)), folders.pop() if len(folders) == 1 else entry['file']
        found.setdefault(key, []).extend(of)
    return [(directory, f'{target}.dir/lock_annotations_{number}.cxx', words, of)
            for number, ((directory, target, words, _), of) in enumerate(found.items())]


def check(directory, name, words, of):
    """What clang says, if it is anything."""
    unit = os.path.join(directory, name)
    with open(unit, 'w', encoding='utf-8') as file:  # the same in each clone, for ccache
        file.writelines(f'#include "{os.path.relpath(source, os.path.dirname(unit))}"\n' for source in of)
    # ccache then takes the headers from the dependencies, instead of preprocessing all first.
    done = subprocess.run([*words, '-MD', '-MF', f'{unit}.d', '-c', unit], cwd=directory, capture_output=True, text=True,
                          env={**os.environ, 'CCACHE_DEPEND': '1'})
    return done.stderr if done.returncode else ''


def self_test():
    with tempfile.NamedTemporaryFile('w', suffix='.cc') as file:
        file.write(PLANTED)
        file.flush()
        done = subprocess.run([CLANG, '-std=c++20', *CHECK, file.name], capture_output=True, text=True)
    if done.returncode == 0 or "requires holding mutex 'mutex'" not in done.stderr:
        print(f'a counter that is read without its lock was not found:\n{done.stderr}')
        return 1
    folder = '/home/tests/client/python/ballast_seeded/build/dev'
    taken = [bool(in_a_library({'directory': folder, 'file': f'{folder}/{part}/CMakeFiles/x.dir/Unity/unity_0_cxx.cxx'}))
             for part in ('services', 'storage/log', 'tests/services', 'client/python')]
    if taken != [True, True, False, False]:
        print(f'expected the units of libraries alone, in a tree of any name, got {taken}')
        return 1
    print('a counter that is read without its lock is found')
    return 0


def main():
    if CLANG is None:
        print('skipped: no clang++ (deploy/packages.sh test)')
        return 77
    if sys.argv[1] == '--self-test':
        return self_test()
    found = together(library_units(sys.argv[1]))
    wrong = list(filter(None, (check(*each) for each in found)))
    for text in wrong:
        print(text[-8000:])
    print(f'{len(found)} units, {len(wrong)} with warnings')
    return 1 if wrong or not found else 0


if __name__ == '__main__':
    sys.exit(main())
