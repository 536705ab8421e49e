#!/usr/bin/env bash
# A virtual environment with what the Python package is built and tested with, or with the packages of another file; does nothing
# where it is there. Two at a time make it once.
# Usage: tests/python/venv.sh DIR [REQUIREMENTS]
# Ends with 1, and a word, where it cannot be made (no pip, no package index).
set -euo pipefail
dir="$1"
wanted="${2:-$(dirname "$0")/requirements.txt}"
mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9  # another run may be making it
if [[ -f "$dir/complete" ]] && cmp -s "$wanted" "$dir/complete"; then
  exit 0
fi
echo "python: making $dir"
python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check -r "$wanted"
cp "$wanted" "$dir/complete"
