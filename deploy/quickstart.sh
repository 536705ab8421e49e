#!/usr/bin/env bash
# Installs, builds and runs the main job on this machine: two state servers, two trainers, a real model on real text. In
# mid-run a server is killed (kill -9) and started again, then a trainer. At last the same training in one process without
# any server, undisturbed, compared bit for bit.
#
# Usage: deploy/quickstart.sh [--steps N] [--dram SIZE] [--json FILE] [--text PATH]... [--keep] [-- FLAG...]
#   --steps N     optimizer steps (default 80)
#   --dram SIZE   DRAM budget of each server, such as 64MiB (default 17MiB: less than its share of the state)
#   --json FILE   also write the summary's figures
#   --text PATH   train on these files instead of the licence texts of Debian (may be repeated)
#   --no-kill     disturb nobody
#   --keep        leave the servers running at the end, to look at them
#   -- FLAG...    flags of train_bytes_lm for both runs, such as -- --optimizer lion --lr 3e-4 --moments i8
# Exit: 0 when the loss fell below the entropy of byte frequencies and the weights are bit-equal; 1 else.
set -euo pipefail

steps=80 dram_budget=17MiB json="" keep=0 kill=1 text=() training=()
while (($#)); do
  case "$1" in
    --steps) steps="${2:?--steps needs a number}"; shift 2 ;;
    --dram) dram_budget="${2:?--dram needs a size}"; shift 2 ;;
    --json) json="$(realpath -m "${2:?--json needs a file}")"; shift 2 ;;
    --text) text+=(--text "$(realpath "${2:?--text needs a path}")"); shift 2 ;;
    --no-kill) kill=0; shift ;;
    --keep) keep=1; shift ;;
    --) shift; training=("$@"); break ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    *) echo "quickstart: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done
cd "$(dirname "$0")/.."
began=$SECONDS
root="$PWD"
build="$root/build/release"
run="$root/build/quickstart"
bin="$build/bin"
pids=()

say() { printf '\n== %s\n' "$*"; }
fail() {
  printf 'quickstart: %s\n' "$*" >&2
  exit 1
}
stop_all() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  pids=()
}
trap stop_all EXIT
trap 'exit 130' INT TERM

# Waits for `pattern` in `file` while `pid` lives.
wait_for() {
  local pattern="$1" file="$2" pid="$3"
  for _ in $(seq 300); do
    grep -q "$pattern" "$file" 2>/dev/null && return 0
    kill -0 "$pid" 2>/dev/null || { cat "$file" >&2; fail "process $pid ended before it printed '$pattern'"; }
    sleep 0.1
  done
  fail "no '$pattern' in $file after 30 s"
}
# The number or word behind "key": in a JSON file.
field() { sed -n "s/.*\"$1\": *\"\{0,1\}\([^,\"}]*\).*/\1/p" "$2" | head -n 1; }
# Bytes of state in a tier, summed over the servers of status.json: the entries with a capacity are the servers' own.
state_in() {
  grep -o "\"tier\":\"$1\",\"capacity_bytes\":\"[1-9][0-9]*\",\"used_bytes\":\"[0-9]*\",\"state_bytes\":\"[0-9]*\"" \
    "$run/status.json" | sed 's/.*:"//;s/"//' | awk '{ sum += $1 } END { print sum + 0 }' || true
}

say "1/4 packages"
deploy/packages.sh build

say "2/4 build (release)"
mkdir -p build
cmake --preset release >build/release-configure.log 2>&1 || { cat build/release-configure.log >&2; fail "configuration failed"; }
cmake --build --preset release -j "$(nproc)" --target ballastd ballastctl train_bytes_lm

say "3/4 two state servers, two trainers, $steps steps"
rm -rf "$run"
mkdir -p "$run"
hbm_budget=0
command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU && grep -q 'CUDA TRUE' build/release-configure.log && hbm_budget=16MiB
servers=()
metrics=()
for i in 0 1; do
  cat >"$run/server$i.yaml" <<YAML
listen: 127.0.0.1:0
metrics_listen: 127.0.0.1:0
data_directory: $run/server$i
server_id: server$i
staging: 4MiB
budget:
  hbm: $hbm_budget
  dram: $dram_budget      # state that finds no room here lives in the NVMe tier
  nvme: 512MiB            # holds the gradient log and a durable copy of all state
YAML
done
# Starts server $1; a restarted one keeps its address, which its first start found.
start_server() {
  local i="$1"
  : >"$run/server$i.log"
  "$bin/ballastd" --config "$run/server$i.yaml" >>"$run/server$i.log" 2>&1 &
  pids[i]=$!
  wait_for 'ballastd ready' "$run/server$i.log" "${pids[$i]}"
}
for i in 0 1; do
  start_server "$i"
  ready="$(grep -h 'ballastd ready' "$run/server$i.log" | head -n 1)"
  servers+=("$(sed -n 's/.* listen=\([^ ]*\).*/\1/p' <<<"$ready")")
  metrics+=("$(sed -n 's/.* metrics=\([^ ]*\).*/\1/p' <<<"$ready")")
  echo "server$i: listens on ${servers[$i]}, metrics on http://${metrics[$i]}/metrics"
  sed -i "s/^listen: .*/listen: ${servers[$i]}/;s/^metrics_listen: .*/metrics_listen: ${metrics[$i]}/" "$run/server$i.yaml"
