#!/usr/bin/env bash
# Unpacks Debian's arm64 packages of what the build links into a folder, for a cross-compiler. The machine's own packages stay as they
# are: no foreign architecture is added, and no package's script runs.
# Usage: tests/arm/sysroot.sh DIR
set -euo pipefail
umask 022
root=$(realpath -m "${1:?usage: tests/arm/sysroot.sh DIR}")

packages=(libc6-dev linux-libc-dev libgrpc++-dev libprotobuf-dev libabsl-dev libssl-dev liburing-dev librocksdb-dev prometheus-cpp-dev
  libcpp-httplib-dev libhwy-dev libisal-dev libgloo-dev libyaml-cpp-dev libcli11-dev libspdlog-dev libopenblas-dev libgtest-dev libgmock-dev)
[[ "$(cat "$root/packages" 2>/dev/null)" != "${packages[*]}" ]] || exit 0

# An apt of its own, which knows arm64 alone and takes nothing for installed.
apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$apt"/{state/lists/partial,cache/archives/partial}
: >"$apt/status"
cat >"$apt/conf" <<END
APT::Architecture "arm64";
#clear APT::Architectures;
APT::Architectures { "arm64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "$(id -un)";
Dir::State "$apt/state";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
END
export APT_CONFIG="$apt/conf"
apt-get update -qq
apt-get install -qq -y --download-only "${packages[@]}" >"$apt/log" 2>&1 || { cat "$apt/log" >&2; exit 1; }

rm -rf "$root"
mkdir -p "$root"/usr/{bin,sbin,lib}
for folder in bin sbin lib; do
  ln -s "usr/$folder" "$root/$folder"
done
for package in "$apt"/cache/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x -C "$root" --keep-directory-symlink --no-same-owner --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*'
done
# What update-alternatives would choose.
libraries="$root/usr/lib/aarch64-linux-gnu"
ln -s openblas-pthread/libopenblas.so openblas-pthread/libopenblas.so.0 "$libraries"
ln -s ../../openblas-pthread/cmake/openblas/OpenBLASConfig{,Version}.cmake "$libraries/cmake/openblas"
# gRPC's CMake package wants its plugins, which run on this machine.
for plugin in /usr/bin/grpc_*_plugin; do
  ln -s "$plugin" "$root/usr/bin"
done
# Most CMake packages find their files beside themselves; these two name places on the machine.
sed -i -E "s|([ \"(])/usr\b|\\1$root/usr|g" "$libraries"/cmake/Snappy/SnappyTargets*.cmake "$libraries"/openblas-pthread/cmake/openblas/OpenBLASConfig.cmake
# Links to places on the whole machine.
find "$libraries" -lname '/*' -print0 | while IFS= read -r -d '' link; do
  ln -sfr "$root$(readlink "$link")" "$link"
done
echo "${packages[*]}" >"$root/packages"
