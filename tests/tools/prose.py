#!/usr/bin/env python3
"""Counts pronouns and sentences without a subject in the comments of headers and in READMEs, folder by folder.

Usage: prose.py ROOT              fails where a folder is worse than its bound in prose_held.json
       prose.py ROOT --hold      writes what is reached as the new bounds; a bound never rises
       prose.py ROOT --show DIR  prints the sentences of DIR with most pronouns
       prose.py --self-test
"""
import json
import os
import re
import sys

PRONOUNS = {'it', 'they', 'that', 'those', 'these', 'one', 'which', 'who', 'whose', 'what', 'other'}
RIDDLES = {'Of', 'What', 'Who'}
PRONOUNS_MAX = 5.0  # per 100 words; the bound of every folder that prose_held.json does not name
SLACK = 0.5  # a bound that is looser than this is lowered with --hold, else the test fails
ROOTS = ['proto', 'kernels', 'storage', 'services', 'client', 'tests', 'deploy']
HELD = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'prose_held.json')


def header_text(text):
    """Comments of a C++ header: each run of comment lines is a paragraph, a comment behind code one of its own."""
    paragraphs, run = [], []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith('//'):
            run.append(stripped.lstrip('/ '))
            continue
        if run:
            paragraphs.append(' '.join(run))
            run = []
        behind = re.search(r'[;{},)]\s+//\s*(.*)$', line)
        if behind:
            paragraphs.append(behind.group(1))
    if run:
        paragraphs.append(' '.join(run))
    return paragraphs


def markdown_text(text):
    """Paragraphs, list items and table cells; neither code blocks nor headings."""
    paragraphs, run, code = [], [], False
    for line in text.splitlines() + ['']:
        if line.lstrip().startswith('```'):
            code = not code
            line = ''
        elif code:
            continue
        starts = re.match(r'\s*([-*]|\d+\.)\s+', line)
        if not line.strip() or line.startswith('#') or line.lstrip().startswith('|') or starts:
            if run:
                paragraphs.append(' '.join(run))
            run = []
        if line.lstrip().startswith('|'):
            paragraphs += [cell.strip() for cell in line.strip().strip('|').split('|') if re.search(r'[A-Za-z]', cell)]
        elif line.strip() and not line.startswith('#'):
            run.append(line[starts.end():] if starts else line.strip())
    return paragraphs


def sentences(paragraphs):
    for paragraph in paragraphs:
        paragraph = re.sub(r'`[^`]*`', ' Code ', paragraph)
        paragraph = re.sub(r'\]\([^)]*\)', ']', paragraph)
        for sentence in re.split(r'(?<=[.!?:;])\s+', paragraph):
            words = re.findall(r"[A-Za-z][A-Za-z'-]*", sentence)
            if words:
                yield words, sentence


def is_riddle(words, before):
    return words[0] in RIDDLES and not before.rstrip().endswith((':', ';', ','))


class Folder:
    def __init__(self):
        self.words = 0
        self.pronouns = 0
        self.riddles = []
        self.worst = []

    def read(self, path, paragraphs):
        for paragraph in paragraphs:
            before = ''
            for words, sentence in sentences([paragraph]):
                count = sum(word.lower() in PRONOUNS for word in words)
                self.words += len(words)
                self.pronouns += count
                if is_riddle(words, before):
                    self.riddles.append(f'{path}: {sentence}')
                if count:
                    self.worst.append((count, f'{path}: {sentence}'))
                before = sentence

    def rate(self):
        return 100.0 * self.pronouns / self.words if self.words else 0.0


def measure(root):
    folders = {}
    for top in ROOTS:
        for directory, subfolders, names in os.walk(os.path.join(root, top)):
            subfolders[:] = [name for name in subfolders if name not in ('build', '__pycache__')]
            folder = os.path.relpath(directory, root)
            for name in sorted(names):
                read = markdown_text if name.endswith('.md') else header_text if name.endswith('.h') else None
                if read is None or name == 'RESULTS.md':
                    continue
                path = os.path.join(directory, name)
                with open(path, encoding='utf-8') as file:
                    folders.setdefault(folder, Folder()).read(os.path.relpath(path, root), read(file.read()))
    for name in ('README.md', 'ARCHITECTURE.md', 'CONTRIBUTING.md'):
        with open(os.path.join(root, name), encoding='utf-8') as file:
            folders.setdefault('.', Folder()).read(name, markdown_text(file.read()))
    return folders


