#!/bin/sh
# Run what needs a GPU, as three batch jobs of at most 8 minutes each, on one GPU or more, without a network:
#
#   bench/gpu.sh [OPTIONS] live DIR     does it start: the machine, MPI, CuPy's binding, the tests that need a GPU
#   bench/gpu.sh [OPTIONS] right DIR    is training right: 20 losses of runs that must agree, and a verdict
#   bench/gpu.sh [OPTIONS] fast DIR     is it fast: microseconds a call, FLOP/s, overlap, a profile of one step
#
#   --carry FOLDER   install what bench/gpu-carry.sh gathered in FOLDER, and train on its corpus
#   --only STAGES    run these stages only, such as --only cpu,cuda,losses
#   --dry-run        without a GPU: run each stage's command at its smallest size on the CPU or on the tests'
#                    stand-ins, and only print what needs a GPU
#
# Each stage has a limit of its own, and a failed stage does not stop the next one. Every stage appends its result to
# DIR/summary.txt. Logs, tables and losses are in DIR/gpu-JOB.tar.gz, which is written anew after each stage. The exit
# status is 1 if a stage failed. `live` comes first: it leaves in DIR/settings how NCCL starts on this machine.
#
# PYTHON chooses the interpreter, RANKS the number of ranks of `fast` (default: one for each GPU), JOB_SECONDS the time
# of the job (480).
set -u
started=$(date +%s)
usage() { sed -n '2,/^set -u/{/^# \{0,1\}/s///p;}' "$0" >&2; echo "bench/gpu.sh: error: $1" >&2; exit 2; }

dry='' carry='' only='' job='' out=''
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry=1 ;;
    --carry | --only)
        [ $# -gt 1 ] || usage "$1 needs a value"
        if [ "$1" = --carry ]; then carry=$2; else only=$2; fi
        shift ;;
    -*) usage "$1: there is no such option" ;;
    *) if [ -z "$job" ]; then job=$1; elif [ -z "$out" ]; then out=$1; else usage "$1: one argument too many"; fi ;;
    esac
    shift
done
case $job in live | right | fast) ;; *) usage "JOB '$job': must be live, right or fast" ;; esac
[ -n "$out" ] || usage "DIR is missing"
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
if [ -n "$carry" ]; then carry=$(cd "$carry" && pwd) || exit 2; fi
cd "$(dirname "$0")/.." || exit 2

python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
python=$(command -v "$python")
case $python in /*) ;; *) python=$PWD/$python ;; esac # the stages' own PATH must not change it
work=$(mktemp -d) || exit 2
mkdir "$work/results" "$work/results/runs"
status=0 ran='' known=''
pack() { # everything but checkpoints
    tar -C "$work" --exclude='iter_*' -czf "$out/.gpu-$job.part" results && mv "$out/.gpu-$job.part" "$out/gpu-$job.tar.gz"
}
trap 'pack; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# The carried packages and libraries come first, then this repository, then what the caller had.
site=$work/site
export PATH="$site/bin:$(dirname "$python"):$PATH"
export LD_LIBRARY_PATH="$site/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PYTHONPATH="$PWD/bench/gpu_study/every_rank:$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
# A stage that is stopped leaves torn files in a compiler's cache, which every later job would read.
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR="$work/inductor"
if [ -z "${NCCL_DEBUG:-}" ] && [ "$job" != fast ]; then
    export NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$work/results/nccl.%h.%p.log"
fi
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

say() { echo "$*" | tee -a "$out/summary.txt"; }
wanted() { # whether --only names this stage, or names none
    known="$known $1"
    case ",$only,carried," in ,,carried, | *",$1,"*) return 0 ;; *) return 1 ;; esac
}

trial='' # not empty: a stage that fails leaves the job's status as it is, because another way is tried next
stage() { # NAME SECONDS COMMAND...: run it under its own limit
    ended=''
    wanted "$1" || return 0
    name=$1 limit=$2 log=$work/results/$1.log
    shift 2
    began=$(date +%s)
    left=$((${JOB_SECONDS:-480} - 15 - (began - started))) # -k 10 and the archive take their time, too
    if [ "$left" -lt 5 ]; then
        say "not run   $job $name: no time is left"
        status=1
        return 0
    fi
    [ "$limit" -le "$left" ] || limit=$left
    # Ranks run in sessions of their own. tests/run, the contests and mpiexec end theirs when they are interrupted.
    # Whatever is left then has this stage's mark in its environment.
    mark=$$-$job-$name
    { echo "\$ $*"; env "BENCH_GPU_STAGE=$mark" "BENCH_GPU_LIMIT=$limit" timeout -s INT -k 10 "$limit" "$@"; } </dev/null >"$log" 2>&1
    ended=$?
    leftover=$(grep -lzx "BENCH_GPU_STAGE=$mark" /proc/[0-9]*/environ 2>/dev/null | tr -dc '0-9\n')
    # shellcheck disable=SC2086  # one word for each process
    [ -z "$leftover" ] || kill -KILL $leftover 2>/dev/null
    took="$(($(date +%s) - began)) s of $limit"
    case $ended in
    0) say "ok        $job $name ($took)"; ran="$ran $name" ;;
    124 | 137) say "TIMED OUT $job $name ($took)" ;;
    *) say "FAILED    $job $name, status $ended ($took)" ;;
    esac
    [ "$ended" = 0 ] || [ -n "$trial" ] || status=1
    tr '\r' '\n' <"$log" | tail -n 25 | sed 's/^/    /' | tee -a "$out/summary.txt"
    pack
}
on_gpu() { # NAME SECONDS COMMAND...: a stage that nothing can stand in for
    if [ -z "$dry" ]; then stage "$@"; return; fi
    wanted "$1" || return 0
    name=$1
    shift 2
    say "needs a GPU: $job $name: $*"
}
left_out() { # NAME REASON
    wanted "$1" || return 0
    say "left out  $job $1: $2"
}

