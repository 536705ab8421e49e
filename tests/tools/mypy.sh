#!/usr/bin/env bash
# `mypy --strict` over the Python package, by client/python/pyproject.toml.
# Usage: mypy.sh ROOT PYTHON CACHE [--planted]   mypy and torch are those of PYTHON (the tests' environment). CACHE: a folder of the build,
# which tests/python/test_typing.py has, too: torch takes most of the time, and options that are the same for both let one read it for both.
# --planted: over one module of a copy, with a wrong type in it, which has to be found.
set -euo pipefail
root="$1" python="$2" cache="$3"
"$python" -c 'import mypy, torch' 2> /dev/null || { echo "skipped: no mypy or no torch; tests/run.sh makes an environment with them"; exit 77; }
check() { (cd "$1" && "$python" -m mypy --config-file pyproject.toml --cache-dir "$cache" "${@:2}"); }
if [[ "${4:-}" != --planted ]]; then
  exec 9> "$cache.lock"
  flock 9
  check "$root/client/python" --follow-imports=silent -p ballast
  exit
fi
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
cp -r "$root/client/python/ballast" "$root/client/python/pyproject.toml" "$copy"
printf '\n\ndef planted(job: str) -> int:\n    return job\n' >> "$copy/ballast/errors.py"
if said="$(check "$copy" -m ballast.errors --follow-imports=skip)"; then
  echo "a wrong type was planted, and mypy has found nothing"
  exit 1
fi
grep -q '^ballast/errors.py:.*Incompatible return value type' <<< "$said" || { echo "$said"; exit 1; }
