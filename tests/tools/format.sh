#!/usr/bin/env bash
# Fails on a C++ source that clang-format would change.
# Usage: format.sh ROOT
set -euo pipefail
cd "$1"
command -v clang-format >/dev/null || { echo "skipped: no clang-format (deploy/packages.sh test)"; exit 77; }
version="$(clang-format --version | sed 's/.*version \([0-9]*\).*/\1/')"
[[ "$version" == 14 ]] || { echo "skipped: clang-format $version; formats differ between versions, 14 is ours"; exit 77; }
find kernels proto storage services client tests \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 -n 40 -P 2 clang-format --dry-run -Werror
