#!/usr/bin/env bash
# Builds what a GPU needs of this tree (kernels, tiers, store, the backend for NCCL), runs every test and benchmark that needs one, and
# writes a table: build/gpu/RESULTS.md, and $OUT/RESULTS.md if OUT is set. Needs nvcc, g++ and cmake; no network, gRPC, protobuf, RocksDB.
#
#   tests/gpu/run.sh                builds and runs; what is skipped is said, with the reason. Training beside FSDP2 and DeepSpeed comes
#                                   last, needs the package ballast and torch, and takes at most 4 minutes
#   tests/gpu/run.sh --pack FILE    packs this machine's abseil, Highway, ISA-L, liburing, spdlog and GoogleTest into a tar file of some
#                                   MiB; another machine uses it as build/gpu-deps.tar (x86-64, glibc 2.36 or later)
#
# Exit code: 0 if all that could run passed, also where there is no GPU; 1 if something failed or could not be built.
set -u
cd "$(dirname "$0")/../.."
begin=$SECONDS

pack() {
  local lib=usr/lib/x86_64-linux-gnu
  local include=usr/include
  (cd / && tar -czf - $include/{absl,hwy,isa-l,isa-l.h,liburing,liburing.h,spdlog,fmt,gtest,gmock} $lib/libabsl_*.so* $lib/libhwy*.so* \
    $lib/libisal.so* $lib/liburing.so* $lib/libspdlog.so* $lib/libfmt.so* $lib/lib{gtest,gmock}*.a $lib/cmake/{absl,hwy,spdlog,fmt,GTest}) >"$1"
}
if [ "${1-}" = --pack ]; then
  pack "${2:?usage: tests/gpu/run.sh --pack FILE}" && ls -l "$2"
  exit
fi

build=build/gpu
results=$build/RESULTS.md
mkdir -p $build
if [ ! -d build/gpu-deps ] && [ -f build/gpu-deps.tar ]; then
  mkdir build/gpu-deps && tar -xf build/gpu-deps.tar -C build/gpu-deps
fi
deps=()
if [ -d build/gpu-deps ]; then
  libraries=$PWD/build/gpu-deps/usr/lib/x86_64-linux-gnu
  export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  deps=("-DCMAKE_PREFIX_PATH=$PWD/build/gpu-deps/usr" "-DCMAKE_LIBRARY_PATH=$libraries" "-DCMAKE_INCLUDE_PATH=$PWD/build/gpu-deps/usr/include")
  for package in absl hwy spdlog fmt GTest; do deps+=("-D${package}_DIR=$libraries/cmake/$package"); done
fi
if ! command -v nvcc >/dev/null && [ -x /usr/local/cuda/bin/nvcc ]; then export PATH=/usr/local/cuda/bin:$PATH; fi
[ -z "${CMAKE_GENERATOR-}" ] && command -v ninja >/dev/null && export CMAKE_GENERATOR=Ninja
# For this machine's GPU alone, which saves minutes; without one for all that a release serves.
gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | head -1)
compute=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)
[ -n "$compute" ] && deps+=("-DBALLAST_CUDA_ARCHITECTURES=$compute")

echo "== configuring"
if ! cmake -S tests/gpu -B $build -DCMAKE_BUILD_TYPE=Release -DBALLAST_CUDA=ON "${deps[@]}" >$build/configure.log 2>&1; then
  tail -30 $build/configure.log
  echo "FAILED: cmake did not configure tests/gpu. Where packages are missing: tests/gpu/run.sh --pack build/gpu-deps.tar on a machine that has them"
  exit 1
fi

failed=0
row() { printf '| %s | %s | %s |\n' "$@" >>$results; }
{
  echo "# GPU tests and benchmarks"
  echo
  echo "$(date -u +%F), ${gpu:-no GPU}, $(nvcc --version | sed -n 's/.*release \(.*\),.*/CUDA \1/p'), $(g++ --version | head -1), $(git rev-parse --short HEAD 2>/dev/null)"
  echo
  echo '| what | outcome | s |'
  echo '|---|---|---|'
} >$results

