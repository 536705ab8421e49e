#!/usr/bin/env bash
# lizard over the product: no function has a cyclomatic complexity above 20.
# Usage: complexity.sh ROOT PYTHON [--planted]   lizard is that of PYTHON (the tests' environment)
# --planted: over one function with 21 branches, which has to be found.
set -euo pipefail
"$2" -c 'import lizard' 2> /dev/null || { echo "skipped: no lizard; tests/run.sh makes an environment with it"; exit 77; }
check() { "$1" -m lizard -l cpp -l python -C 20 -w "${@:2}"; }
cd "$1"
if [[ "${3:-}" != --planted ]]; then
  check "$2" kernels proto storage services client
  exit
fi
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
{ echo 'int Planted(int a) {'; for i in {1..21}; do echo "  if (a == $i) return $i;"; done; echo '  return 0; }'; } > "$copy/planted.cc"
if check "$2" "$copy"; then
  echo "a function with 21 branches was planted, and lizard has found nothing"
  exit 1
fi
