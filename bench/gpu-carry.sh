#!/bin/sh
# Gather in FOLDER what bench/gpu.sh needs on a machine without a network, on any machine that has a package index:
#
#   bench/gpu-carry.sh [OPTIONS] FOLDER
#
#   --python-version 3.12     the Python of the machine with the GPU
#   --platform TAG            a platform tag of its wheels; may be repeated (default: manylinux for x86-64, glibc 2.39
#                             and older)
#   --package NAME[==VERSION] a package to carry besides mpich, mpi4py, pytest-mpi and pydantic, with
#                             which checkpoints are read; may be repeated. torch, CuPy and the other packages of
#                             pyproject.toml are taken to be installed there
#   --nccl VERSION            an NCCL for several ranks on one GPU, 2.30 or newer, such as 2.30.7
#   --nccl-package NAME       its package (default: nvidia-nccl-cu13; with CUDA 12: nvidia-nccl-cu12)
#   --piece-mib 54            the size of the pieces that NCCL travels in
#   --dry-run                 without an index: the same commands on a tiny wheel and a tiny text
#
# FOLDER gets wheels/, corpus/tiny (a data set made from the documentation in Python's standard library) and, with
# --nccl, nccl/ (pieces with their SHA-256). Copy FOLDER to the other machine and name it with bench/gpu.sh --carry.
# PYTHON chooses the interpreter; it needs pip and this project's dependencies. The first failure ends the script.
set -eu
usage() { sed -n '2,/^set -eu/{/^# \{0,1\}/s///p;}' "$0" >&2; echo "bench/gpu-carry.sh: error: $1" >&2; exit 2; }

dry='' folder='' version=3.12 platforms='' packages='' nccl='' nccl_package=nvidia-nccl-cu13 piece=54
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry=1 ;;
    --python-version | --platform | --package | --nccl | --nccl-package | --piece-mib)
        [ $# -gt 1 ] || usage "$1 needs a value"
        case $1 in
        --python-version) version=$2 ;;
        --platform) platforms="$platforms --platform $2" ;;
        --package) packages="$packages $2" ;;
        --nccl) nccl=$2 ;;
        --nccl-package) nccl_package=$2 ;;
        --piece-mib) piece=$2 ;;
        esac
        shift ;;
    -*) usage "$1: there is no such option" ;;
    *) [ -z "$folder" ] || usage "$1: one argument too many"; folder=$1 ;;
    esac
    shift
done
[ -n "$folder" ] || usage "FOLDER is missing"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
if [ -z "$platforms" ]; then # pip matches these names exactly, and each package has its own
    minor=39
    while [ $minor -ge 5 ]; do
        platforms="$platforms --platform manylinux_2_${minor}_x86_64"
        minor=$((minor - 1))
    done
    for tag in manylinux2014 manylinux2010 manylinux1; do platforms="$platforms --platform ${tag}_x86_64"; done
fi

stand_in() { # NAME: a wheel of version 1.0 that has a command, a library and a libnccl.so.2, all of them texts
    plain=$(echo "$1" | tr - _) tree=$folder/index/$1
    info=$tree/$plain-1.0.dist-info data=$tree/$plain-1.0.data/data
    mkdir -p "$info" "$data/bin" "$data/lib" "$tree/${plain}_data/nccl/lib"
    echo '#!/bin/sh' >"$data/bin/$1"
    echo 'no library' | tee "$data/lib/lib$plain.so.1" >"$tree/${plain}_data/nccl/lib/libnccl.so.2"
    printf 'Metadata-Version: 2.1\nName: %s\nVersion: 1.0\n' "$1" >"$info/METADATA"
    printf 'Wheel-Version: 1.0\nGenerator: commengine\nRoot-Is-Purelib: true\nTag: py3-none-any\n' >"$info/WHEEL"
    : >"$info/RECORD"
    "$python" -m zipfile -c "$folder/index/$plain-1.0-py3-none-any.whl" "$tree"/*
}
source='' bytes=${piece}M text='--from-stdlib --train-bpe 512' names="mpich mpi4py pytest-mpi$packages"
if [ -n "$dry" ]; then
    rm -rf "$folder/index"
    names=commengine-carry-check nccl=1.0 nccl_package=commengine-carry-nccl bytes=512
    source="--no-index --find-links $folder/index" text='--input README.md --train-bpe 300'
    for name in $names $nccl_package; do stand_in $name; done
fi
download() { # FOLDER PACKAGE...
    rm -rf "$1"
    mkdir "$1"
    fetch --no-deps "$@"
}
fetch() { # [--no-deps] FOLDER PACKAGE...
    alone=''
    if [ "$1" = --no-deps ]; then alone=$1; shift; fi
    target=$1
    shift
    # shellcheck disable=SC2086  # lists of words
    "$python" -m pip --disable-pip-version-check download --quiet $alone --only-binary=:all: --implementation cp \
        --python-version "$version" $platforms $source --dest "$target" "$@"
}

# shellcheck disable=SC2086
download "$folder/wheels" $names
# With its own dependencies, because it wants one version of pydantic-core and no other.
[ -n "$dry" ] || fetch "$folder/wheels" pydantic
rm -rf "$folder/nccl"
if [ -n "$nccl" ]; then
    download "$folder/nccl-wheel" "$nccl_package==$nccl"
    mkdir "$folder/nccl"
    cd "$folder/nccl-wheel"
    sha256sum ./*.whl >"$folder/nccl/sha256"
    for wheel in *.whl; do split -b "$bytes" -d "$wheel" "$folder/nccl/$wheel."; done
    cd "$OLDPWD"
    rm -r "$folder/nccl-wheel"
fi
mkdir -p "$folder/corpus"
# shellcheck disable=SC2086
"$python" -m trainers.preprocess_data $text --workers 1 --output-prefix "$folder/corpus/tiny"
[ -z "$dry" ] || rm -r "$folder/index"
du -sh "$folder"/*
