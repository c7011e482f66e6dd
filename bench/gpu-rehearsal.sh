#!/bin/sh
# Rehearse bench/gpu-carry.sh and bench/gpu.sh with the real wheels, on a machine with a package index and without a GPU:
#
#   bench/gpu-rehearsal.sh [OPTIONS] FOLDER
#
#   --python PATH     the Python of the GPU machine's version (default: python3.12, or python3 if there is none)
#   --torch VERSION   the torch of the GPU machine (default: 2.11.0, which is built for CUDA 13)
#   --cupy NAME==V    its CuPy (default: cupy-cuda13x==14.2.0)
#   --nccl VERSION    the NCCL to carry (default: 2.30.7)
#   --jobs 'JOB...'   the dry runs (default: 'live right fast')
#   --only STAGES     the stages of the dry runs, as for bench/gpu.sh (default: all)
#
# FOLDER gets environment/ (a Python with the packages that a GPU machine has, torch for CUDA and CuPy: 6 GB), carry/
# and out/. What is there already is kept, so a call goes on where the last one stopped. The steps: CuPy and torch load
# one NCCL without a driver; each job installs what it carries and ends at the first line that needs a GPU; each job's
# dry run. The exit status is 0 if each ended as it must. PYTHON runs bench/gpu-carry.sh.
set -u
usage() { sed -n '2,/^set -u/{/^# \{0,1\}/s///p;}' "$0" >&2; echo "bench/gpu-rehearsal.sh: error: $1" >&2; exit 2; }

folder='' python='' torch=2.11.0 cupy=cupy-cuda13x==14.2.0 nccl=2.30.7 jobs='live right fast' only=''
while [ $# -gt 0 ]; do
    case $1 in
    --python | --torch | --cupy | --nccl | --jobs | --only)
        [ $# -gt 1 ] || usage "$1 needs a value"
        case $1 in
        --python) python=$2 ;;
        --torch) torch=$2 ;;
        --cupy) cupy=$2 ;;
        --nccl) nccl=$2 ;;
        --jobs) jobs=$2 ;;
        --only) only=$2 ;;
        esac
        shift ;;
    -*) usage "$1: there is no such option" ;;
    *) [ -z "$folder" ] || usage "$1: one argument too many"; folder=$1 ;;
    esac
    shift
done
[ -n "$folder" ] || usage "FOLDER is missing"
for job in $jobs; do case $job in live | right | fast) ;; *) usage "--jobs $job: must be live, right or fast" ;; esac; done
if [ -z "$python" ]; then # pyenv has names of Pythons that do not run
    python=python3
    ! python3.12 -c '' 2>/dev/null || python=python3.12
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || usage "--python $python: does not run"
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
there=$folder/environment/bin/python out=$folder/out status=0

step() { # NAME COMMAND...: one line of what came out of it
    name=$1 began=$(date +%s)
    shift
    if "$@" >"$folder/$name.log" 2>&1; then
        echo "ok        $name ($(($(date +%s) - began)) s)"
        return 0
    fi
    echo "FAILED    $name ($(($(date +%s) - began)) s); the end of $folder/$name.log:"
    tail -n 15 "$folder/$name.log" | sed 's/^/    /'
    status=1
    return 1
}
install() { # the packages of pyproject.toml that bench/gpu-carry.sh does not carry
    "$python" -m venv "$folder/environment" &&
        "$there" -m pip --disable-pip-version-check install --quiet "torch==$torch" "$cupy" numpy safetensors PyYAML \
            tokenizers tqdm xxhash matplotlib pytest pytest-timeout hypothesis &&
        touch "$folder/environment/whole"
}
carry() { bench/gpu-carry.sh --python-version "$version" --nccl "$nccl" "$folder/carry" && touch "$folder/carry/whole"; }
one_nccl() {
    "$there" - <<'EOF'
import cupy, torch
from cupy.cuda import nccl
from commengine.device.choice import loaded_nccl
assert nccl.available and len(loaded_nccl()) == 1, loaded_nccl()
assert hasattr(torch._C, "_cuda_getCurrentRawStream"), "torch is built without CUDA"
assert not torch.cuda.is_available(), "this machine has a GPU: run bench/gpu.sh itself"
print("torch", torch.__version__, "CuPy", cupy.__version__, "NCCL", nccl.get_version(), *loaded_nccl())
EOF
}
first_line() { # of JOB that needs a GPU
    bench/gpu.sh --carry "$folder/carry" "$1" "$out/no-gpu"
    [ $? = 2 ] && grep -q "^ok        $1 carried" "$out/no-gpu/summary.txt"
}

[ -e "$folder/environment/whole" ] || step environment install || exit 1
[ -e "$folder/carry/whole" ] || step carry carry || exit 1
rm -rf "$out"
mkdir "$out" "$out/no-gpu"
export PYTHON="$there" PYTHONPATH="$PWD"
step one_nccl one_nccl
for job in $jobs; do step "first_line_of_$job" first_line "$job"; done
for job in $jobs; do step "dry_run_of_$job" bench/gpu.sh --dry-run ${only:+--only "$only"} --carry "$folder/carry" \
    "$job" "$out/$job"; done
echo "rehearsal: $([ $status = 0 ] && echo "all ended as they must" || echo "NOT all ended as they must"), Python $version"
exit $status
