#!/usr/bin/env bash
# The kernels on Arm, cross-compiled and run by qemu-user: their digests, and their exactness, on NEON and on SVE.
# Exit code 77: skipped, because a program is missing, or the path has a space.
set -euo pipefail
cd "$(dirname "$0")/../.."
for program in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$program" >/dev/null || { echo "arm: SKIPPED, no $program; deploy/packages.sh test installs it"; exit 77; }
done

# pkg-config puts the sysroot before each path, and quotes none.
[[ "$PWD" != *[[:space:]]* ]] || { echo "arm: SKIPPED, a path with a space ($PWD): pkg-config's sysroot may have none; use another clone"; exit 77; }
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
