#!/usr/bin/env bash
# Installs, builds and runs every test.
# Usage: tests/run.sh [dev|full|asan|asan-full|tsan|clang|exhaustive|soak] [ctest arguments...]
#        tests/run.sh ops [--list] [NAME...]   the operations tests: chart, image, unit, packages, examples (tests/ops)
#   dev        (default) optimised, warnings are errors, GPU code compiled where nvcc is found
#   full       the same with all seeds, kills and damages, which take long
#   asan       AddressSanitizer, and UndefinedBehaviorSanitizer but for the objects of tests; a tenth of the seeds; no benches, no seeded
#              bugs, no failpoints, none of the tests marked ASAN_FULL
#   asan-full  the same with a tenth of the seeds of full, and with those tests
#   tsan       ThreadSanitizer; as asan-full
#   clang      builds alone: clang checks what is said of locks; then clang-tidy over the libraries
#   soak        only what takes hours: simulations, crash and corruption tests with a hundred times the seeds
#   exhaustive  only what takes many minutes: all 2^32 floats through every conversion
set -euo pipefail
cd "$(dirname "$0")/.."
[[ -w "${HOME:-/}" ]] || export CCACHE_DIR="${CCACHE_DIR:-$PWD/build/ccache}"  # ccache fails where it has no home

mode=dev
if [[ $# -gt 0 && "$1" != -* ]]; then
  mode="$1"
  shift
fi
if [[ "$mode" == ops ]]; then
  tests/ops/prepare.sh
  exec build/ops/venv/bin/python tests/ops/run.py "$@"
fi
configure=()
rounds=ci
preset="$mode"
case "$mode" in
  dev | clang) ;;
  full)
    preset=dev
    rounds=full
    ;;
  exhaustive | soak)
    preset=dev
    set -- -C "$mode" -L "$mode" -V "$@"
    ;;
  asan | asan-full)
    preset=asan
    [[ "$mode" == asan ]] || rounds=full
    export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1:check_initialization_order=1:strict_init_order=1:detect_odr_violation=2:detect_leaks=1
    export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
    ;;
  tsan)
    rounds=full
    export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:second_deadlock_stack=1
    configure+=("-DBALLAST_TSAN_OBJECTS=$PWD/build/tsan-abseil")
    ;;
  *) echo "usage: tests/run.sh [dev|full|asan|asan-full|tsan|clang|exhaustive|soak|ops] [arguments...], got '$mode'" >&2; exit 2 ;;
esac

# What a build and its tests were seen to take; a full disk shows as failures of whatever writes next.
space() { # DIR GIB
  local free=$(($(df --output=avail -k "$1" | tail -1) >> 20))
  ((free >= $2)) || echo "tests: $1 has $free GiB free, $2 are needed: tests may fail for want of space" >&2
}
space . 6
space "${TMPDIR:-/tmp}" 4

deploy/packages.sh test
[[ "$mode" == tsan ]] && tests/tools/tsan_objects.sh build/tsan-abseil
mkdir -p build
# A file that another clone or build folder has compiled comes from ccache.
export CCACHE_BASEDIR="${CCACHE_BASEDIR:-$PWD}" CCACHE_NOHASHDIR=1
export CCACHE_SLOPPINESS="${CCACHE_SLOPPINESS:-pch_defines,time_macros}"  # what has a precompiled header comes from ccache only so
build() {
  local log="build/$preset-configure.log"
  cmake --preset "$preset" -DBALLAST_TEST_ROUNDS="$rounds" "${configure[@]}" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
  grep -h '^-- Ballast:' "$log" || true
  cmake --build --preset "$preset" -j "$(nproc)"
}
if [[ "$preset" == dev ]]; then
  # It waits for a network, so it comes while all is built that needs no Python.
  tests/python/venv.sh "$PWD/build/venv" &
  environment=$!
  build
  if wait "$environment"; then
    configure+=(-DBALLAST_PYTHON=ON "-DPython_EXECUTABLE=$PWD/build/venv/bin/python")
  else
    echo "python: no environment with torch; the Python package is not tested"
  fi
fi
build
if [[ "$mode" == clang ]]; then
  python3 tests/tools/tidy.py build/clang
  exit 0
fi
# One more than there are processors: many wait for disks, clocks and processes that they started.
exec ctest --preset "$preset" -j "$(($(nproc) + 1))" --output-junit tests.xml "$@"
