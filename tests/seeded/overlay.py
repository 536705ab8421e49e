#!/usr/bin/env python3
"""The overlay of bugs and failpoints: a patch here per source of the product (README.md).

Usage: overlay.py edit SOURCE      writes SOURCE with its bugs beside its patch; places where the patch does not fit are marked
       overlay.py refresh SOURCE   makes the patch from that file, and removes the file
       overlay.py apply SOURCE COPY   what the build does: SOURCE with its bugs, to COPY
       overlay.py check            fails on a bug or failpoint in the product
       overlay.py --self-test      breaks a patch, which must fail by its name, and plants a bug in a product
SOURCE is a path in the tree, services/step/step_machine.cc for one.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))
PRODUCT = ['proto', 'kernels', 'storage', 'services', 'client']
PLANTED = re.compile(r'\bSeeded\(|\bPass\("')


def overlay(source, here=HERE):
    """(the patch of a source, the file in which a person changes its bugs)"""
    return os.path.join(here, source + '.patch'), os.path.join(here, source)


def patch(source, patch_file, copy, *how):
    done = subprocess.run(['patch', '--silent', '--reject-file=-', *how, f'--output={copy}', source, patch_file], capture_output=True, text=True)
    return done.returncode == 0, (done.stdout + done.stderr).strip()


def apply(source, copy, tree=TREE, here=HERE):
    """'' and the copy is there, or why there is none."""
    patch_file, _ = overlay(source, here)
    fits, said = patch(os.path.join(tree, source), patch_file, copy, '--fuzz=0')
    if fits:
        return ''
    if os.path.exists(copy):
        os.remove(copy)
    name = os.path.join('tests/seeded', source + '.patch')
    return (f'{name} does not fit {source} any more: the source changed where the patch plants a bug or a failpoint.\n{said}\n'
            f'Mend it so:\n'
            f'  tests/seeded/overlay.py edit {source}      # then resolve what is marked in tests/seeded/{source}\n'
            f'  tests/seeded/overlay.py refresh {source}')


def edit(source, tree=TREE, here=HERE):
    """'' and the file is there, or why there is none."""
    patch_file, edited = overlay(source, here)
    if os.path.exists(edited):
        return f'{edited} is there already: refresh {source}, or remove the file'
    os.makedirs(os.path.dirname(edited), exist_ok=True)
    if os.path.exists(patch_file):
        patch(os.path.join(tree, source), patch_file, edited, '--merge')
    else:
        shutil.copy(os.path.join(tree, source), edited)
    return ''


def refresh(source, tree=TREE, here=HERE):
    """'' and the patch is there, or why there is none."""
    patch_file, edited = overlay(source, here)
    with open(edited, encoding='utf-8') as file:
        if re.search(r'^(<<<<<<<|>>>>>>>)', file.read(), re.MULTILINE):
            return f'{edited} has places that are marked and not resolved'
    done = subprocess.run(['diff', '--unified', '--suppress-blank-empty', f'--label=a/{source}', f'--label=b/{source}', os.path.join(tree, source), edited],
                          capture_output=True, text=True)
    if done.returncode > 1:
        return done.stderr
    with open(patch_file, 'w', encoding='utf-8') as file:
        file.write(done.stdout)
    os.remove(edited)
    if not done.stdout:
        os.remove(patch_file)
    return ''


def check(tree=TREE):
    """'path:line: text' for every line of the product that has a bug or a failpoint."""
    for folder in PRODUCT:
        for directory, _, names in os.walk(os.path.join(tree, folder)):
            for name in sorted(names):
                if not name.endswith(('.h', '.cc', '.cu', '.cuh')):
                    continue
                path = os.path.join(directory, name)
                with open(path, encoding='utf-8') as file:
                    for number, line in enumerate(file, 1):
                        if PLANTED.search(line):
                            yield f'{os.path.relpath(path, tree)}:{number}: {line.strip()}: bugs and failpoints live in tests/seeded'


def write(tree, path, text):
    os.makedirs(os.path.dirname(os.path.join(tree, path)), exist_ok=True)
    with open(os.path.join(tree, path), 'w', encoding='utf-8') as file:
        file.write(text)


def self_test():
    source, rule = 'services/step/rule.cc', '// Rule.\n\nnamespace rule {\n\nbool Takes(int epoch) {\n  if (epoch < 3) return false;\n  return true;\n}\n\n}\n'
    seeded = rule.replace('epoch < 3', 'epoch < 3 && !Seeded(kEpochIgnored)')
    with tempfile.TemporaryDirectory() as tree:
        here, copy = os.path.join(tree, 'tests/seeded'), os.path.join(tree, 'copy.cc')

        def plant(text):
            write(tree, source, rule)
            edit(source, tree, here)
            write(here, source, text)
            return refresh(source, tree, here)

        def applied():
            problem = apply(source, copy, tree, here)
            return problem or open(copy, encoding='utf-8').read()

        outcomes = {'a patch gives what it was made from': plant(seeded) == '' and applied() == seeded}
        write(tree, source, '// Another line.\n' + rule)
        outcomes['a patch follows its place'] = applied() == '// Another line.\n' + seeded
        write(tree, source, rule.replace('epoch < 3', 'epoch < newest'))
        problem = apply(source, copy, tree, here)
        outcomes['a patch that does not fit is named, with what to do'] = all(
            text in problem for text in (f'tests/seeded/{source}.patch', f'overlay.py edit {source}', f'overlay.py refresh {source}')) and not os.path.exists(copy)
        edit(source, tree, here)
        outcomes['a place that is marked is not taken'] = 'marked' in refresh(source, tree, here)
        outcomes['work is not written over'] = 'already' in edit(source, tree, here)
        write(here, source, seeded.replace('epoch < 3', 'epoch < newest'))
        outcomes['a mended patch fits'] = refresh(source, tree, here) == '' and 'epoch < newest && !Seeded' in applied()
        outcomes['a product without bugs passes'] = not list(check(tree))
        write(tree, source, seeded)
        write(tree, 'storage/log.cc', 'storage::Pass("log/cut");\n')
        outcomes['a bug and a failpoint in the product are found'] = len(list(check(tree))) == 2
    for what, held in outcomes.items():
        print(f'{"ok" if held else "FAILED"}: {what}')
    return 0 if all(outcomes.values()) else 1


def main(verb, *paths):
    if verb == '--self-test':
        return self_test()
    if verb == 'check':
        problem = '\n'.join(check())
    else:
        problem = {'apply': apply, 'edit': edit, 'refresh': refresh}[verb](*paths)
    if problem:
        print(problem)
    return 1 if problem else 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
