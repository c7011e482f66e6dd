"""Answers: the shape and the function of the model, and experts."""

from __future__ import annotations

from . import computed as c
from .answers import computed, instead, no_effect, not_here, same, valid, without

GPT, BERT = ("gpt",), ("bert", "finetune")

MODEL = (
    # spelt otherwise
    same("--norm-epsilon", "layernorm-epsilon=1e-05"),
    same("--num-layers", "encoder-num-layers="),
    same("--ffn-hidden-size", "intermediate-size="),
    computed("--position-embedding-type rope", c.rotary, "use-rotary-position-embeddings", GPT),
    # the values that a run here has anyway
    valid("rope", "rotary positions are plain, not YaRN's", "rope-type="),
    valid("", "rotary positions turn the whole of a head", "rotary-percent=1.0", GPT),
    valid("vanilla", "attention has the plain softmax", "softmax-type=vanilla"),
    valid("1", "all layers have experts, or none", "moe-layer-freq=1"),
    valid("softmax", "a router's weights are a softmax", "moe-router-score-function=softmax"),
    valid("fp32", "a router computes in fp32", "moe-router-dtype="),
    valid("local", "the layers are those of this package", "spec..."),
    valid("0", "the vocabulary has no tokens of T5", "vocab-extra-ids=0"),
    valid("learned_absolute", "BERT has a table of positions", "position-embedding-type=learned_absolute", BERT),
    valid("LayerNorm", "BERT has LayerNorm", "normalization=LayerNorm", BERT),
    computed(
        "taken: seq_aux_loss, none, and aux_loss with --micro-batch-size 1 or without --moe-aux-loss-coeff", c.balance,
        "moe-router-load-balancing-type...", GPT,
    ),
    not_here("BERT has no experts", "moe-router-load-balancing-type...", BERT),
    computed("taken with rotary positions", c.no_positions, "no-position-embedding", GPT),
    computed("taken with --swiglu, because the GELU here is the form by tanh", c.erf_gelu, "no-bias-gelu-fusion", GPT),
    computed("taken in fp32", c.fp32_residuals, "fp32-residual-connection"),
    no_effect("BERT's GELU is by the error function, unless --gelu says otherwise", "no-bias-gelu-fusion", BERT),
    no_effect("a GPT's GELU is the form by tanh", "openai-gelu", GPT),
    computed("--gelu tanh --head-gelu tanh", c.tanh_gelu, "openai-gelu", ("bert",)),
    # something else
    instead(
        "--use-rope-scaling --rope-scaling-type linear --rope-scaling-factor N, in a GPT",
        "rotary-seq-len-interpolation-factor=",
    ),
    instead("--make-vocab-size-divisible-by N, of which the vocabulary becomes a multiple", "padded-vocab-size="),
    same("--make-vocab-size-divisible-by 1", "no-pad-vocab-size disable-pad-vocab-size"),
    # not here
    not_here("rotary positions go by halves, not by pairs", "rotary-interleaved"),
    not_here("all layers have rotary positions", "no-rope-freq="),
    not_here("attention sees all positions before", "window-size= window-attn-skip-freq="),
    not_here("norms stand inside of the branches", "apply-residual-connection-post-layernorm", GPT),
    not_here(
        "the residual is the sum, not its norm; --norm-placement post is the paper's Figure 7 a",
        "apply-residual-connection-post-layernorm", BERT,
    ),
    not_here(
        "feed-forward blocks have GELU, or --swiglu",
        "squared-relu quick-geglu activation-func-clamp-value= glu-linear-offset=0.0",
    ),
    not_here(
        "a norm's weight is kept as it is, and norms of heads are --qk-layernorm",
        "apply-layernorm-1p qk-l2-norm qk-clip attention-output-gate",
    ),
    without("--qk-clip", "qk-clip-alpha=0.5 qk-clip-threshold=100"),
    not_here("initial weights are normal, with --init-method-std", "init-method-xavier-uniform"),
    not_here("all weights have one --init-method-std", "embedding-init-method-std="),
    not_here("all replicas begin with the same weights", "data-parallel-random-init"),
    not_here("BERT has another block", (
        "swiglu group-query-attention num-query-groups=1 kv-channels= disable-bias-linear add-qkv-bias qk-layernorm "
        "untie-embeddings-and-output-weights rotary-base=10000 rotary-percent=1.0 use-rotary-position-embeddings "
        "use-rope-scaling no-position-embedding rope-scaling-factor=8.0 num-experts= expert-model-parallel-size=1 "
        "moe-router-topk=2 moe-aux-loss-coeff=0.0... moe-z-loss-coeff= moe-router-pre-softmax moe-ffn-hidden-size= "
        "moe-shared-expert-intermediate-size= moe-shared-expert-gate"
    ), BERT),
    no_effect("belongs to BERT", "mask-prob=0.15 short-seq-prob=0.1 bert-no-binary-head", GPT),
    not_here("a token has k experts, with all of its rows and no capacity", (
        "moe-expert-capacity-factor= moe-pad-expert-input-to-capacity moe-token-dropping moe-input-jitter-eps= "
        "moe-router-topk-scaling-factor= moe-router-num-groups= moe-router-group-topk= moe-router-enable-expert-bias "
        "moe-router-force-load-balancing moe-router-force-biased= moe-latent-size= moe-apply-probs-on-input "
        "moe-use-upcycling moe-router-quantile-balancing-ema=0.0 moe-enable-routing-replay "
        "moe-expert-rank-capacity-factor="
    )),
    without("--moe-expert-capacity-factor", "moe-token-drop-policy=probs"),
    without("--moe-router-enable-expert-bias", "moe-router-bias-update-rate=0.001"),
    without("--moe-use-upcycling", "moe-upcycling-granularity=1"),
    no_effect("changes how experts are computed or reached, not what they give", (
        "moe-token-dispatcher-type=allgather moe-grouped-gemm moe-permute-fusion moe-router-fusion moe-extended-tp "
        "moe-enable-deepep moe-flex-dispatcher-backend=deepep moe-shared-expert-overlap moe-use-legacy-grouped-gemm "
        "moe-deepep-num-sms= moe-flex-dispatcher-num-sms= moe-hybridep-num-sms= "
        "moe-hybridep-num-sms-preprocessing=108 moe-hybridep-num-blocks-permute= moe-hybridep-num-blocks-unpermute= "
        "moe-hybridep-pad-uneven-dispatch-inputs moe-permute-fusion-into-hybridep moe-ncclep-zero-copy "
        "moe-ncclep-static-shape moe-paged-stash moe-paged-stash-page-size=64 "
        "moe-paged-stash-buffer-size-factor-cuda=1.1 moe-paged-stash-buffer-size-factor-cpu=0.0 moe-layer-recompute "
        "moe-per-layer-logging moe-use-grouped-tensor moe-single-grouped-weight moe-single-grouped-bias "
        "moe-mlp-glu-interleave-size= moe-shared-expert-glu-interleave-size= use-grouped-gemm-for-dense-mlp "
        "use-grouped-gemm-for-shared-expert overlap-moe-expert-parallel-comm ep-overlap-early-attn-memory-release "
        "overlap-dispatch-backward-with-experts-wgrad expert-tensor-parallel-size= high-priority-a2a-comm-stream "
        "moe-routing-trace-path= moe-routing-trace-max-training-iters= moe-routing-trace-capture-logits "
        "moe-routing-trace-capture-hidden-states moe-routing-trace-dump-weights "
        "moe-pad-experts-for-cuda-graph-inference"
    )),
    valid("bf16", "rows of experts travel in the activations' dtype", (
        "moe-combine-bwd-dtype=bf16 moe-dispatch-fwd-dtype=bf16"
    )),
    without("--fp8-format", "moe-router-padding-for-fp8 moe-router-padding-for-quantization"),
)  # fmt: skip
