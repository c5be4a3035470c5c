#!/usr/bin/env bash
# Builds Muster's images from a package (./dev package):
#   deploy/images/build.sh [--package DIR] [--base IMAGE] [--prefix NAME] [--tag TAG] [--engine podman|docker] [IMAGE...]
# IMAGE is coordinator, worker or worker-cuda (default: the first two). --package is the unpacked package (default:
# the newest of dist/), --prefix the name before -coordinator and the like (default: localhost/muster). Nothing is
# run in the image while it is built, so that no network is needed where the base image is.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
version=$(sed -n 's/^project(muster VERSION \([0-9.]*\).*/\1/p' "$root/CMakeLists.txt")
revision=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)
package= base=docker.io/library/debian:12-slim prefix=localhost/muster tag=$version engine=podman images=()
while [ $# -gt 0 ]; do
  case $1 in
    --package) package=$(realpath "$2"); shift ;;
    --base) base=$2; shift ;;
    --prefix) prefix=$2; shift ;;
    --tag) tag=$2; shift ;;
    --engine) engine=$2; shift ;;
    coordinator | worker | worker-cuda) images+=("$1") ;;
    *) sed -n '2,7s/^# \?//p' "$0" >&2; exit 2 ;;
  esac
  shift
done
[ ${#images[@]} -gt 0 ] || images=(coordinator worker)
for image in "${images[@]}"; do
  suffix=
  [ "$image" != worker-cuda ] || suffix=-cuda
  from=${package:-$root/dist/muster-$version-linux-x86_64$suffix}
  [ -x "$from/bin/muster" ] || { echo "build.sh: no package in $from; ./dev package makes one" >&2; exit 1; }
  context=$(mktemp -d)
  trap 'rm -rf "$context"' EXIT
  mkdir -p "$context"/{bin,lib,share}
  case $image in
    coordinator) programs=(muster muster-coordinator) file=coordinator ;;
    *) programs=(muster muster-worker muster-rank) file=worker; cp -r "$from/share/test" "$context/share/" ;;
  esac
  for program in "${programs[@]}"; do
    cp "$from/bin/$program" "$context/bin/"
    # What the loader finds in the package's own folder.
    ldd "$from/bin/$program" | awk -v lib="$from/lib/" '{ n = split($3, part, "/"); if ($2 == "=>") print part[n] }'
  done | sort -u | while read -r library; do
    [ ! -e "$from/lib/$library" ] || cp "$from/lib/$library" "$context/lib/"
  done
  cp "$from/LICENSE" "$context/"
  chmod -R a+rX "$context"
  find "$context" -exec touch -h -d @0 {} +
  format=()
  [ "$engine" != podman ] || format=(--format docker)  # OCI images have no health check
  "$engine" build -q "${format[@]}" --build-arg BASE="$base" --build-arg VERSION="$version" --build-arg REVISION="$revision" \
    -t "$prefix-$image:$tag" -f "$here/$file.Containerfile" "$context" >/dev/null
  rm -rf "$context"
  echo "$prefix-$image:$tag"
done