say "== bench/gpu.sh $job, $(date -u +%Y-%m-%dT%H:%M:%SZ)${dry:+, a dry run}"
nccl=''
if [ -n "$carry" ]; then
    stage carried 90 env "PYTHON=$python" bench/gpu-install.sh "$carry" "$site"
    [ ! -e "$site/nccl/libnccl.so.2" ] || nccl=$site/nccl/libnccl.so.2
    if [ -z "$dry" ] && [ -d "$carry/nccl" ] && [ -z "$nccl" ]; then say "FAILED    the carried NCCL"; status=1; fi
fi
mpiexec=$(command -v mpiexec) || { say "FAILED    $job: no mpiexec on PATH; carry the mpich wheel"; exit 1; }

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)') || exit 2
if [ "$gpus" = 0 ] && [ -z "$dry" ]; then
    echo "bench/gpu.sh: torch finds no CUDA device here (no GPU, no driver, or a torch without CUDA); nothing was run" >&2
    exit 2
fi
if [ -n "$dry" ]; then
    export CUDA_VISIBLE_DEVICES=''
    tiny=--tiny device=cpu steps=2 half=1 rounds=2 overlap_rounds=2 megabytes=1
    shape='--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16'
else
    tiny='' device=cuda steps=20 half=10 rounds=7 overlap_rounds=15 megabytes=40
    shape='--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128'
fi
raw="tests/jobs/raw_nccl.py ${dry:+--on-host --elements 100}"
settings=$out/settings
[ -z "$dry" ] || settings=$work/settings
if [ -s "$settings" ]; then # NAME=VALUE lines of an earlier job
    say "settings of an earlier job: $(tr '\n' ' ' <"$settings")"
    set -a
    . "$settings"
    set +a
fi
why="two ranks on one GPU can use NCCL neither as two hosts nor by a carried NCCL 2.30 (bench/gpu-carry.sh --nccl)"
two_ranks='' # how two ranks talk by NCCL; empty: they cannot
# shellcheck disable=SC2086
find_two_ranks() {
    if [ "$gpus" -gt 1 ]; then
        two_ranks=NCCL_MULTI_RANK_GPU_ENABLE=0
        stage raw_nccl_2 60 "$mpiexec" -n 2 "$python" $raw
        [ "$gpus" = 2 ] || stage raw_nccl_all 60 "$mpiexec" -n "$gpus" "$python" $raw
        return
    fi
    # NCCL refuses two ranks on one GPU of one host. With a host's name of its own each they are two hosts to it.
    two_ranks="BENCH_GPU_OWN_HOSTS=1 NCCL_MNNVL_ENABLE=0 NCCL_SOCKET_IFNAME=lo NCCL_MAX_CTAS=4"
    trial=yes
    stage raw_nccl_2 45 env $two_ranks "$mpiexec" -n 2 "$python" $raw
    trial=''
    [ "${ended:-0}" != 0 ] || return 0
    two_ranks=''
    [ -n "$nccl" ] || return 0
    # NCCL 2.30 allows it if told so. NVLink's multicast is not for them, and few blocks must do.
    two_ranks="NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4 LD_PRELOAD=$nccl"
    stage raw_nccl_2_shared 60 env $two_ranks "$mpiexec" -n 2 "$python" $raw
    [ "${ended:-0}" = 0 ] || two_ranks=''
}

