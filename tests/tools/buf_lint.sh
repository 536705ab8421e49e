#!/usr/bin/env bash
# `buf lint` over the protos, by the rules of proto/buf.yaml.
# Usage: buf_lint.sh ROOT [PYTHON]   buf is looked for beside PYTHON (the tests' environment), then on PATH
set -euo pipefail
buf="$(command -v "$(dirname "${2:-/}")/buf" || command -v buf)" || { echo "skipped: no buf; tests/run.sh makes an environment with it"; exit 77; }
cd "$1/proto"
"$buf" lint
