#!/usr/bin/env bash
# Makes the container image of ballastd, without a daemon and without a network, as an OCI archive.
# Usage: deploy/image/build.sh BIN OUT [NAME]
#   BIN   folder with ballastd and ballastctl, built on Debian 12: build/release/bin
#   OUT   folder for ballast.oci.tar
#   NAME  name and tag within the archive (default localhost/ballast:VERSION)
# Then: skopeo copy oci-archive:OUT/ballast.oci.tar docker://REGISTRY/ballast:TAG, or podman load --input OUT/ballast.oci.tar
set -euo pipefail
umask 022  # others read what is made here
here="$(cd "$(dirname "$0")" && pwd)"
bin="$(realpath "${1:?usage: deploy/image/build.sh BIN OUT [NAME]}")" out="$(realpath -m "${2:?usage: deploy/image/build.sh BIN OUT [NAME]}")"
version="$("$bin/ballastctl" --version | sed "s/.* //")"
name="${3:-localhost/ballast:$version}"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
rootfs="$work/context/rootfs"
mkdir -p "$out" "$work/context/state" "$rootfs"/{usr/bin,etc,tmp,proc,sys,dev}
install -m 755 "$bin/ballastd" "$bin/ballastctl" "$rootfs/usr/bin/"
strip "$rootfs"/usr/bin/*

# The loader and all libraries, each where the loader looks for it; with the licences of the packages that they come from.
ldd "$rootfs"/usr/bin/* | sed -n 's/^\t\(.* => \)\{0,1\}\(\/[^ ]*\) (0x.*/\2/p' | sort -u >"$work/libraries"
[[ -s "$work/libraries" ]] || { echo "image: ldd finds no libraries of $bin/ballastd" >&2; exit 1; }
while read -r library; do
  install -D -m 755 "$(realpath "$library")" "$rootfs$library"
  path="$(realpath "$library")"  # dpkg knows some libraries by /lib, as before /lib became a link to /usr/lib
  package="$(dpkg-query -S "$path" 2>/dev/null || dpkg-query -S "${path#/usr}")"
  package="${package%%:*}"
  install -D -m 644 "/usr/share/doc/$package/copyright" "$rootfs/usr/share/doc/$package/copyright"
done <"$work/libraries"
install -D -m 644 "$here/../../LICENSE" "$rootfs/usr/share/doc/ballast/LICENSE"
printf 'root:x:0:0:root:/:/sbin/nologin\nballast:x:65532:65532:ballast:/var/lib/ballast:/sbin/nologin\n' >"$rootfs/etc/passwd"
printf 'root:x:0:\nballast:x:65532:\n' >"$rootfs/etc/group"
printf 'hosts: files dns\n' >"$rootfs/etc/nsswitch.conf"
chmod 1777 "$rootfs/tmp"
chmod 700 "$work/context/state"

storage=(--storage-driver vfs --root "$work/storage" --runroot "$work/run")
# One time for every file, so that equal contents make an equal image.
buildah "${storage[@]}" build --isolation chroot --format oci --layers=false --timestamp "${SOURCE_DATE_EPOCH:-0}" \
  --label "org.opencontainers.image.version=$version" --tag "$name" --file "$here/Containerfile" "$work/context" >"$work/log" 2>&1 ||
  { cat "$work/log" >&2; exit 1; }
rm -f "$out/ballast.oci.tar"
buildah "${storage[@]}" push --quiet "$name" "oci-archive:$out/ballast.oci.tar:$name" >/dev/null
echo "image: $out/ballast.oci.tar, $(stat -c %s "$out/ballast.oci.tar") bytes, $(wc -l <"$work/libraries") libraries, named $name"
