"""Answers: whole features that are not here. The flag that turns one on is refused; the others mean nothing without."""

from __future__ import annotations

from .answers import no_effect, not_here, without

FEATURES = (
    not_here("models are GPT, BERT and Llama", (
        "multi-latent-attention decoder-num-layers= heterogeneous-layers-config-path= "
        "heterogeneous-layers-config-encoded-json= experimental-attention-variant= linear-attention-freq= "
        "is-hybrid-model hybrid-layer-pattern= hybrid-override-pattern= hybrid-attention-ratio=0.0 "
        "hybrid-mlp-ratio=0.0 enable-mhc-connections mtp-num-layers= use-mup retro-add-retriever vision-pretraining"
    )),
    without("--multi-latent-attention", (
        "q-lora-rank= kv-lora-rank=32 qk-head-dim=128 qk-pos-emb-head-dim=64 v-head-dim=128 rotary-scaling-factor=1.0 "
        "mscale=1.0 mscale-all-dim=0.0 cache-mla-latents"
    )),
    without("--position-embedding-type yarn, which is not here", (
        "yarn-original-max-position-embeddings= yarn-beta-fast= yarn-beta-slow= yarn-correction-range-round-to-int "
        "no-yarn-correction-range-round-to-int"
    )),
    without("--position-embedding-type relative, which is not here", (
        "relative-attention-num-buckets=32 relative-attention-max-distance=128"
    )),
    without("--position-embedding-type mrope, which is not here", "mrope-section..."),
    without("--mtp-num-layers", (
        "mtp-loss-scaling-factor=0.1 mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern= mtp-standalone "
        "mtp-use-repeated-layer"
    )),
    without("--enable-mhc-connections", (
        "mhc-init-gating-factor=0.01 mhc-num-residual-streams=4 mhc-sinkhorn-iterations=20"
    )),
    without("--use-mup", (
        "mup-attn-scale-power=1.0 mup-base-head-dim= mup-base-hidden-size= mup-embedding-mult=1.0 mup-output-mult=1.0 "
        "mup-width-mult=1.0"
    )),
    without("--experimental-attention-variant", (
        "dsa-indexer-head-dim= dsa-indexer-k-norm-epsilon= dsa-indexer-k-norm-fp32 dsa-indexer-loss-coeff= "
        "dsa-indexer-n-heads= dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset=0 dsa-indexer-topk= "
        "dsa-indexer-topk-freq=1 dsa-indexer-use-sparse-loss dsa-kernel-backend=none no-dsa-indexer-rotate-activation "
        "disable-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu disable-dsa-indexer-scoring-relu "
        "linear-conv-kernel-dim=4 linear-key-head-dim=128 linear-value-head-dim=128 linear-num-key-heads=16 "
        "linear-num-value-heads=32 gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute=2 gdp-num-householder=3"
    )),
    without("--hybrid-layer-pattern", (
        "mamba-head-dim=64 mamba-num-groups=8 mamba-num-heads= mamba-state-dim=128 disable-mamba-mem-eff-path "
        "mamba-training-ssm-states-dtype= mamba-inference-conv-states-dtype=bf16 "
        "mamba-inference-ssm-states-dtype=bf16"
    )),
    without("--retro-add-retriever", (
        "retro-attention-gate=1 retro-cyclic-train-iters= retro-encoder-attention-dropout=0.1 "
        "retro-encoder-hidden-dropout=0.1 retro-encoder-layers=2 retro-no-verify-neighbor-count retro-num-neighbors=2 "
        "retro-num-retrieved-chunks=2 retro-project-dir= retro-return-doc-ids retro-workdir="
    )),
    no_effect("belongs to Megatron-LM's programs for pictures", (
        "num-classes=1000 img-h=224 img-w=224 img-dim=224 num-channels=3 patch-dim=16 classes-fraction=1.0 "
        "data-per-class-fraction=1.0 vision-pretraining-type=classify vision-backbone-type=vit "
        "swin-backbone-type=tiny mask-type=random mask-factor=1.0 iter-per-epoch=1250 dino-local-img-size=96 "
        "dino-local-crops-number=10 dino-head-hidden-size=2048 dino-bottleneck-size=256 dino-freeze-last-layer=1 "
        "dino-norm-last-layer dino-warmup-teacher-temp=0.04 dino-teacher-temp=0.07 dino-warmup-teacher-temp-epochs=30 "
        "no-data-sharding"
    )),
    no_effect("belongs to Megatron-LM's programs for retrieval", (
        "ict-head-size= ict-load= bert-load= biencoder-projection-dim=0 biencoder-shared-query-context-model "
        "block-data-path= embedding-path= evidence-data-path= titles-data-path= query-in-block-prob=0.1 "
        "indexer-batch-size=128 indexer-log-interval=1000 retriever-report-topk-accuracies... retriever-score-scaling "
        "report-topk-accuracies... faiss-use-gpu bert-embedder-type=megatron output-bert-embeddings"
    )),
    not_here("a run trains on text alone; fine-tuning is python -m trainers.finetune, of BERT", (
        "perform-rl-step sft logits-save-dir= logits-load-dir="
    )),
    without("--sft", "sft-tokenizer-prompt-format=nemotron-h-aligned"),
    without("--logits-save-dir or --logits-load-dir", (
        "logits-save-top-k= logits-save-top-p= logits-save-top-p-min-k=1 logits-save-dtype=fp16 "
        "logits-load-decode-threads=4 logits-load-prefetch-factor=3 logits-load-msc-prefetch-depth=2 "
        "logits-load-kd-loss-alpha=1.0 logits-load-ignore-errors"
    )),
    without("--perform-rl-step", (
        "grpo-clamp-eps-lower=0.01 grpo-clamp-eps-upper=0.01 grpo-default-temperature=1.0 grpo-default-top-p=0 "
        "grpo-entropy-term-weight=0.0 grpo-filter-groups-with-same-reward grpo-group-size=2 grpo-iterations=2 "
        "grpo-kl-beta=0.001 grpo-prompts-per-step=32 langrl-env-config= langrl-external-server "
        "langrl-inference-server-conversation-template= langrl-inference-server-type=inplace_megatron "
        "refit-method=gloo rl-calculate-intra-group-similarity rl-consumption-granularity=B "
        "rl-default-temperature=1.0 rl-default-top-k=-1 rl-default-top-p=0 rl-durable-rollout-bank "
        "rl-generation-batch-size= rl-generation-lag= rl-importance-sampling-truncation-coef= "
        "rl-inference-expert-model-parallel-size= rl-inference-expert-tensor-model-parallel-size= "
        "rl-inference-logprobs-is-correction rl-inference-model-unified-memory-level=0 rl-inference-parsers... "
        "rl-inference-pipeline-model-parallel-size= rl-inference-tensor-model-parallel-size= "
        "rl-kv-cache-management-mode=persist rl-max-inflight-requests= rl-num-parallel-generation-batches= "
        "rl-num-parallel-generations= rl-offload-inference-model-weights-when-idle "
        "rl-offload-kv-cache-during-training rl-offload-optimizer-during-inference rl-parallel-generation-tasks= "
        "rl-partial-rollouts rl-persist-cuda-graphs rl-profile rl-profile-dir= rl-prompts-per-eval=32 "
        "rl-remove-kv-cache-during-training rl-reset-cuda-graphs rl-rollout-bank-dir= rl-rollout-bank-max-bytes=0 "
        "rl-sequence-packing-algo=fifo rl-sequence-packing-bin-size=8192 rl-sequence-packing-max-sequences-per-bin=50 "
        "rl-skip-bos-token rl-submission-granularity=B rl-training-cuda-graphs rl-use-sequence-packing "
        "rl-verify-model-weights-swap"
    )),
    no_effect("belongs to generation, which is python -m trainers.generate", (
        "inference-batch-times-seqlen-threshold=-1 max-tokens-to-oom=12000 use-legacy-static-engine "
        "inference-max-requests=8 inference-max-batch-size= inference-max-seq-length=2560 inference-dynamic-batching "
        "inference-dynamic-batching-buffer-size-gb=40.0 inference-dynamic-batching-paused-buffer-size-gb= "
        "inference-dynamic-batching-buffer-guaranteed-fraction=0.2 inference-dynamic-batching-buffer-overflow-factor= "
        "inference-dynamic-batching-mamba-memory-ratio= inference-dynamic-batching-block-size=256 "
        "inference-dynamic-batching-chunk-size=256 inference-dynamic-batching-max-requests= "
        "inference-dynamic-batching-max-requests-override= inference-dynamic-batching-max-tokens= "
        "inference-dynamic-batching-max-tokens-override= inference-dynamic-batching-num-cuda-graphs=16 "
        "inference-dynamic-batching-cuda-graph-max-tokens=16384 "
        "inference-dynamic-batching-cuda-graph-mixed-prefill-count=16 "
        "inference-dynamic-batching-cuda-graph-sizing-distribution=exponential "
        "inference-dynamic-batching-track-paused-request-events "
        "inference-dynamic-batching-track-generated-token-events inference-dynamic-batching-unified-memory-level=0 "
        "inference-dynamic-batching-prefix-caching inference-dynamic-batching-prefix-caching-eviction-policy=ref_zero "
        "inference-dynamic-batching-prefix-caching-coordinator-policy=load_balanced "
        "inference-dynamic-batching-prefix-caching-routing-alpha=0.5 "
        "inference-dynamic-batching-prefix-caching-mamba-gb= inference-dynamic-batching-sampling-backend=torch "
        "inference-dynamic-batching-async-sched-mode=legacy inference-dynamic-batching-logprobs-mode=raw_logprobs "
        "inference-logging-step-interval=0 inference-text-gen-server-logging inference-wandb-logging "
        "inference-coordinator-port= inference-use-synchronous-zmq-collectives inference-disable-ep-consensus "
        "inference-shards= inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens=512 "
        "inference-cuda-graph-scope= inference-disable-triton-nvls-kernels inference-fuse-tp-communication "
        "inference-grouped-gemm-backend=vllm inference-moe-disable-fused-quant-kernels "
        "inference-moe-token-dispatcher-type=nvls decode-only-cuda-graphs enable-chunked-prefill "
        "disable-chunked-prefill num-speculative-tokens=0 use-same-sampling-seed-across-dp-ranks "
        "mlp-chunks-for-prefill=1 nccl-all-reduce-for-prefill"
    )),
)  # fmt: skip
