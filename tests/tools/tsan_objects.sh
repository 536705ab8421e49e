#!/usr/bin/env bash
# Builds the instrumented part of abseil's synchronization that ThreadSanitizer needs, from Debian's own source package.
# Usage: tests/tools/tsan_objects.sh DIR
#
# Debian's abseil is not instrumented, so TSan cannot see that absl::Mutex orders anything and reports hundreds of false races.
# Seven objects linked into each test make the mutex visible; no suppression is needed then, so real races stay visible too.
set -euo pipefail

out="$(realpath -m "$1")"
sources=(synchronization/mutex synchronization/barrier synchronization/blocking_counter synchronization/notification
  synchronization/internal/create_thread_identity synchronization/internal/per_thread_sem synchronization/internal/waiter)
[[ -f "$out/complete" ]] && exit 0
mkdir -p "$out/apt/lists/partial"

# A private package list with source entries: the machine's own lists stay as they are.
list="$out/apt/sources.list"
python3 - "$list" <<'PY'
import glob, re, sys
entries = []
for path in glob.glob('/etc/apt/sources.list.d/*.sources'):
    for stanza in re.split(r'\n\s*\n', open(path).read()):
        fields = dict(re.findall(r'^([A-Za-z-]+):\s*(.*)$', stanza, re.M))
        suites = [s for s in fields.get('Suites', '').split() if s.startswith('bookworm')]
        signed = fields.get('Signed-By', '')
        option = f'[signed-by={signed}] ' if signed.startswith('/') else ''
        for uri in fields.get('URIs', '').split():
            for suite in suites:
                entries.append(f"deb-src {option}{uri} {suite} {fields.get('Components', 'main')}")
for path in ['/etc/apt/sources.list'] + glob.glob('/etc/apt/sources.list.d/*.list'):
    try:
        for line in open(path):
            if re.match(r'deb\s', line) and re.search(r'\sbookworm', line):
                entries.append('deb-src' + line.strip()[3:])
    except FileNotFoundError:
        pass
open(sys.argv[1], 'w').write('\n'.join(dict.fromkeys(entries)) + '\n')
PY
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$list" -o "Dir::Etc::sourceparts=-" -o "Dir::State::lists=$out/apt/lists"
  -o "APT::Sandbox::User=$(id -un)")
"${apt[@]}" update
cd "$out"
rm -rf source && mkdir source && cd source
"${apt[@]}" source --download-only abseil >/dev/null
dpkg-source --no-check -x ./*.dsc tree >/dev/null 2>&1
cd tree
for source in "${sources[@]}"; do
  g++ -std=c++17 -O2 -g -fPIC -fsanitize=thread -c "absl/$source.cc" -o "$out/$(basename "$source").o"
done
touch "$out/complete"
