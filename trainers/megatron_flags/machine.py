"""Answers: ranks, kernels, memory and precision."""

from __future__ import annotations

from . import computed as c
from .answers import computed, instead, no_effect, not_here, same, valid, without

PRETRAIN = ("gpt", "bert")

MACHINE = (
    # spelt otherwise
    same("--tensor-model-parallel-size", "model-parallel-size=1"),
    same("--recompute-granularity full", "checkpoint-activations"),
    same("--recompute-granularity full", "activations-checkpoint-method="),
    same("--recompute-granularity selective", "recompute-activations"),
    same("--grad-reduce-in-fp32", "accumulate-allreduce-grads-in-fp32 fp32-allreduce"),
    same("--deterministic", "deterministic-mode", PRETRAIN),
    not_here("fine-tuning has no --deterministic", "deterministic-mode", ("finetune",)),
    not_here("fine-tuning has neither stages nor context groups", (
        "pipeline-model-parallel-size=1 context-parallel-size=1 num-layers-per-virtual-pipeline-stage= "
        "overlap-p2p-communication no-overlap-p2p-communication cp-comm-type..."
    ), ("finetune",)),
    computed(
        "--num-layers-per-virtual-pipeline-stage", c.virtual_stages, "num-virtual-stages-per-pipeline-rank=", PRETRAIN
    ),
    not_here("fine-tuning has no stages", "num-virtual-stages-per-pipeline-rank=", ("finetune",)),
    # ranks
    no_effect("mpirun starts the ranks and tells each its number", "local-rank= local_rank= lazy-mpu-init..."),
    no_effect("host tensors travel by MPI or shared memory, device tensors by --device-transport", (
        "distributed-backend=nccl pipeline-model-parallel-comm-backend= nccl-communicator-config-path= use-nccl-ub "
        "disable-symmetric-registration gtp-remat-nccl-ub gtp-expert-remat-nccl-ub use-sharp sharp-enabled-group= "
        "high-priority-stream-groups... use-ring-exchange-p2p no-scatter-gather-tensors-in-pipeline "
        "disable-gloo-process-groups create-all-gather-group symmetric-ar-type= tp-comm-bootstrap-backend=nccl "
        "ddp-pad-buckets-for-high-nccl-busbw suggested-communication-unit-size= fsdp-manual-registration"
    )),
    no_effect("--distributed-timeout-minutes holds, with a report of its own", (
        "distributed-timeout-seconds-after-init= flight-recorder-dump-path= flight-recorder-trace-buffer-size=2000 "
        "flight-recorder-include-stack-trace no-flight-recorder-dump-on-timeout "
        "disable-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec "
        "disable-flight-recorder-extra-dump-on-exec no-flight-recorder-include-only-active "
        "disable-flight-recorder-include-only-active"
    )),
    no_effect("changes where layers or ranks lie, not what they compute", (
        "use-tp-pp-dp-mapping decoder-first-pipeline-num-layers= decoder-last-pipeline-num-layers= "
        "pipeline-model-parallel-layout= account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split "
        "standalone-embedding-stage microbatch-group-size-per-virtual-pipeline-stage= "
        "hierarchical-context-parallel-sizes... defer-embedding-wgrad-compute wgrad-deferral-limit=0 "
        "delay-wgrad-compute"
    )),
    no_effect("changes how gradients and parameters travel, not what they are", (
        "DDP-impl=local use-contiguous-buffers-in-ddp no-contiguous-buffers-in-local-ddp overlap-param-gather "
        "overlap-param-gather-with-optimizer-step no-align-param-gather no-align-grad-reduce "
        "disable-align-grad-reduce delay-param-gather no-delay-grad-reduce ddp-num-buckets= ddp-average-in-collective "
        "no-gradient-reduce-div-fusion num-distributed-optimizer-instances=1 no-use-layer-wise-param-layout "
        "tp-comm-overlap tp-comm-overlap-cfg= tp-comm-overlap-rs-dgrad no-tp-comm-overlap-ag "
        "disable-tp-comm-overlap-ag no-tp-comm-overlap-rs disable-tp-comm-overlap-rs no-tp-comm-bulk-dgrad "
        "disable-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad disable-tp-comm-bulk-wgrad no-tp-comm-split-ag "
        "disable-tp-comm-split-ag no-tp-comm-split-rs disable-tp-comm-split-rs overlap-p2p-communication-warmup-flush "
        "disable-async-tensor-model-parallel-allreduce train-sync-interval="
    )),
    instead("--grad-reduce-in-fp32", (
        "ddp-reduce-scatter-with-fp32-accumulation ddp-param-name-patterns-for-fp32-local-accumulation... "
        "gtp-remat-reduce-scatter-with-fp32-accumulation"
    )),
    instead("--use-distributed-optimizer, which shards the optimizer's state", (
        "use-megatron-fsdp use-custom-fsdp use-torch-fsdp2 enable-full-sharding-in-hsdp"
    )),
    without("--use-megatron-fsdp", (
        "megatron-fsdp-version=1 data-parallel-sharding-strategy=no_shard outer-dp-sharding-strategy=no_shard "
        "fsdp-double-buffer keep-fp8-transpose-cache keep-fp8-transpose-cache-when-using-custom-fsdp "
        "megatron-fsdp-main-params-dtype=fp32 megatron-fsdp-main-grads-dtype=auto megatron-fsdp-grad-comm-dtype=auto "
        "megatron-fsdp-max-pool-double-buffer fsdp-db-use-persist-buf-on-alloc-fail "
        "megatron-fsdp-enable-fine-grained-param-gather torch-fsdp2-no-reshard-after-forward "
        "init-model-with-meta-device no-strict-fsdp-dtensor-load disable-strict-fsdp-dtensor-load"
    )),
    not_here("stages, tensor groups and context groups have one size each", (
        "pipeline-model-parallel-split-rank= encoder-pipeline-model-parallel-size=0 "
        "encoder-tensor-model-parallel-size=0 hybrid-context-parallel tensor-parallel-num-weight-shards= "
        "expert-tensor-parallel-num-weight-shards= gtp-remat-opt-in-modules..."
    )),
    not_here("ranks are real", "fake-process-group"),
    # kernels
    no_effect("chooses a kernel for the same numbers", (
        "attention-backend=auto use-flash-attn flash-attention-version= no-masked-softmax-fusion "
        "no-scaled-masked-softmax-fusion scaled-upper-triang-masked-softmax-fusion= no-bias-swiglu-fusion "
        "no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm no-gradient-accumulation-fusion "
        "cross-entropy-loss-fusion cross-entropy-fusion-impl=native use-te-activation-func fused-residual-rmsnorm "
        "disable-jit-fuser use-transformer-engine-op-fuser use-fused-weighted-squared-relu onnx-safe= "
        "no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding flash-decode "
        "mla-down-proj-fusion batch-invariant-backend=te_native"
    )),
    no_effect("there is one implementation of the layers", (
        "use-mcore-models use-legacy-models enable-experimental apply-query-key-layer-scaling "
        "no-query-key-layer-scaling attention-softmax-in-fp32"
    )),
    valid("local transformer_engine", "the layers are those of training", "transformer-impl=transformer_engine"),
    no_effect("there are no CUDA graphs; --compile compiles the model", (
        "enable-cuda-graph external-cuda-graph cuda-graph-impl=none cuda-graph-scope... cuda-graph-modules... "
        "cuda-graph-warmup-steps=3 optimizer-cuda-graph te-rng-tracker inference-rng-tracker "
        "delay-offload-until-cuda-graph"
    )),
    no_effect("initial weights are drawn on the host, the same at every layout", "use-cpu-initialization"),
    not_here("a new model has initial weights", "no-initialization"),
    # memory
    no_effect("every layer is computed again alike, as --recompute-granularity says", (
        "recompute-method= recompute-num-layers= recompute-modules... activations-checkpoint-num-layers=1 "
        "checkpoint-num-layers=1 distribute-saved-activations distribute-checkpointed-activations "
        "mhc-recompute-layer-num= mlp-chunks-for-training=1"
    )),
    no_effect("tensors stay where they are", (
        "cpu-offloading-num-layers=0 cpu-offloading-retain-pinned-cpu-buffers optimizer-cpu-offload "
        "optimizer-offload-fraction=1.0 use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d "
        "no-pin-cpu-grads no-pin-cpu-params fine-grained-activation-offloading offload-modules... "
        "activation-offload-fraction=1.0 min-offloaded-tensor-size= delta-offload-bytes-across-pp-ranks=0 "
        "fine-grained-offloading-max-inflight-offloads="
    )),
    no_effect("Python and PyTorch manage memory", (
        "manual-gc manual-gc-interval=0 no-manual-gc-eval disable-manual-gc-eval empty-unused-memory-level=0"
    )),
    # precision
    computed("taken with --bf16, which reduces so", c.bf16_sums, "grad-reduce-in-bf16"),
    not_here("precisions are fp32, --bf16 and --fp16, with fp32 masters and moments", (
        "fp8-format= fp8-e4m3 fp8-hybrid fp8-param-gather fp4-format= fp4-param-gather fp16-lm-cross-entropy "
        "embedding-weights-in-fp32 fp32-embedding fp32-layernorm fp32-tokentypes output-logit-dtype= "
        "first-last-layers-bf16 main-grads-dtype=fp32 main-params-dtype=fp32 exp-avg-dtype=fp32 exp-avg-sq-dtype=fp32 "
        "te-precision-config-file= kitchen-config-file= kitchen-recipe-number= batch-invariant-mode "
        "disable-bf16-reduced-precision-matmul use-kitchen-attention"
    )),
    without("--use-kitchen-attention", "kitchen-attention-backend=sdpa"),
    no_effect("moments are fp32, as there without another dtype", "use-precision-aware-optimizer"),
    without("--fp8-format", (
        "fp8-recipe=delayed fp8-margin=0 fp8-interval=1 fp8-amax-history-len=1 fp8-amax-compute-algo=most_recent "
        "no-fp8-wgrad disable-fp8-wgrad fp8-quantizer-factory= fp8-output-proj"
    )),
    without("--fp4-format", "fp4-recipe=nvfp4 fp4-quantizer-factory="),
    without("--fp8-param-gather", "reuse-grad-buf-for-mxfp8-param-ag"),
    without("--first-last-layers-bf16", "num-layers-at-start-in-bf16=1 num-layers-at-end-in-bf16=1"),
)  # fmt: skip
