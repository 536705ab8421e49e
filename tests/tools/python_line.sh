#!/usr/bin/env bash
# The order of the Python package's rooms, and that no modules import each other in a circle: contracts of client/python/pyproject.toml,
# held by import-linter.
# Usage: python_line.sh ROOT PYTHON [--planted]   lint-imports is looked for beside PYTHON (the tests' environment), then on PATH
# --planted: over a copy of the package with an import upwards and a circle in it, which have to be found.
set -euo pipefail
linter="$(command -v "$(dirname "$2")/lint-imports" || command -v lint-imports)" ||
  { echo "skipped: no import-linter; tests/run.sh makes an environment with it"; exit 77; }
check() { (cd "$1" && PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 "$linter" --no-logo --no-cache pyproject.toml); }
if [[ "${3:-}" != --planted ]]; then
  check "$1/client/python"
  exit
fi
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
cp -r "$1/client/python/ballast" "$1/client/python/pyproject.toml" "$copy"
echo 'from ballast.torch.optimizer import Optimizer' >> "$copy/ballast/torch/ranks/groups.py"
echo 'from ballast.torch.job.job import Job' >> "$copy/ballast/torch/job/naming.py"
if said="$(check "$copy")"; then
  echo "an import upwards and a circle were planted, and import-linter has found nothing"
  exit 1
fi
for found in 'ballast.torch.ranks is not allowed to import ballast.torch.optimizer' 'no circle of modules BROKEN' '.naming'; do
  grep -qF "$found" <<< "$said" || { echo "$said"; exit 1; }
done
