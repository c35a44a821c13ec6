#!/bin/sh
# Build programs of Kubernetes from Debian's source package, once: tests/k8s/build.sh CACHE [PROGRAM ...]
#
# No package index has a ready kube-apiserver, but Debian 12 has the whole tree of Kubernetes 1.20.2 with
# its vendored dependencies. What is fetched comes from where this machine's own apt sources point, through
# apt and its signatures; apt's own state is left alone. Programs land in CACHE/bin, the tree stays in
# CACHE/src for the next one. A program that is there already costs nothing. About 5 minutes on one core.
set -eu

[ $# -ge 1 ] || { echo "usage: $0 CACHE [PROGRAM ...]" >&2; exit 2; }
mkdir -p "$1/bin"
cache=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- kube-apiserver
version='1.20.5+really1.20.2-1.1+deb12u1'
tree="$cache/src/kubernetes-1.20.2"
go=/usr/lib/go-1.19/bin

missing=
for program in "$@"; do
  [ -x "$cache/bin/$program" ] || missing="$missing $program"
done
[ -n "$missing" ] || exit 0

packages=
[ -x "$go/go" ] || packages="$packages golang-1.19-go"
for tool in rsync jq make gcc; do
  command -v "$tool" >/dev/null || packages="$packages $tool"
done
command -v dpkg-source >/dev/null || packages="$packages dpkg-dev"
if [ -n "$packages" ]; then
  echo "to build$missing, Debian packages are missing: apt-get install --no-install-recommends$packages" >&2
  exit 1
fi

if [ ! -d "$tree" ]; then
  apt="$cache/apt"
  rm -rf "$apt"
  mkdir -p "$apt/sources" "$apt/lists/partial" "$cache/src"
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [ ! -e "$file" ] || sed -n 's/^deb[[:space:]]/deb-src /p' "$file" >"$apt/sources/$(basename "$file" .list).list"
  done
  for file in /etc/apt/sources.list.d/*.sources; do
    [ ! -e "$file" ] || sed 's/^Types:.*/Types: deb-src/' "$file" >"$apt/sources/$(basename "$file")"
  done
  set_apt="-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$apt/sources -o Dir::State::lists=$apt/lists"
  echo "fetching the source of Kubernetes 1.20.2 (34 MB) ..." >&2
  # shellcheck disable=SC2086  # one word each
  apt-get $set_apt update -qq || true # another source of this machine may be away: the next step tells
  # shellcheck disable=SC2086
  (cd "$cache/src" && apt-get $set_apt -qq source --download-only "kubernetes=$version") || {
    echo "no source 'kubernetes' $version: this machine's apt sources must hold Debian 12 (bookworm) main" >&2
    exit 1
  }
  rm -rf "$cache/src/unpacking"
  mkdir "$cache/src/unpacking"
  tar xzf "$cache"/src/kubernetes_*.orig.tar.gz -C "$cache/src/unpacking"
  mkdir -p "$cache/src/unpacking/kubernetes-1.20.2/.go/src/k8s.io"
  ln -sfn ../../.. "$cache/src/unpacking/kubernetes-1.20.2/.go/src/k8s.io/kubernetes"
  mv "$cache/src/unpacking/kubernetes-1.20.2" "$tree"
  rmdir "$cache/src/unpacking"
fi

cat >"$cache/src/version" <<'END'
KUBE_GIT_COMMIT=debian
KUBE_GIT_TREE_STATE=clean
KUBE_GIT_VERSION=v1.20.2
KUBE_GIT_MAJOR=1
KUBE_GIT_MINOR=20
END

targets=
for program in $missing; do
  targets="$targets cmd/$program"
done
echo "building$missing (a few minutes) ..." >&2
cd "$tree"
GO111MODULE=off GOPROXY=off GOPATH="$tree/.go" GOCACHE="$cache/go-build" CGO_ENABLED=0 \
  GOMAXPROCS="${K8S_BUILD_JOBS:-1}" KUBE_GIT_VERSION_FILE="$cache/src/version" PATH="$go:$PATH" \
  nice -n 10 make WHAT="${targets# }" GOFLAGS="-p=${K8S_BUILD_JOBS:-1}" >&2
for program in $missing; do
  cp "_output/bin/$program" "$cache/bin/$program.new"
  mv "$cache/bin/$program.new" "$cache/bin/$program"
done
