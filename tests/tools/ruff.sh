#!/usr/bin/env bash
# `ruff check` over the Python package and its tests, by the rules of client/python/pyproject.toml.
# Usage: ruff.sh ROOT [PYTHON]   ruff is looked for beside PYTHON (the tests' environment), then on PATH
set -euo pipefail
ruff="$(command -v "$(dirname "${2:-/}")/ruff" || command -v ruff)" || { echo "skipped: no ruff; tests/run.sh makes an environment with it"; exit 77; }
cd "$1"
"$ruff" check --no-cache client/python/ballast tests/python tests/ops deploy