done
list="${servers[0]},${servers[1]}"

job=(--steps "$steps" --chunk-elements 65536 "${text[@]}" "${training[@]}")
trainer=("$bin/train_bytes_lm" "${job[@]}" --job quickstart --servers "$list" --world-size 2
  --rendezvous "$run/rendezvous" --resume auto)
# Starts both trainers, by the same command line whether the job is new or not. Figures go to $1.
start_trainers() {
  "${trainer[@]}" --rank 1 >"$run/trainer1.log" 2>&1 &
  pids[3]=$!
  "${trainer[@]}" --rank 0 --json "$1" --dump-master "$run/servers.master" &
  pids[2]=$!
}
# Waits until step $1 is decided, while trainer 0 lives.
wait_step() {
  local version=-1
  while ((version < $1)); do
    kill -0 "${pids[2]}" 2>/dev/null || fail "the trainers ended before step $1"
    version="$("$bin/ballastctl" status --json --servers "$list" 2>/dev/null | sed -n 's/.*"committed_min":\(-\{0,1\}[0-9]*\).*/\1/p')"
    version="${version:--1}"
    sleep 0.1
  done
}
trainers_end() {
  wait "${pids[2]}" || { tail -n 20 "$run/trainer1.log" >&2; fail "trainer 0 failed; its peer's last lines are above"; }
  wait "${pids[3]}" || { tail -n 20 "$run/trainer1.log" >&2; fail "trainer 1 failed"; }
}

restarts=0
rm -f "$run/before.json"
start_trainers "$run/trainer.json"
if ((kill)); then
  wait_step $((steps / 4))
  echo "-- kill -9 of server1; the trainers wait for it"
  kill -9 "${pids[1]}"
  wait "${pids[1]}" 2>/dev/null || true
  start_server 1
  grep 'recovered step' "$run/server1.log" | sed 's/.*\] job/   server1: job/' || fail "server1 recovered no job; see $run/server1.log"
  restarts=$((restarts + 1))
  wait_step $((steps / 2))
  echo "-- kill -9 of trainer 1; the group exits and is started again with the same command line"
  kill -9 "${pids[3]}"
  wait "${pids[3]}" 2>/dev/null || true
  wait "${pids[2]}" && fail "trainer 0 did not notice that trainer 1 was killed"
  restarts=$((restarts + 1))
  mv "$run/trainer.json" "$run/before.json"
  start_trainers "$run/trainer.json"
fi
trainers_end
"$bin/ballastctl" status --servers "$list"
"$bin/ballastctl" status --json --servers "$list" >"$run/status.json"

say "4/4 the same training in one process, without servers"
"$bin/train_bytes_lm" "${job[@]}" --reference --threads 2 --json "$run/reference.json" --dump-master "$run/reference.master"
bit_equal=false
cmp -s "$run/servers.master" "$run/reference.master" && bit_equal=true

before="$run/before.json"
[[ -f "$before" ]] || before="$run/trainer.json"
loss_first="$(field loss_first "$before")"
loss_last="$(field loss_last "$run/trainer.json")"
entropy="$(field unigram_entropy "$run/trainer.json")"
hbm="$(state_in hbm)" dram="$(state_in dram)" nvme="$(state_in nvme)"
seconds=$((SECONDS - began))
learned=false
awk -v a="$loss_last" -v b="$entropy" 'BEGIN { exit !(a < b) }' && learned=true

if [[ -n "$json" ]]; then
  printf '{"loss_first": %s, "loss_last": %s, "unigram_entropy": %s, "bytes": {"hbm": %s, "dram": %s, "nvme": %s}, "bit_equal": %s, "restarts": %s, "seconds": %s, "steps": %s}\n' \
    "$loss_first" "$loss_last" "$entropy" "$hbm" "$dram" "$nvme" "$bit_equal" "$restarts" "$seconds" "$steps" >"$json"
fi

mib() { awk -v b="$1" 'BEGIN { printf "%.1f MiB", b / 1048576 }'; }
say "Try next"
if ((keep)); then
  echo "  $bin/ballastctl status --servers $list        the servers still run; end them with: kill ${pids[*]}"
  pids=()
else
  echo "  deploy/quickstart.sh --keep            leave the servers running, to look at them with ballastctl and at their /metrics"
fi
cat <<TXT
  deploy/quickstart.sh --dram 64MiB      give the servers more memory and see the NVMe tier empty
  deploy/quickstart.sh --text FILE       train on your own text
TXT
say "What happened"
echo "State      $(mib "$dram") in DRAM, $(mib "$nvme") in NVMe files, $(mib "$hbm") in HBM, over two servers"
printf "Loss       %.4f -> %.4f nats per byte in %s steps; byte frequencies alone give %.4f\n" "$loss_first" "$loss_last" "$steps" "$entropy"
if [[ $bit_equal == true ]]; then
  echo "Bits       the final master weights equal those of the run without servers, bit for bit"
else
  echo "Bits       DIFFERENT: compare $run/servers.master and $run/reference.master"
fi
[[ $learned == true ]] || echo "Loss       NOT below the entropy of byte frequencies: more --steps, or another --text"
printf "Time       %d s in all\n" "$seconds"
((restarts == 0)) || echo "Restarts   $restarts: a server and a trainer were killed with -9 in mid-run, and started again"
[[ $bit_equal == true && $learned == true ]]