# shellcheck disable=SC2086  # the lists of words above are split on purpose
live() {
    stage machine 40 "$python" -m bench.gpu machine $tiny --output "$work/results/machine.md"
    on_gpu nvlink 20 nvidia-smi topo -m
    stage hello 40 "$mpiexec" -n 2 "$python" -m mpi4py.bench helloworld
    stage raw_nccl 60 "$mpiexec" -n 1 "$python" $raw
    if [ "${ended:-0}" != 0 ]; then # NCCL's own memory may fail in a virtual machine
        stage raw_nccl_no_cumem 60 env NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0 "$mpiexec" -n 1 "$python" $raw
        if [ "$ended" = 0 ]; then
            printf '%s\n' NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0 >"$settings"
            export NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0
            say "NCCL starts only without cuMem: all later stages and jobs have NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0"
        fi
    fi
    if [ -n "$dry" ]; then # the tests of the stand-ins run beside those that are skipped without a GPU
        also=tests/commengine/device/test_backends.py some='staged_tensors'
    else
        also='' some=''
    fi
    # --long: every case on this number of ranks, and no budget of seconds; make test draws some.
    stage binding 60 env RANKS=0 "$python" tests/run --long -n0 ${dry:+-k reads_the_version} \
        tests/commengine/device/test_nccl_binding.py ${dry:+tests/bench/command/test_machine.py}
    stage gpu_tests 120 env RANKS=1 "$python" tests/run --long -m "${dry:+mpi or }gpu and mpi" ${some:+-k "$some"} \
        tests/commengine/device/test_gpu.py $also
    stage gpu_serial 100 env RANKS=0 "$python" tests/run --long -n0 -m "${dry:+not }gpu" ${dry:+-k hash_in_python} \
        tests/trainers/training/test_clipping.py tests/tplayers/test_rng_dropout.py \
        tests/tplayers/context/test_kernels.py
    stage staged_tests 90 env RANKS=2 "$python" tests/run --long -m "${dry:+mpi or }gpu and mpi" -k "staged${some:+ or $some}" \
        tests/commengine/device/test_gpu.py $also
    find_two_ranks
    if [ -z "$two_ranks" ]; then
        for name in gpu_tests_2 gpu_experts gpu_tests_serial; do left_out $name "$why"; done
        compile_tests
        return
    fi
    stage gpu_tests_2 120 env $two_ranks RANKS=2 "$python" tests/run --long -m "${dry:+mpi or }gpu and mpi" \
        ${some:+-k "$some"} tests/commengine/device/test_gpu.py $also
    stage gpu_experts 60 env $two_ranks RANKS="1 2" "$python" tests/run --long -m "${dry:+mpi or }gpu and mpi" \
        ${some:+-k "$some"} tests/tplayers/experts/test_moe_device.py $also
    [ "$gpus" -lt 4 ] || stage gpu_tests_4 120 env RANKS=4 "$python" tests/run --long -m "gpu and mpi" \
        tests/commengine/device/test_gpu.py
    stage gpu_tests_serial 125 env $two_ranks RANKS=0 "$python" tests/run --long -n0 -m "${dry:+not gpu or }gpu" \
        ${dry:+-k reads_the_version} tests/commengine/device/test_gpu_timeout.py ${dry:+tests/bench/command/test_machine.py}
    compile_tests
}
# Last, because Inductor takes longest; three kinds of model, because 32 compilations take minutes. A run that is killed
# has named what failed before.
compile_tests() {
    stage compile_tests 240 env RANKS="$((1 + ${dry:-0}))" "$python" tests/run --long -v --tb=short --maxfail=5 \
        -m "mpi and ${dry:+not slow and not }gpu" -k "not post" tests/tplayers/models/test_compile_alone.py
}

