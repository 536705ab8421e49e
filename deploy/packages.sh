#!/usr/bin/env bash
# Installs what building and testing need from Debian 12's own packages; does nothing where all is there.
# Usage: deploy/packages.sh build|test|package|ops
#   package  to make Debian packages, the wheel and the image;  ops  for the operations tests (tests/run.sh ops)
set -euo pipefail
umask 022  # packages' own scripts make files that others read

build=(g++ cmake ninja-build pkg-config protobuf-compiler protobuf-compiler-grpc libgrpc++-dev libprotobuf-dev libabsl-dev
  libssl-dev liburing-dev librocksdb-dev prometheus-cpp-dev libcpp-httplib-dev libhwy-dev libisal-dev libgloo-dev libyaml-cpp-dev libcli11-dev
  libspdlog-dev libopenblas-dev)
test=(libgtest-dev libgmock-dev prometheus python3-venv python3-dev ccache dpkg-dev patch fio clang clang-format clang-tidy
  etcd-server etcd-client help2man zsh fish g++-aarch64-linux-gnu qemu-user)
package=(dpkg-dev file help2man ccache python3-venv python3-dev buildah skopeo)
ops=("${package[@]}" debootstrap systemd util-linux iproute2 e2fsprogs podman runc catatonit lintian
  slurmctld slurmd slurm-client munge prometheus prometheus-alertmanager chromium libatomic1 fonts-dejavu-core tmux curl
  etcd-server etcd-client)

case "${1:-build}" in
  build) wanted=("${build[@]}") ;;
  test) wanted=("${build[@]}" "${test[@]}") ;;
  package) wanted=("${build[@]}" "${package[@]}") ;;
  ops) wanted=("${build[@]}" "${ops[@]}") ;;
  *) echo "usage: deploy/packages.sh build|test|package|ops, got '$1'" >&2; exit 2 ;;
esac

missing=()
for package in "${wanted[@]}"; do
  [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)" == installed ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  echo "packages: all ${#wanted[@]} are installed"
  exit 0
fi

root=()
if ((EUID != 0)); then
  command -v sudo >/dev/null || { echo "packages: run as root, or install sudo: missing ${missing[*]}" >&2; exit 1; }
  root=(sudo)
fi
echo "packages: installing ${#missing[@]}, which takes minutes: ${missing[*]}"
progress=/dev/null
[[ ! -t 1 ]] || progress=/dev/stdout  # a person sees what is unpacked
"${root[@]}" apt-get update -qq
# prometheus is wanted for promtool alone, etcd, munge and slurm for tests that start their own: no service must start.
"${root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$progress"
