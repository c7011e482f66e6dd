#!/bin/sh
# Install what bench/gpu-carry.sh gathered, without a network: bench/gpu.sh calls this.
#
#   bench/gpu-install.sh CARRY SITE
#
# The wheels of CARRY/wheels go into the folder SITE. Their own libraries, of which libmpi is one, go into SITE/lib,
# because pip --target leaves them out. The pieces of CARRY/nccl, if there are any, are joined, and the libnccl.so.2 of
# that wheel is SITE/nccl/libnccl.so.2. PYTHON chooses the interpreter, which needs pip. The first failure ends the
# script.
set -eu
carry=$1 site=$2
fail() { echo "error: $*" >&2; exit 1; }
set -- "$carry"/wheels/*.whl
[ -e "$1" ] || fail "$carry/wheels: holds no wheels; bench/gpu-carry.sh gathers them"
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
mkdir -p "$site/lib"
"$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$@"
for wheel in "$@"; do "$PYTHON" -m zipfile -e "$wheel" "$unpacked"; done
for library in "$unpacked"/*.data/data/lib/*; do
    [ ! -e "$library" ] || cp -R "$library" "$site/lib"
done
echo "installed: $(cd "$carry/wheels" && echo *)"

[ -d "$carry/nccl" ] || { echo "NCCL: none was carried"; exit 0; }
for first in "$carry"/nccl/*.whl.00; do [ -e "$first" ] || fail "$carry/nccl: its first piece is missing"; done
name=$(basename "$first" .00)
mkdir -p "$site/nccl" "$unpacked/nccl"
cd "$unpacked/nccl"
cat "$carry/nccl/$name".?? >"$name"
sha256sum -c --quiet "$carry/nccl/sha256" || fail "$carry/nccl: a piece of $name is missing or damaged"
"$PYTHON" -m zipfile -e "$name" .
find . -name libnccl.so.2 -exec cp {} "$site/nccl" \;
[ -e "$site/nccl/libnccl.so.2" ] || fail "$name: has no libnccl.so.2"
echo "NCCL: $site/nccl/libnccl.so.2"
