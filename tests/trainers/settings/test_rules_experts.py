"""The settings of a mixture of experts: what is refused by name, and the two runs of docs/moe.md."""

import pytest
import yaml

from commengine import UsageError
from tests.support.mpirun import ROOT
from tplayers import formulas
from trainers.settings.commands import GPTSettings
from trainers.settings.rules import require_valid
from trainers.tasks.kinds import task_of

BASE = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 16, "vocab_size": 64, "mock_data": True,
    "make_vocab_size_divisible_by": 16, "disable_bias_linear": True,
}  # fmt: skip


def checked(ranks=1, **settings):
    config = GPTSettings(**(BASE | settings))
    require_valid(config, ranks)
    return task_of(config).completed(ranks)


@pytest.mark.parametrize(
    ("ranks", "settings", "words"),
    [
        (1, {"num_experts": 4, "moe_router_topk": 5}, "--moe-router-topk 5: must not exceed --num-experts 4"),
        (1, {"num_experts": 4, "disable_bias_linear": False}, "--num-experts 4: needs --disable-bias-linear"),
        (1, {"moe_router_topk": 1}, "--moe-router-topk 1: needs --num-experts"),
        (2, {"expert_model_parallel_size": 2}, "--expert-model-parallel-size 2: needs --num-experts"),
        (
            4, {"num_experts": 6, "expert_model_parallel_size": 4},
            "--expert-model-parallel-size 4: does not divide --num-experts 6 and the 4 data-parallel ranks; .1, 2. do",
        ),
        (
            2, {"num_experts": 4, "expert_model_parallel_size": 4},
            "--expert-model-parallel-size 4: does not divide --num-experts 4 and the 2 data-parallel ranks; .1, 2. do",
        ),
        (
            4, {"num_experts": 4, "expert_model_parallel_size": 4, "tensor_model_parallel_size": 2},
            "--expert-model-parallel-size 4: does not divide --num-experts 4 and the 2 data-parallel ranks; .1, 2. do",
        ),
        (1, {"moe_aux_loss_coeff": 0.1}, "--moe-aux-loss-coeff 0.1: needs --num-experts"),
        (1, {"num_experts": 4, "moe_shared_expert_gate": True}, "needs --moe-shared-expert-intermediate-size"),
        (1, {"num_experts": 4, "compile": True}, "--compile: excludes --num-experts 4"),
        (
            2, {"num_experts": 4, "deterministic": True, "global_batch_size": 4, "context_parallel_size": 2},
            "--num-experts 4: excludes --deterministic with a --context-parallel-size",
        ),
        (
            1, {"num_experts": 4, "deterministic": True, "global_batch_size": 4, "moe_ffn_hidden_size": 6},
            "--moe-ffn-hidden-size 6: is not a multiple of --deterministic-shards 4",
        ),
        (
            2, {"num_experts": 4, "moe_ffn_hidden_size": 15, "tensor_model_parallel_size": 2},
            "--tensor-model-parallel-size 2 does not divide all of .*--moe-ffn-hidden-size 15",
        ),
    ],
)  # fmt: skip
def test_bad_settings_are_named(ranks, settings, words):
    with pytest.raises(UsageError, match=words):
        checked(ranks, **settings)


def test_a_tensor_size_must_divide_the_widths_that_there_are():
    """The width of a dense block is that of no layer here."""
    checked(
        3, num_experts=3, hidden_size=96, num_attention_heads=3, ffn_hidden_size=256, moe_ffn_hidden_size=96,
        tensor_model_parallel_size=3, make_vocab_size_divisible_by=48,
    )  # fmt: skip


def test_the_memory_and_the_flops_are_those_of_all_and_of_some_experts():
    dense = task_of(checked(ffn_hidden_size=256)).cost_shape()
    few = task_of(checked(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=128)).cost_shape()
    more = task_of(checked(num_experts=16, moe_router_topk=2, moe_ffn_hidden_size=128)).cost_shape()
    router = 2 * 64 * 8
    assert formulas.active_parameters(few) == formulas.parameters(dense) + router
    assert formulas.parameters(more) - formulas.parameters(few) == 2 * 8 * (2 * 64 * 128) + router
    assert formulas.model_flops(more, 1) - formulas.model_flops(few, 1) == 3 * 2 * 16 * router


def test_the_runs_of_the_page_have_the_same_active_parameters_and_steps():
    """The two commands of docs/moe.md: the router apart, a token meets as many parameters."""
    text = (ROOT / "docs" / "moe.md").read_text(encoding="utf-8")
    commands = [block for block in text.split("```sh\n")[1:] if "/dense-1234" in block]
    dense, experts = (line for line in commands[0].split("```")[0].replace("\\\n", "").splitlines() if "mpirun" in line)
    words = [command.split("trainers.pretrain_gpt")[1].split() for command in (dense, experts)]
    settings = yaml.safe_load((ROOT / "trainers" / "configs" / "main.yaml").read_text(encoding="utf-8"))
    runs = []
    for command in words:
        found = {key.replace("-", "_"): value for key, value in settings.items()} | {"vocab_size": 4096}
        for at, word in enumerate(command):
            if word.startswith("--") and word != "--config":
                value = command[at + 1] if at + 1 < len(command) and not command[at + 1].startswith("--") else True
                found[word[2:].replace("-", "_")] = yaml.safe_load(value) if isinstance(value, str) else value
        runs.append(GPTSettings(**found))
    shapes = [task_of(run).cost_shape() for run in runs]
    assert runs[0].train_iters == runs[1].train_iters and runs[1].num_experts == 8
    router = shapes[1].layers * shapes[1].hidden * shapes[1].experts
    assert formulas.active_parameters(shapes[1]) - router == formulas.parameters(shapes[0])