def held():
    with open(HELD, encoding='utf-8') as file:
        return json.load(file)


def bound(held_bounds, folder):
    return held_bounds.get(folder, {'pronouns': PRONOUNS_MAX, 'riddles': 0})


def check(folders, held_bounds):
    """Yields what is worse than its bound, and bounds that could be lower."""
    for name, folder in sorted(folders.items()):
        allowed = bound(held_bounds, name)
        if folder.rate() > allowed['pronouns'] + 0.05 and folder.pronouns > 2:
            yield f'{name}: {folder.rate():.1f} pronouns per 100 words, at most {allowed["pronouns"]} are held'
            for count, sentence in sorted(folder.worst, reverse=True)[:5]:
                yield f'    {count} in {sentence}'
        if len(folder.riddles) > allowed['riddles']:
            yield f'{name}: {len(folder.riddles)} sentences begin with Of, What or Who, at most {allowed["riddles"]} are held'
            for sentence in folder.riddles[:5]:
                yield f'    {sentence}'
    for name, allowed in sorted(held_bounds.items()):
        if name not in folders:
            yield f'{name}: is in prose_held.json, but there is no such folder: run with --hold'
            continue
        folder = folders[name]
        loose = allowed['pronouns'] > max(PRONOUNS_MAX, folder.rate()) + SLACK or allowed['riddles'] > len(folder.riddles)
        if loose:
            yield f'{name}: reached {folder.rate():.1f} and {len(folder.riddles)}, better than its bound: hold it with --hold'


def hold(folders):
    before = held() if os.path.exists(HELD) else None
    bounds = {}
    for name, folder in sorted(folders.items()):
        reached = {'pronouns': round(max(folder.rate() + 0.05, PRONOUNS_MAX), 1), 'riddles': len(folder.riddles)}
        if before is not None and os.path.exists(HELD):
            allowed = before.get(name)
            if allowed is not None:
                reached = {key: min(value, allowed[key]) for key, value in reached.items()}
        if reached['pronouns'] > PRONOUNS_MAX or reached['riddles']:
            bounds[name] = reached
    with open(HELD, 'w', encoding='utf-8') as file:
        json.dump(bounds, file, indent=1, sort_keys=True)
        file.write('\n')


def show(folders, name):
    folder = folders[name]
    print(f'{name}: {folder.rate():.1f} pronouns per 100 of {folder.words} words, {len(folder.riddles)} riddles')
    for sentence in folder.riddles:
        print(f'  riddle: {sentence}')
    for count, sentence in sorted(folder.worst, reverse=True):
        print(f'  {count}: {sentence}')


def self_test():
    folder = Folder()
    folder.read('a.h', header_text('// Of the log that there is; 0: to be chosen.\nint log = 0;  // What it is.\n'
                                   '// A version\n// that is kept.\nstruct A {};\n'))
    assert len(folder.riddles) == 2, folder.riddles
    assert folder.pronouns == 4, folder.pronouns
    page = Folder()
    page.read('README.md', markdown_text('# What\nOne thing.\n```\nthat that that\n```\n| It `that` | those |\n- Who\n  comes?\n'))
    assert len(page.riddles) == 1, page.riddles
    assert page.pronouns == 4, page.pronouns
    bad = {'x': folder}
    assert len(list(check(bad, {}))) >= 2
    assert not list(check(bad, {'x': {'pronouns': 50.0, 'riddles': 2}})) or folder.rate() < 49.0
    assert any('hold it' in line for line in check(bad, {'x': {'pronouns': 90.0, 'riddles': 3}}))
    print('what is planted is found')


def main():
    if sys.argv[1] == '--self-test':
        self_test()
        return 0
    folders = measure(sys.argv[1])
    if sys.argv[2:3] == ['--hold']:
        hold(folders)
        return 0
    if sys.argv[2:3] == ['--show']:
        show(folders, sys.argv[3])
        return 0
    wrong = list(check(folders, held()))
    print('\n'.join(wrong))
    print(f'{len(folders)} folders, {len(wrong)} lines to mend')
    return 1 if wrong or not folders else 0


if __name__ == '__main__':
    sys.exit(main())
