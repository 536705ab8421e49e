#!/usr/bin/env python3
"""Counts methods and fields per class, sources per class and files per folder; each count has a limit, or a held bound.

Usage: sizes.py ROOT          fails where a class or a folder is above the limit and above its bound in sizes_held.json
       sizes.py ROOT --hold   writes what is reached as the new bounds; a bound never rises
       sizes.py ROOT --all    prints every class and folder, the largest first
       sizes.py --self-test

Methods: functions that a class declares, with constructors, without those that are defaulted or deleted. Fields: data members,
static constants left out. Sources: .cc files of the tree that define functions of the class outside of its body.
"""
import json
import os
import re
import sys

LIMITS = {'methods': 45, 'fields': 25, 'sources': 3}
FILES_MAX = 15
ROOTS = ['services', 'storage', 'client']  # Folders of all three; classes of the first two.
CLASS_ROOTS = ['services', 'storage']
HELD = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'sizes_held.json')


def plain(text):
    """`text` without comments, preprocessor lines, thread annotations, attributes and the insides of literals."""
    text = re.sub(r'//[^\n]*|/\*.*?\*/', '', text, flags=re.S)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
    text = re.sub(r"'(?:\\.|[^'\\\n])'", "' '", text)
    text = re.sub(r'^\s*#[^\n]*', '', text, flags=re.M)
    text = re.sub(r'\bABSL_[A-Z_]+\((?:[^()]|\([^()]*\))*\)', '', text)
    text = re.sub(r'\balignas\([^()]*\)', '', text)
    return re.sub(r'\[\[[^\]]*\]\]', '', text)


