#!/usr/bin/env python3
"""Counts pronouns and sentences without a subject in the comments of headers and in READMEs, folder by folder.

Usage: prose.py ROOT             fails where a folder is above the bounds
       prose.py ROOT --show DIR   prints the sentences of DIR with most pronouns
       prose.py --self-test
"""
import os
import re
import sys

PRONOUNS = {'it', 'they', 'that', 'those', 'these', 'one', 'which', 'who', 'whose', 'what', 'other'}
RIDDLES = {'Of', 'What', 'Who'}
PRONOUNS_MAX = 5.0  # per 100 words of a folder; sentences that begin with one of RIDDLES: none
ROOTS = ['proto', 'kernels', 'storage', 'services', 'client', 'tests', 'deploy']


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


def check(folders):
    for name, folder in sorted(folders.items()):
        if folder.rate() > PRONOUNS_MAX and folder.pronouns > 2:
            yield f'{name}: {folder.rate():.1f} pronouns per 100 words, at most {PRONOUNS_MAX} may be'
            for count, sentence in sorted(folder.worst, reverse=True)[:5]:
                yield f'    {count} in {sentence}'
        for sentence in folder.riddles:
            yield f'{name}: a sentence begins with Of, What or Who: {sentence}'


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
    assert len(list(check({'x': folder}))) >= 3
    good = Folder()
    good.read('b.h', header_text('// The server keeps the version until the job is dropped.\nint a;\n'))
    assert not list(check({'x': good}))
    print('what is planted is found')


def main():
    if sys.argv[1] == '--self-test':
        self_test()
        return 0
    folders = measure(sys.argv[1])
    if sys.argv[2:3] == ['--show']:
        show(folders, sys.argv[3])
        return 0
    wrong = list(check(folders))
    for line in wrong:
        print(line)
    print(f'{len(folders)} folders, {len(wrong)} lines to mend')
    return 1 if wrong or not folders else 0


if __name__ == '__main__':
    sys.exit(main())