# Builds a target and runs it; its output stays in build/gpu/NAME.log.
run() {
  local name=$1 began=$SECONDS
  if ! cmake --build $build --target "$name" -j "$(nproc)" >"$build/$name.build.log" 2>&1; then
    grep -E 'error|undefined|No rule|unknown target' "$build/$name.build.log" | cut -c1-300 | head -5
    row "$name" "**not built**, see $name.build.log" $((SECONDS - began))
    echo "== $name: not built"
    failed=1
    return
  fi
  local built=$((SECONDS - began)) binary
  binary=$(find $build -type f -name "$name" -perm -u+x | head -1)
  began=$SECONDS
  timeout 200 "$binary" >"$build/$name.log" 2>&1
  local code=$?
  local outcome
  case $code in
    0) outcome="passed $(sed -n 's/^\[  PASSED  \] \([0-9]* tests\?\)\..*/(\1)/p' "$build/$name.log")" ;;
    77) outcome="skipped: $(sed -n 's/^SKIPPED: //p' "$build/$name.log" | head -1)" ;;
    *) outcome="**failed** ($code): $(grep -m3 -hE 'FAILED|Failure|rror' "$build/$name.log" | tr '\n|' '; ')" failed=1 ;;
  esac
  row "$name" "$outcome" "$((SECONDS - began)), built in $built"
  echo "== $name: $outcome (built in $built s, ran $((SECONDS - began)) s)"
}
skip() {
  row "$1" "skipped: $2" 0
  echo "== $1: skipped: $2"
}

# First what needs no GPU, on the double of CUDA's runtime; then what does.
for target in io_test hbm_tier_double_test hbm_store_double_test cuda_parity_test hbm_tier_test; do run $target; done
if grep -q 'NCCL TRUE' $build/configure.log; then
  run nccl_collective_test
else
  skip nccl_collective_test "no nccl.h and libnccl.so.2 in the system, NCCL_ROOT or python3's nvidia-nccl wheel"
fi
trains=no
if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  if python3 -c 'import ballast' 2>/dev/null; then
    trains=yes
    for file in tests/python/test_{gpu,gpu_shard,stash}.py; do
      echo "== $file"
      if timeout 300 python3 -m pytest -q "$file" >"$build/python.log" 2>&1; then
        row "$file" "$(tail -1 $build/python.log)" -
      else
        row "$file" "**failed**: $(tail -1 $build/python.log)" -
        failed=1
      fi
      cp $build/python.log "$build/$(basename "$file").log"
    done
  else
    skip tests/python/test_gpu.py "the package ballast is not installed, and building it needs gRPC, protobuf and RocksDB"
  fi
else
  skip tests/python/test_gpu.py "python3 has no torch that sees a GPU"
fi
# shard() against FSDP2 and DeepSpeed ZeRO-3, both with offload; after all that tells right from wrong. A goal that is not met is
# told and fails nothing; systems that trained differently fail.
peers() {
  local parameters=600000000 free code outcome log=$build/torch_shard.log began=$SECONDS
  free=$(awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo)
  if [ "$free" -lt 24 ]; then
    skip torch_shard.py "$free GiB of memory are free, and state of 200M parameters in three systems takes 24"
    return
  fi
  [ "$free" -lt 72 ] && parameters=200000000
  mkdir -p $build/peers
  timeout -k 10 240 python3 tests/bench/peers/torch_shard.py --device cuda --only dram --parameters $parameters --width 2048 --length 2048 \
    --rows 4 --rounds 2 --turn 2 --directory $build/peers --json $build/torch_shard.json >$log 2>&1
  code=$?
  outcome=$(grep -E '^(tokens|peak|gpu) of .* goal: ' $log | sed 's/, NOT MET/, **NOT MET**/' | tr '\n|' '; ')
  if [ $code = 124 ] || [ $code = 137 ]; then
    outcome="**failed**: took longer than 240 s, see torch_shard.log" failed=1
  elif [ $code != 0 ]; then
    outcome="**failed** ($code): $(tail -1 $log | tr '|' ' ')" failed=1
  elif [ -z "$outcome" ]; then
    outcome="skipped: $(grep -m1 '^skipped: ' $log | cut -c10- | tr '|' ' ')"
  fi
  row torch_shard.py "$outcome" $((SECONDS - began))
  echo "== torch_shard.py: $outcome"
  rm -rf $build/peers
}

run gpu_bench
if [ "$trains" = yes ]; then
  peers
else
  skip torch_shard.py "it needs ballast and a torch that sees a GPU, as the tests of Python above"
fi
if grep -q '^|' $build/gpu_bench.log 2>/dev/null; then
  { echo; echo '| what | how | | unit |'; echo '|---|---|---|---|'; grep '^|' $build/gpu_bench.log; } >>$results
fi
{ echo; echo "All of it took $((SECONDS - begin)) s on $(nproc) processors."; } >>$results
[ -n "${OUT-}" ] && cp $results "$OUT/"
echo
cat $results
exit $failed
