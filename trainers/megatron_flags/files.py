"""Answers: checkpoints, logs, profiles, watchers."""

from __future__ import annotations

from . import computed as c
from .answers import computed, instead, no_effect, not_here, same, valid, without

_AGAIN = c.loads_nothing("give the flags of its shape again, and leave this out")
_ANEW = c.loads_nothing(
    "a new run with its weights is --load hf:FOLDER of the export in its folder hf (or of python -m trainers.convert)"
)

FILES = (
    # checkpoints
    computed("--keep-last 1 --keep-every N", c.retained, "save-retain-interval="),
    same("--save-interval", "persistent-save-interval= save-iters="),
    instead("--load DIR/iter_N, a folder of the run", "ckpt-step= override-ckpt-iteration="),
    instead("--load hf:FOLDER or megatron:FOLDER", "pretrained-checkpoint=", ("gpt", "bert")),
    computed("taken in a new run", _ANEW, "finetune no-load-optim"),
    computed("taken in a new run", _AGAIN, "use-checkpoint-args use-mp-args-from-checkpoint-args"),
    no_effect("checkpoints have one form, which any layout loads", (
        "ckpt-format=torch_dist use-dist-ckpt dist-ckpt-format=torch_dist auto-detect-ckpt-format "
        "dist-ckpt-strictness=assume_ok_unexpected ckpt-fully-parallel-save no-ckpt-fully-parallel-save "
        "disable-ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-fully-parallel-load-exchange-algo=broadcast "
        "ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-load-process-group=dp "
        "ckpt-fully-parallel-save-process-group=dp ckpt-assume-constant-structure dist-ckpt-optim-fully-reshardable "
        "dist-ckpt-save-pre-mcore-014 distrib-optim-fully-reshardable-mem-efficient dist-ckpt-workers=1 "
        "ckpt-drop-redundant-extra-state ckpt-pg-tensors-cache-create ckpt-pg-tensors-cache-path= "
        "no-ckpt-load-validate-sharding-integrity disable-ckpt-load-validate-sharding-integrity "
        "no-stream-ckpt-dequant disable-stream-ckpt-dequant load-model-opt-format load-main-params-from-ckpt "
        "verify-integrity async-ckpt-cpu-priority=10 async-ckpt-io-priority=3 async-ckpt-use-cpu-shm "
        "async-strategy=nvrx use-persistent-ckpt-worker"
    )),
    no_effect("a checkpoint is complete, and has no state of a random generator", (
        "no-save-optim no-save-rng no-load-rng load-rng save-rng load-optim save-optim load-all-rng save-all-rng "
        "resume-dataloader"
    )),
    no_effect(
        "a --load without a checkpoint is an error, unless it is the folder of --save", "exit-on-missing-checkpoint"
    ),
    no_effect("all checkpoints are those of --save-interval", (
        "non-persistent-save-interval= non-persistent-ckpt-type= non-persistent-global-ckpt-dir= "
        "non-persistent-local-ckpt-dir= non-persistent-local-ckpt-algo=fully_parallel replication replication-jump= "
        "replication-factor=2"
    )),
    instead("python -m trainers.convert", (
        "ckpt-convert-format= ckpt-convert-save= ckpt-convert-update-legacy-dist-opt-format pretrained-bert"
    )),
    # logs
    no_effect("metrics.jsonl, the report and TensorBoard have what they have, at --log-interval", (
        "log-params-norm log-num-zeros-in-grad log-throughput log-progress log-timers-to-tensorboard "
        "log-batch-size-to-tensorboard no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard "
        "disable-log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard "
        "log-world-size-to-tensorboard log-max-attention-logit log-energy log-device-memory-used log-memory-interval= "
        "tensorboard-log-interval=1 tensorboard-queue-size=1000 timing-log-level=0 timing-log-option=minmax "
        "no-barrier-with-level-1-timing logging-level= config-logger-dir= dump-param-to-param-group-map= "
        "result-rejected-tracker-filename="
    )),
    no_effect("no service gets the numbers; metrics.jsonl and --tensorboard-dir have them", (
        "wandb-project= wandb-exp-name= wandb-save-dir= wandb-entity= enable-one-logger no-one-logger "
        "one-logger-project=megatron-lm one-logger-run-name= one-logger-async one-logger-entity=hwinf_dcm "
        "app-tag-run-name= app-tag-run-version=0.0.0 otel-enabled otel-service-name= otel-span-groups="
    )),
    no_effect("no profile is written; --log-communication-interval traces collectives", (
        "profile profile-step-start=10 profile-step-end=12 profile-ranks... use-pytorch-profiler nvtx-ranges "
        "record-memory-history memory-snapshot-path=snapshot.pickle record-shapes pytorch-profiler-collect-shapes "
        "pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra run-workload-inspector-server"
    )),
    no_effect("only checkpoints are saved", (
        "save-activations-interval= save-dgrads-interval= save-wgrads-interval= save-params-interval= "
        "save-tokens-per-expert-interval="
    )),
    no_effect("python -m trainers.supervise starts a run again; a step is not run twice", (
        "rerun-mode=validate_results enable-ft-package calc-ft-timeouts ft-num-warmup-iters=5 "
        "gpu-sniff-test-interval= inprocess-restart inprocess-max-iterations= inprocess-monitor-thread-interval=1.0 "
        "inprocess-monitor-process-interval=1.0 inprocess-progress-watchdog-interval=1.0 "
        "inprocess-heartbeat-interval=30 inprocess-soft-timeout=60 inprocess-hard-timeout=90 "
        "inprocess-heartbeat-timeout=60 inprocess-barrier-timeout=120 inprocess-completion-timeout=120 "
        "inprocess-last-call-wait=1 inprocess-termination-grace-time=1 inprocess-granularity=node "
        "inprocess-active-world-size= inprocess-empty-cuda-cache"
    )),
    no_effect("--log-straggler begins with the run, and needs no port", (
        "disable-straggler-on-startup straggler-ctrlr-port=65535 straggler-minmax-count=1"
    )),
    valid("", "no fault is made on purpose", "error-injection-rate=0"),
    without("--error-injection-rate", "error-injection-type=transient_error"),
    not_here("no fault is made on purpose", (
        "fault-injector-ranks= fault-injector-num-ranks= fault-injector-fault-types= "
        "fault-injector-fault-probabilities= fault-injector-fault-delay= fault-injector-mtti-seconds= "
        "fault-injector-offset-seconds= fault-injector-delay-start-iteration= fault-injector-seed="
    )),
    instead("trainers.configs' YAML with --config FILE", "yaml-cfg="),
)  # fmt: skip
