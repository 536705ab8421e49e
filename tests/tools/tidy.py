#!/usr/bin/env python3
"""clang-tidy with the checks of .clang-tidy over the sources of the libraries; each finding is an error.

Usage: tidy.py BUILD [PART]     BUILD: a configured build folder whose generated sources are built; PART: only units with this in their path
       tidy.py --self-test
Units are those of the build, eight sources each in unity, so that headers are read once for eight. Takes minutes: `tests/run.sh clang` runs it,
each night. Mend a finding, or say `// NOLINT(check): why` behind the line.
"""
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile

import lock_annotations

TIDY = next(filter(None, map(shutil.which, ('clang-tidy', 'clang-tidy-14'))), None)
TREE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# One fault in the file itself, one in a header of the tree, as a unity unit includes its sources.
PLANTED = {
    'services/planted/header.h': '''#include <string>
#include <utility>
inline unsigned long Length(std::string text) {
  std::string taken = std::move(text);
  return taken.size() + text.size();
}
''',
    'services/planted/unit.cc': '''#include "header.h"
struct Base {
  virtual ~Base() = default;
  virtual unsigned long Of(const std::string& text) { return Length(text); }
};
struct Derived : Base {
  virtual unsigned long Of(const std::string& text) { return text.size(); }
};
''',
}
EXPECTED = ('header.h:5:', 'bugprone-use-after-move', 'unit.cc:7:', 'modernize-use-override')


def check(path, words, directory):
    done = subprocess.run([TIDY, '--quiet', f'--config-file={TREE}/.clang-tidy', path, '--', *words], cwd=directory, capture_output=True, text=True)
    return (done.stdout or done.stderr) if done.returncode else ''


def check_unit(entry):
    words = [word for word in lock_annotations.command(entry)[1:] if word not in lock_annotations.CHECK]
    return check(entry['file'], words, entry['directory'])


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        for name, text in PLANTED.items():
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, 'w', encoding='utf-8') as file:
                file.write(text)
        found = check(path, ['-std=c++20'], folder)
    missed = [what for what in EXPECTED if what not in found]
    if missed:
        print(f'not found: {", ".join(missed)}\n{found}')
        return 1
    print('a use after a move in a header and a function without `override` are found')
    return 0


def main():
    if TIDY is None:
        print('skipped: no clang-tidy (deploy/packages.sh test)')
        return 77
    if sys.argv[1] == '--self-test':
        return self_test()
    part = sys.argv[2] if len(sys.argv) > 2 else ''
    units = [entry for entry in lock_annotations.library_units(sys.argv[1]) if part in entry['file']]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = list(filter(None, pool.map(check_unit, units)))
    for text in wrong:
        print(text[-8000:])
    print(f'{len(units)} units, {len(wrong)} with findings')
    return 1 if wrong or not units else 0


if __name__ == '__main__':
    sys.exit(main())
