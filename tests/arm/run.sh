#!/usr/bin/env bash
# The kernels on Arm, cross-compiled and run by qemu-user: their digests, and their exactness, on NEON and on SVE.
# Usage: tests/arm/run.sh [full]
#   full  also builds ballastd, ballastctl and the C++ trainer (some 20 minutes of two cores), and trains on an Arm server
# Exit code 77: skipped, because a program is missing.
set -euo pipefail
cd "$(dirname "$0")/../.."
mode="${1:-kernels}"
[[ "$mode" =~ ^(kernels|full)$ ]] || { echo "usage: tests/arm/run.sh [full], got '$mode'" >&2; exit 2; }
for program in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$program" >/dev/null || { echo "arm: SKIPPED, no $program; deploy/packages.sh test installs it"; exit 77; }
done

sysroot="$PWD/build/arm-sysroot"
tests/arm/sysroot.sh "$sysroot"
cmake --preset arm >build/arm-configure.log 2>&1 || { cat build/arm-configure.log >&2; exit 1; }
exact=(self_test_test squared_norm_test moment_formats_test)
cmake --build --preset arm -j "$(nproc)" --target "${exact[@]}" ieee_mode_test float_formats_test crc32c_test | tail -n 1

# CPU SETS TEST...: exactly these instruction sets of the kernels exist there, and these tests pass.
on() {
  local cpu="$1" sets="$2" emulated=(qemu-aarch64 -L "$sysroot" -cpu "$1") found test log="build/arm/$1.log"
  found=$("${emulated[@]}" build/arm/tests/kernels/self_test_test --gtest_list_tests | sed -n 's/.*GivesTheBitsOfTheRelease.\([A-Z0-9_]*\).*/\1/p' | xargs)
  [[ "$found" == "$sets" ]] || { echo "arm: on $cpu the kernels have '$found', expected '$sets'" >&2; return 1; }
  for test in "${@:3}"; do
    "${emulated[@]}" "build/arm/tests/kernels/$test" --gtest_brief=1 >"$log" 2>&1 || { cat "$log" >&2; return 1; }
  done
  echo "arm: passed on $cpu ($sets): ${*:3}"
}
running=()
on max,sve256=on 'SVE_256 NEON SCALAR' "${exact[@]}" ieee_mode_test & running+=($!)
on cortex-a72 'NEON SCALAR' "${exact[@]}" float_formats_test crc32c_test & running+=($!)  # ISA-L has a CRC of its own for Arm
on max,sve128=on 'SVE2_128 NEON SCALAR' "${exact[@]}" & running+=($!)
on max,sve512=on 'NEON SCALAR' self_test_test & running+=($!)  # vectors of a length that the kernels do not know
for pid in "${running[@]}"; do
  wait "$pid"
done
[[ "$mode" == full ]] || exit 0

cmake --build --preset arm -j "$(nproc)" --target ballastd ballastctl train_bytes_lm | tail -n 1
run="$PWD/build/arm/run"
rm -rf "$run" && mkdir -p "$run"
emulated=(qemu-aarch64 -L "$sysroot" -cpu max,sve256=on)
"${emulated[@]}" build/arm/bin/ballastctl doctor || echo "arm: the doctor's exit code is $?"
"${emulated[@]}" build/arm/bin/ballastd --listen 127.0.0.1:0 --metrics_listen 127.0.0.1:0 --data_directory "$run/state" \
  --budget.dram 64MiB --budget.nvme 512MiB >"$run/server.log" 2>&1 &
server=$!
trap 'kill "$server"; wait "$server" || true' EXIT
for _ in $(seq 600); do
  grep -q 'ballastd ready' "$run/server.log" && break
  kill -0 "$server" || { cat "$run/server.log" >&2; exit 1; }
  sleep 0.1
done
servers=$(sed -n 's/.*ballastd ready.* listen=\([^ ]*\).*/\1/p' "$run/server.log")
# NAME PROGRAM...: with that trainer, a job on the Arm server ends with the bits of the same training without a server. This
# machine's own trainer without a server runs this machine's kernels.
job() {
  local name="$1" program=("${@:2}") flags=(--steps 4 --layers 1 --width 64 --context 32 --chunk-elements 65536 --moments f8 --digest)
  "${program[@]}" "${flags[@]}" --job "$name" --servers "$servers" --timeout 600 >"$run/$name.log" 2>&1 || { cat "$run/$name.log" >&2; exit 1; }
  "${program[@]}" "${flags[@]}" --reference >"$run/$name-reference.log" 2>&1
  [[ "$(grep -i crc "$run/$name.log")" == "$(grep -i crc "$run/$name-reference.log")" ]] || { tail "$run/$name"*.log >&2; exit 1; }
  echo "arm: the job of the $name trainer has the bits of the same training without a server"
}
job arm "${emulated[@]}" build/arm/bin/train_bytes_lm
for native in build/{dev,release}/bin/train_bytes_lm; do
  [[ ! -x "$native" ]] || { job native "$native"; break; }
done