# shellcheck disable=SC2086
train() { # NAME RANKS SECONDS OPTIONS...
    name=$1 ranks=$2 seconds=$3
    shift 3
    stage "$name" "$seconds" env ${with:-} "$mpiexec" -n "$ranks" "$python" -m trainers.pretrain_gpt $shape "$@" \
        --train-iters $steps --global-batch-size 8 --micro-batch-size 4 --lr 1e-3 --lr-warmup-iters 5 \
        --log-interval 1 --eval-iters 0 --sample-tokens 0 --distributed-timeout-minutes 1 \
        --save "$work/results/runs/$name" $data
}
# shellcheck disable=SC2086
right() {
    data='--mock-data --vocab-size 512' with='' without=''
    if [ -n "$carry" ]; then # by a name without spaces
        ln -s "$carry/corpus" "$work/corpus"
        data="--data-path $work/corpus/tiny"
    fi
    staged="--device $device --device-transport staged"
    train cuda 1 60 --device $device --save-interval $half
    train tp2_staged 2 60 $staged --tensor-model-parallel-size 2
    train dp2_staged 2 60 $staged
    train zero1_staged 2 60 $staged --use-distributed-optimizer
    train overlap_staged 2 60 $staged --overlap-grad-reduce --ddp-bucket-size 100000
    train pp2_staged 2 60 $staged --pipeline-model-parallel-size 2
    train cp2_staged 2 60 $staged --context-parallel-size 2 --cp-comm-type p2p
    moe='--disable-bias-linear --num-experts 8 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001'
    train moe 1 60 --device $device $moe
    train moe_tp2_staged 2 60 $staged $moe --tensor-model-parallel-size 2 --sequence-parallel
    train moe_ep2_staged 2 60 $staged $moe --expert-model-parallel-size 2 --use-distributed-optimizer
    train bf16 1 60 --device $device --bf16
    find_two_ranks
    if [ -n "$two_ranks" ]; then
        with=$two_ranks cp2='--context-parallel-size 2 --cp-comm-type'
        train tp2_nccl 2 60 --device $device --tensor-model-parallel-size 2
        train dp2_nccl 2 60 --device $device
        train pp2_nccl 2 60 --device $device --pipeline-model-parallel-size 2
        train pp2_interleaved_nccl 2 60 --device $device --pipeline-model-parallel-size 2 \
            --num-layers-per-virtual-pipeline-stage 1
        train cp2_a2a_nccl 2 60 --device $device $cp2 a2a
        train cp2_ring_nccl 2 60 --device $device $cp2 p2p
        train cp2_gather_nccl 2 60 --device $device $cp2 all_gather
        train cp2_ring_bf16 2 60 --device $device $cp2 p2p --bf16
        train moe_ep2_nccl 2 60 --device $device $moe --expert-model-parallel-size 2
        with=''
    else
        for name in tp2_nccl dp2_nccl pp2_nccl pp2_interleaved_nccl cp2_a2a_nccl cp2_ring_nccl cp2_gather_nccl \
            cp2_ring_bf16 moe_ep2_nccl; do
            left_out $name "$why"
        done
    fi
    train cpu 1 90 --device cpu
    train moe_cpu 1 90 --device cpu $moe
    train resumed 1 90 --device cpu --load "$work/results/runs/cuda/$(printf 'iter_%07d' $half)"
    if command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null; then
        train compiled 1 240 --device $device --bf16 --compile
    else
        left_out compiled "torch.compile needs a C++ compiler"
        without='--without compiled'
    fi
    stage losses 40 "$python" -m bench.gpu losses --runs "$work/results/runs" $without --output "$work/results/losses.md" \
        --json "$work/results/losses.json"
}

# shellcheck disable=SC2086
fast() {
    ranks=${RANKS:-$gpus}
    [ "$ranks" != 0 ] || ranks=1
    r=$work/results
    stage overhead 140 "$python" -m bench.gpu overhead $tiny --ranks "$ranks" --rounds $rounds --sizes 8 1M \
        --output "$r/overhead.md" --json "$r/overhead.json"
    stage profile 50 "$mpiexec" -n 1 "$python" -m bench.gpu profile $tiny --output "$r/profile.md" --json "$r/profile.json"
    stage dropout 70 "$mpiexec" -n 1 "$python" -m bench.gpu dropout $tiny ${dry:+--rounds 1} --output "$r/dropout.md" \
        --json "$r/dropout.json"
    stage blocks 60 "$mpiexec" -n 1 "$python" -m bench.gpu blocks $tiny ${dry:+--rounds 1} --output "$r/blocks.md" \
        --json "$r/blocks.json"
    stage flops 160 "$mpiexec" -n 1 "$python" -m bench.gpu flops $tiny ${dry:+--eager-only} --models 355M \
        --output "$r/flops.md" --json "$r/flops.json"
    stage overlap 50 "$mpiexec" -n "$ranks" "$python" -m bench.gpu overlap $tiny --rounds $overlap_rounds \
        --bucket-mb $megabytes --output "$r/overlap.md" --json "$r/overlap.json"
    stage overlap_unordered 50 env NCCL_LAUNCH_ORDER_IMPLICIT=0 "$mpiexec" -n "$ranks" "$python" -m bench.gpu overlap \
        $tiny --rounds $overlap_rounds --bucket-mb $megabytes --output "$r/overlap_unordered.md" \
        --json "$r/overlap_unordered.json"
    stage flops_large 120 "$mpiexec" -n 1 "$python" -m bench.gpu flops $tiny --eager-only --models 1.2B \
        --output "$r/flops_large.md" --json "$r/flops_large.json"
}

$job
for name in $(echo "$only" | tr , ' '); do
    case " $known " in *" $name "*) ;; *) say "FAILED    --only $name: $job has no such stage; it has$known"; status=2 ;; esac
done
say "== $job: $([ $status = 0 ] || echo "NOT all stages ended well; ")these did:${ran:- none}; $(($(date +%s) - started)) s"
exit $status
