#!/usr/bin/env bash
# Builds the wheel, installs it into a clean virtual environment beside torch, and runs there what its pages print. Then installs the
# same file for every Python from 3.10 on that is here, and trains with it.
# Usage: tests/python/wheel_test.sh PYTHON FOLDER COMPILER
# PYTHON: has pip, nanobind, scikit-build-core and torch. FOLDER: for the wheel and the environment; made anew. COMPILER: of C++.
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
python="$1" folder="$2" compiler="$3"

rm -rf "$folder" "$root/build/wheel-test"
mkdir -p "$folder"
# With the compiler (by the same name) and the settings of the preset dev and a build folder as deep as its, so that ccache has all of
# it already.
CXX="$compiler" "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$folder" \
  -C cmake.build-type=RelWithDebInfo -C "cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -g1 -DNDEBUG" \
  -C cmake.define.BALLAST_WERROR=ON -C cmake.define.BALLAST_CUDA_ARCHITECTURES=80-real -C "build-dir=$root/build/wheel-test" "$root/client/python"
wheel=("$folder"/ballast_state-*.whl)
echo "wheel: $(basename "${wheel[0]}"), $(stat -c %s "${wheel[0]}") bytes"

"$python" -m venv "$folder/venv"
# torch is borrowed from PYTHON's environment, which has no package `ballast`; the wheel alone is installed.
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "${wheel[0]}"
cd "$folder"  # nothing of the source tree is importable from here
for page in README REFERENCE; do
  "$folder/venv/bin/python" "$root/tests/python/run_readme.py" "$root/client/python/$page.md" "$folder/$page"
done
"$folder/venv/bin/python" - <<'EOF'
import pathlib
import subprocess
import sys

import ballast

package = pathlib.Path(ballast.__file__).parent
assert (package / 'py.typed').is_file() and (package / '_native.pyi').is_file(), list(package.iterdir())
# Both programs are on PATH, with their own arguments and exit codes.
for name, argument, code, words in (('ballastd', '--version', 0, 'ballastd 0'), ('ballastctl', '--help', 0, 'Usage: ballastctl'),
                                    ('ballastd', '--no-such-flag', 2, 'no-such-flag')):
    run = subprocess.run([pathlib.Path(sys.executable).parent / name, argument], capture_output=True, text=True)
    assert run.returncode == code and words in run.stdout + run.stderr, run
EOF

# Steps, a kill, and the rest of the steps, in an environment that has the wheel.
steps() { # ENVIRONMENT
  rm -rf "$folder/state"
  local code=0
  "$1/bin/python" "$root/tests/python/wheel_steps.py" "$folder/state" || code=$?
  ((code == 137)) || { echo "wheel: expected SIGKILL after some steps, not exit code $code" >&2; return 1; }
  "$1/bin/python" "$root/tests/python/wheel_steps.py" "$folder/state" resume
  [[ "$("$1/bin/ballastctl" --version)" == ballastctl\ 0.* ]]
}
steps "$folder/venv"
mine="$("$python" -c 'import sys; print(sys.version_info.minor)')"
for minor in {10..15}; do
  ((minor != mine)) || continue
  # The newest of this version: on PATH, or of pyenv, whose commands in PATH only name those that are switched on.
  other=
  for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python3; do
    "$candidate" -c 'import ensurepip' 2>/dev/null && other="$candidate"
  done
  if [[ -z "$other" ]]; then
    echo "wheel: not tried with Python 3.$minor, which is not here"
    continue
  fi
  rm -rf "$folder/other"
  "$other" -m venv "$folder/other"
  if ! "$folder/other/bin/pip" install --quiet --disable-pip-version-check 'nanobind-backend>=1,<2'; then
    echo "wheel: not tried with Python 3.$minor, for which pip has no nanobind-backend"
    continue
  fi
  "$folder/other/bin/pip" install --quiet --disable-pip-version-check --no-deps "${wheel[0]}"
  steps "$folder/other"
done
rm -rf "$folder/venv" "$folder/other" "$folder/state" "$root/build/wheel-test"
