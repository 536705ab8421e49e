#!/usr/bin/env python3
"""Clang's check of ABSL_GUARDED_BY and its like (-Wthread-safety), over the sources of the libraries, without compiling them.

Usage: lock_annotations.py BUILD       BUILD: a build folder with compile_commands.json
       lock_annotations.py --self-test
The preset `clang` (tests/run.sh clang) compiles everything so, tests too; this check takes a minute, so that it runs with the tests.
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
# Of paths within the build folder: the folders above may have any name.
FOLDERS = re.compile(r'(?:storage|services|client|kernels|proto/base|proto/model)/CMakeFiles/|(?:storage|services|client)/\w+/CMakeFiles/')
SKIPPED = re.compile(r'tests/|client/(?:python|examples)/')  # the preset's; nanobind's and BLAS' headers
GCC_ONLY = ('-Wno-restrict', '-Wno-subobject-linkage')
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
    words = [word for word in shlex.split(entry['command']) if not word.endswith('ccache') and word not in GCC_ONLY]
    at = words.index('-o')
    return [CLANG, *words[1:at], *words[at + 2:], *CHECK]


def check(entry):
    done = subprocess.run(command(entry), cwd=entry['directory'], capture_output=True, text=True)
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
    entries = library_units(sys.argv[1])
    wrong = list(filter(None, map(check, entries)))
    for text in wrong:
        print(text[-8000:])
    print(f'{len(entries)} units, {len(wrong)} with warnings')
    return 1 if wrong or not entries else 0


if __name__ == '__main__':
    sys.exit(main())