def closing(text, opening):
    """Index behind the brace that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        if text[index] == '{':
            depth += 1
        elif text[index] == '}':
            depth -= 1
            if depth == 0:
                return index + 1
    return len(text)


CLASS = re.compile(r'\b(?:class|struct)\s+(?:ABSL_\w+\s+)?([A-Za-z_][\w:]*)(?:\s+final)?\s*(?::[^:{;][^{;]*)?\{')


def classes(text, outer=''):
    """Yields (name, body) of each class of `text`, nested ones with the name of the outer in front."""
    at = 0
    while match := CLASS.search(text, at):
        if re.search(r'\benum\s*$', text[:match.start()]):
            at = match.end()
            continue
        end = closing(text, match.end() - 1)
        body = text[match.end():end - 1]
        name = outer + match.group(1)
        yield name, body
        yield from classes(body, name + '::')
        at = end


def members(body):
    """Splits the body of a class into its own declarations; bodies of functions and of nested classes become '{}'."""
    declaration, index = '', 0
    while index < len(body):
        letter = body[index]
        if letter == '{':
            end = closing(body, index)
            declaration += '{}'
            index = end
            rest = body[index:].lstrip()
            function = re.search(r'\)\s*(const|noexcept|override|final|\s)*(->[^{]*)?(:[^{]*)?(\{\},?[^{]*)*\{\}$', declaration)
            if function and not rest.startswith((';', ',')):
                yield declaration.strip()
                declaration = ''
        elif letter == ';':
            yield declaration.strip()
            declaration, index = '', index + 1
        else:
            declaration += letter
            index += 1


def without_angles(text):
    before = None
    while before != text:
        before, text = text, re.sub(r'<[^<>]*>', '', text)
    return text


def kind(declaration):
    """'method', 'field' or None."""
    declaration = re.sub(r'^\s*(?:(?:public|private|protected)\s*:\s*)+', '', declaration)
    declaration = re.sub(r'^template\s*<[^{]*?>\s*(?=\w)', '', declaration)
    if not declaration or re.match(r'(using|friend|typedef|static_assert|enum|class\s+\w+\s*(\{\}|$)|struct\s+\w+\s*(\{\}|$|:))', declaration):
        return None
    if re.search(r'=\s*(default|delete)$', declaration) or re.match(r'(static\s+)?constexpr\s[^()]*(=|\{)', declaration):
        return None
    if re.match(r'static\s+(inline\s+)?const(expr)?\b', declaration) and '(' not in declaration.split('=')[0]:
        return None
    head = re.split(r'=(?!=)|\{\}', without_angles(declaration.replace('operator<', 'operator').replace('operator>', 'operator')
                                                   .replace('->', ' ').replace('operator=', 'operator')), maxsplit=1)[0]
    return 'method' if '(' in head else 'field'


def fields_of(declaration):
    """A declaration may name several: `int a, b = 0;`."""
    return 1 + len(re.findall(r',\s*\*?\w+\s*(?:=|\{\}|,|$)', without_angles(re.sub(r'\([^()]*\)', '', declaration))))


def measure(root):
    """Returns {class: {methods, fields, sources}} and {folder: files}."""
    sizes, folders, texts = {}, {}, {}
    for top in ROOTS:
        for directory, subfolders, names in os.walk(os.path.join(root, top)):
            subfolders[:] = [name for name in subfolders if name not in ('build', '__pycache__')]
            folder = os.path.relpath(directory, root)
            folders[folder] = len([name for name in names if not name.startswith('.') and not name.endswith('.md')])
            for name in names:
                if name.endswith(('.h', '.cc')) and top in CLASS_ROOTS:
                    with open(os.path.join(directory, name), encoding='utf-8') as file:
                        texts[os.path.join(folder, name)] = plain(file.read())
    for path, text in sorted(texts.items()):
        for name, body in classes(text):
            count = {'methods': 0, 'fields': 0, 'sources': 0}
            for declaration in members(body):
                what = kind(declaration)
                if what == 'method':
                    count['methods'] += 1
                elif what == 'field':
                    count['fields'] += fields_of(declaration)
            known = sizes.get(name)
            if known is None or count['methods'] + count['fields'] > known['methods'] + known['fields']:
                sizes[name] = count
    defined = re.compile(r'^(?![ #])[^;{}()]*?\b((?:\w+::)+)~?\w+\(', re.M)
    for path, text in texts.items():
        if path.endswith('.cc'):
            seen = set()
            for match in defined.finditer(text):
                parts = match.group(1).rstrip(':').split('::')
                seen |= {'::'.join(parts[k:]) for k in range(len(parts))}
            for name in seen & sizes.keys():
                sizes[name]['sources'] += 1
    return sizes, folders


def flat(sizes, folders):
    reached = {f'{name} {what}': (count[what], LIMITS[what]) for name, count in sizes.items() for what in LIMITS}
    reached |= {f'{name}/ files': (count, FILES_MAX) for name, count in folders.items()}
    return reached


def check(reached, held):
    for name, (count, limit) in sorted(reached.items()):
        allowed = max(limit, held.get(name, 0))
        if count > allowed:
            yield f'{name}: {count}, at most {allowed} {"are held" if allowed > limit else "may be"}'
    for name, allowed in sorted(held.items()):
        count, limit = reached.get(name, (0, 0))
        if max(count, limit) < allowed:
            yield f'{name}: reached {count}, better than its bound of {allowed}: hold it with --hold'


def hold(reached):
    before = None
    if os.path.exists(HELD):
        with open(HELD, encoding='utf-8') as file:
            before = json.load(file)
    bounds = {name: count if before is None else min(count, before[name])
              for name, (count, limit) in reached.items() if count > limit and (before is None or name in before)}
    with open(HELD, 'w', encoding='utf-8') as file:
        json.dump(bounds, file, indent=1, sort_keys=True)
        file.write('\n')


PLANTED = '''
// class Comment { int x; };
class Job : public Base<int> {
 public:
  explicit Job(int a) : a_(a) {}
  Job(const Job&) = delete;
  virtual ~Job();
  absl::Status Run(std::function<void(int)> done) ABSL_LOCKS_EXCLUDED(mu_);
  bool operator<(const Job& other) const { return a_ < other.a_; }
  static constexpr int kMax = 3;
  struct Part { int first = 0, second = 0; };
  using Name = std::string;

 private:
  template <typename T> T Get();
  std::function<void(int, int)> done_;
  absl::Mutex mu_;
  int a_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<int, std::vector<int>> by_{};
  Part part_ ABSL_GUARDED_BY(mu_);
};
enum class Kind { kA };
'''


def self_test():
    found = {}
    for name, body in classes(plain(PLANTED)):
        kinds = [(kind(one), one) for one in members(body)]
        found[name] = (sum(k == 'method' for k, _ in kinds), sum(fields_of(one) for k, one in kinds if k == 'field'))
    assert found == {'Job': (5, 5), 'Job::Part': (0, 2)}, found
    reached = {'A methods': (46, 45), 'B fields': (30, 25), 'C sources': (1, 3)}
    assert len(list(check(reached, {}))) == 2
    assert not list(check(reached, {'A methods': 46, 'B fields': 30}))
    assert len(list(check(reached, {'A methods': 47, 'B fields': 30}))) == 1
    print('what is planted is found')


def main():
    if sys.argv[1] == '--self-test':
        self_test()
        return 0
    sizes, folders = measure(sys.argv[1])
    reached = flat(sizes, folders)
    if sys.argv[2:3] == ['--hold']:
        hold(reached)
        return 0
    if sys.argv[2:3] == ['--all']:
        for name, count in sorted(sizes.items(), key=lambda item: -item[1]['methods'] - item[1]['fields']):
            print(f'{count["methods"]:4} methods {count["fields"]:4} fields {count["sources"]:3} sources  {name}')
        for name, count in sorted(folders.items(), key=lambda item: -item[1]):
            print(f'{count:4} files  {name}')
        return 0
    with open(HELD, encoding='utf-8') as file:
        wrong = list(check(reached, json.load(file)))
    for line in wrong:
        print(line)
    print(f'{len(sizes)} classes, {len(folders)} folders, {len(wrong)} lines to mend')
    return 1 if wrong or not sizes else 0


if __name__ == '__main__':
    sys.exit(main())
