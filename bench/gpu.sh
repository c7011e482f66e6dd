#!/bin/sh
# Run all that needs a GPU, in less than 8 minutes on one GPU: bench/gpu.sh [DIR]   (default bench/results)
#
# It runs the GPU tests and the three studies of python -m bench.gpu, and leaves a log and a table of each in DIR. A study
# that runs into its time limit leaves the rows that it has measured.
#
# PYTHON chooses the interpreter, RANKS the number of ranks. By default there is one rank for each GPU, or two ranks on a
# single GPU if NCCL lets them share it.
set -u
cd "$(dirname "$0")/.." || exit 1
dir=${1:-bench/results}
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
mpiexec=$(dirname "$(command -v "$python")")/mpiexec
[ -x "$mpiexec" ] || mpiexec=mpiexec
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1 NCCL_MULTI_RANK_GPU_ENABLE=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 1
if [ "$gpus" = 0 ]; then
    echo "bench/gpu.sh: torch finds no CUDA device here (no GPU, no driver, or a torch without CUDA); nothing was run" >&2
    exit 2
fi
shared=$("$python" -c '
from commengine.device.nccl import load_runtime
from commengine.device.choice import may_share
print(int(may_share(load_runtime())))') || exit 1
if [ "$gpus" -gt 1 ]; then most=$gpus; elif [ "$shared" = 1 ]; then most=2; else most=1; fi
ranks=${RANKS:-$most}
mkdir -p "$dir"
status=0

step() { # NAME SECONDS COMMAND...
    name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout "$limit" "$@" >"$dir/$name.log" 2>&1 || { status=1; echo "failed, see $dir/$name.log" >&2; }
    tail -n 20 "$dir/$name.log"
}

step gpu_tests 150 env RANKS="1 $ranks" "$python" tests/run -m "gpu and mpi" tests/commengine/device/test_gpu.py
step gpu_tests_serial 60 "$python" -m pytest -m "gpu and not mpi" tests
step gpu_overhead 90 "$python" -m bench.gpu overhead --ranks "$ranks" --rounds 7 --output "$dir/gpu_overhead.md" --json "$dir/gpu_overhead.json"
step gpu_overlap 60 "$mpiexec" -n "$ranks" "$python" -m bench.gpu overlap --output "$dir/gpu_overlap.md"
step gpu_flops 100 "$python" -m bench.gpu flops --output "$dir/gpu_flops.md"
exit $status
