#!/usr/bin/env bash
# One host: a state server beside the trainers of one torchrun.
# Usage: deploy/examples/torchrun.sh DIR PROCESSES SCRIPT [ARGUMENT...]
#   DIR  where the server keeps state; the same command line again goes on from the last step
# The server's budgets: STATE_DRAM and STATE_NVME (default 4GiB and 32GiB). ballastd, ballastctl and torchrun are on the PATH.
set -euo pipefail
(($# >= 3)) || { echo "usage: torchrun.sh DIR PROCESSES SCRIPT [ARGUMENT...]" >&2; exit 2; }
data="$1" processes="$2"
shift 2

mkdir -p "$data"
log="$data.log"
: >"$log" # now: the line of an earlier server names a port that nobody listens on any more
ballastd --listen 127.0.0.1:0 --metrics_listen 127.0.0.1:0 --data_directory "$data" \
  --budget.dram "${STATE_DRAM:-4GiB}" --budget.nvme "${STATE_NVME:-32GiB}" >"$log" 2>&1 &
server=$!
stop() {
  kill "$server" 2>/dev/null || true
  wait "$server" || true
}
trap stop EXIT
trap 'exit 130' INT TERM

# A server that was killed replays its log first.
until grep -q '^ballastd ready' "$log"; do
  kill -0 "$server" 2>/dev/null || { cat "$log" >&2; exit 1; }
  sleep 0.1
done
BALLAST_SERVERS="$(sed -n 's/^ballastd ready listen=\([^ ]*\).*/\1/p' "$log")"
export BALLAST_SERVERS
echo "state server: $BALLAST_SERVERS; metrics: http://$(sed -n 's/^ballastd ready .*metrics=\([^ ]*\).*/\1/p' "$log")/metrics"
torchrun --nproc-per-node "$processes" "$@"
