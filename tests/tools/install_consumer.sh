#!/usr/bin/env bash
# Installs the build into a fresh prefix and builds and runs a consumer against it, as a user would.
# Usage: install_consumer.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
source_dir="$1" build_dir="$2"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cmake --install "$build_dir" --prefix "$work/prefix" >/dev/null
cmake -G Ninja -S "$source_dir/tests/install_consumer" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$work/build"
"$work/build/consumer"
"$work/build/kernels_consumer"
"$work/prefix/bin/ballastd" --help >/dev/null
"$work/prefix/bin/ballastctl" --help >/dev/null
