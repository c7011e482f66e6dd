"""Answers: batches, optimizer, schedule, data, tokenizer."""

from __future__ import annotations

from . import computed as c
from .answers import computed, instead, no_effect, not_here, same, valid, without

GPT, BERT = ("gpt",), ("bert", "finetune")
PRETRAIN = ("gpt", "bert")
DOWN = "rounded down to whole steps"

TRAINING = (
    # spelt otherwise
    same("--micro-batch-size", "batch-size="),
    same("--seq-length", "encoder-seq-length="),
    same("--min-loss-scale", "min-scale=1"),
    same("--check-replicas", "check-weight-hash-across-dp-replicas-interval="),
    computed("--train-iters of so many samples", c.train_samples, "train-samples=", how=DOWN),
    computed("--lr-decay-iters of so many samples", c.decay_samples, "lr-decay-samples=", how=DOWN),
    computed("--lr-warmup-iters of so many samples", c.warmup_samples, "lr-warmup-samples=0", how=DOWN),
    computed("--lr-warmup-iters of this share", c.warmup_fraction, "lr-warmup-fraction= warmup=", PRETRAIN, how=DOWN),
    # batches and steps
    not_here("the batch has one size", "rampup-batch-size... step-batch-size-schedule= decrease-batch-size-if-needed"),
    not_here("every step of a run is taken", "iterations-to-skip... phase-transition-iterations="),
    instead("python -m trainers.evaluate --load RUN", "skip-train"),
    not_here("an evaluation has the batches of training", "eval-micro-batch-size= eval-global-batch-size="),
    not_here("the checks of Megatron-LM's own tests are not here", "test-mode"),
    instead("an --eval-iters that is large enough: it reads no sample twice", "full-validation"),
    not_here("all evaluations are at --eval-interval", "start-eval-at-iter="),
    no_effect("a blend's parts are always evaluated apart", "multiple-validation-sets validation-set-names..."),
    no_effect("the run always saves and stops at SIGTERM", (
        "exit-signal-handler exit-signal-handler-for-training exit-signal-handler-for-dataloader"
    )),
    instead("--exit-before-limit in a Slurm job, or python -m trainers.supervise", "adlr-autoresume"),
    without("--adlr-autoresume", "adlr-autoresume-interval=1000"),
    no_effect("only a loss that is not finite ends the run", "no-check-for-nan-in-loss-and-grad check-for-large-grads"),
    # optimizer and schedule
    valid("adam", "the optimizer is AdamW, as Megatron-LM's adam", "optimizer=adam"),
    without("--optimizer sgd", "sgd-momentum=0.9"),
    without("--optimizer lion", "lion-beta1=0.95 lion-beta2=0.98"),
    without("--optimizer muon", (
        "muon-momentum=0.9 muon-no-split-qkv muon-nesterov muon-use-nesterov muon-scale-mode=spectral "
        "muon-fp32-matmul-prec=medium muon-coefficient-type=quintic muon-num-ns-steps=5 muon-tp-mode=blockwise "
        "muon-use-syrk muon-extra-scale-factor=1.0 muon-scalar-optimizer=adam"
    )),
    valid("", "the warm-up begins at 0", "lr-warmup-init=0.0"),
    valid("constant", "the weight decay is constant", "weight-decay-incr-style=constant"),
    computed("taken: the value of --weight-decay", c.constant_decay, "start-weight-decay= end-weight-decay="),
    without("--lr-decay-style WSD, which is not here", (
        "lr-wsd-decay-style=exponential lr-wsd-decay-iters= lr-wsd-decay-samples="
    )),
    not_here("all layers have one learning rate", "decoupled-lr= decoupled-min-lr= head-lr-mult=1.0"),
    not_here("all layers learn", "freeze-all-layers"),
    not_here("norms do not decay", "apply-wd-to-qk-layernorm no-weight-decay-cond-type="),
    no_effect("a run that goes on has the schedule of its own flags", (
        "override-opt_param-scheduler override-opt-param-scheduler override-lr-scheduler"
    )),
    computed("taken in a new run", c.loads_nothing("repeat the flags of its schedule, and leave this out"), (
        "use-checkpoint-opt_param-scheduler use-checkpoint-opt-param-scheduler use-checkpoint-lr-scheduler"
    )),
    no_effect("the loss is the mean over all tokens of the global batch", "calculate-per-token-loss"),
    # data
    no_effect("changes how files are read, not what is read", (
        "data-impl=infer mmap-warmup num-workers=2 no-mmap-bin-files data-cache-path= num-dataset-builder-threads=1 "
        "dataloader-fast-cache-load dataloader-defer-npy-index-mmap s3-cache-path= object-storage-cache-path= "
        "mid-level-dataset-surplus=0.005 no-create-attention-mask-in-dataloader per-dataset-sequences-path= "
        "enable-msc disable-msc"
    )),
    valid("", "samples come in an order of their own in each epoch, as with single there", "dataloader-type=single"),
    valid("", "every sample is read", "sample-rate=1.0"),
    instead("--data-path WEIGHT PREFIX ..., of whose documents --split gives the parts", (
        "train-data-path... valid-data-path... test-data-path... data-args-path= per-split-data-args-path= "
        "train-data... valid-data... test-data..."
    )),
    not_here("a sample's documents are seen as one text, and all of its tokens count", (
        "reset-position-ids reset-attention-mask eod-mask-loss dataloader-inter-document-masking"
    ), GPT),
    not_here("samples are made of sentences", "dataloader-inter-document-masking", BERT),
    no_effect("has no effect on BERT there, either", "reset-position-ids reset-attention-mask eod-mask-loss", BERT),
    not_here("a blend's weights may have any scale", "renormalize-blend-weights"),
    not_here("samples are texts of --seq-length tokens", (
        "decoder-seq-length= retriever-seq-length=256 fim-data max-seqlen-per-dp-cp-rank= allow-ambiguous-pad-tokens"
    )),
    without("--fim-data", (
        "fim-rate=0.5 fim-spm-rate=0.5 fim-split-sample= fim-fragment-rate= fim-no-prefix= "
        "fim-prefix-token=<fim_prefix> fim-middle-token=<fim_middle> fim-suffix-token=<fim_suffix> "
        "fim-pad-token=<fim_pad> fim-eod-token=<|endoftext|>"
    )),
    instead("python -m trainers.preprocess_data for the files, and --data-path for the run", (
        "loose-json text-key=sentence eval-text-key= delim=, cache-dir= max-preds-per-seq= eval-max-preds-per-seq= "
        "tokenizer-path=tokenizer.model tokenizer-model-type=bert-large-uncased use-one-sent-docs use-tfrecords "
        "lazy-loader"
    )),
    instead("--micro-batch-size and --seq-length, which evaluations have, too", "eval-batch-size= eval-seq-length="),
    instead("--lr-warmup-fraction", "warmup=", ("finetune",)),
    instead("--train-iters", "epochs=1", PRETRAIN),
    instead(
        "--data FOLDER, of the task's own files, and --tokenizer-model", "data-path... split= mock-data vocab-file=",
        ("finetune",),
    ),
    not_here("a model that is fine-tuned has BERT's own GELUs", "openai-gelu", ("finetune",)),
    not_here(
        "masks and pairs belong to pretraining", "mask-prob=0.15 short-seq-prob=0.1 bert-no-binary-head", ("finetune",)
    ),
    # tokenizer
    computed("--tokenizer-model, a file of this name with its merges beside it", c.gpt2_files, "vocab-file=", GPT),
    computed("the file beside --vocab-file, of the same name", c.merges, "merge-file=", GPT),
    not_here("BERT's vocabulary is --vocab-file", "merge-file=", BERT),
    computed(
        "taken: GPT2BPETokenizer, HuggingFaceTokenizer, BertWordPieceLowerCase, NullTokenizer", c.tokenizer_type,
        "tokenizer-type=",
        idle="the tokenizer is that of --tokenizer-model or of the data set, or --vocab-size tells its size",
    ),
    no_effect("the data set holds tokens, and a tokenizer.json says by itself how it spells", (
        "tokenizer-metadata= tokenizer-special-tokens... tokenizer-sentencepiece-legacy tokenizer-hf-no-use-fast "
        "no-tokenizer-sentencepiece-ignore-extra-whitespaces disable-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "tokenizer-hf-no-include-special-tokens tokenizer-hf-use-fast tokenizer-hf-include-special-tokens "
        "trust-remote-code legacy-tokenizer chat-template= use-gigatoken tiktoken-pattern= "
        "tiktoken-num-special-tokens=1000 tiktoken-special-tokens... no-save-tokenizer-assets "
        "disable-save-tokenizer-assets no-use-tokenizer-model-from-checkpoint-args "
        "disable-use-tokenizer-model-from-checkpoint-args"
    )),
    no_effect("mock data has no documents that end, and no padding", "null-tokenizer-eod-id= null-tokenizer-pad-id=-1"),
)  # fmt: skip
