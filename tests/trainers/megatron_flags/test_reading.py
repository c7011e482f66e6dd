"""Command lines of Megatron-LM: each is taken with the same meaning, or refused with what to write; none in silence."""

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from commengine import UsageError
from commengine.options.declared import parser_of
from commengine.options.ranges import OptionError
from trainers.megatron_flags.table import answers
from trainers.run.startup import tell, watched
from trainers.tasks.bert import BERTTask
from trainers.tasks.commands import PRETRAIN
from trainers.tasks.gpt import GPTTask

KINDS = PRETRAIN
TASKS: dict[str, Any] = {"gpt": GPTTask, "bert": BERTTask}
#: a command line each: "taken", or the flag that is refused; the command; where it stands in Megatron-LM; its words.
#: Names of files and folders are replaced
LINES = [
    line.split(" ", 3)
    for line in Path(__file__).with_name("command_lines.txt").read_text(encoding="utf-8").splitlines()
]
MOCK = ["--mock-data", "--vocab-size", "100"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files that the lines name."""
    folder = tmp_path_factory.mktemp("places")
    files = {
        "data": "data", "vocab": "gpt2-vocab.json", "merges": "gpt2-merges.txt", "pieces": "vocab.txt", "run": "run",
        "board": "board", "tokenizer": "tokenizer.json",
    }  # fmt: skip
    for name in ("data.bin", "data.idx", *(name for name in files.values() if "." in name)):
        (folder / name).touch()
    return {name: str(folder / file) for name, file in files.items()}


def words_of(line: str, places: dict[str, str]) -> list[str]:
    return shlex.split(re.sub(r"\{(\w+)\}", lambda name: places.get(name[1], name[0]), line))


def ranks_of(words: list[str]) -> int:
    """The smallest number of ranks for these sizes."""
    found = 1
    for size in ("tensor-model", "model", "pipeline-model", "expert-model"):
        flag = f"--{size}-parallel-size"
        found *= int(words[words.index(flag) + 1]) if flag in words else 1
    context = "--context-parallel-size"
    return found * (int(words[words.index(context) + 1]) if context in words else 1)


def taken(command: str, words: list[str], ranks: int = 1) -> tuple[Any, list[str]]:
    """The settings, and the lines that are said at the start. Raises UsageError."""
    told: list[str] = []
    config = KINDS[command].parse(words, told.append)
    KINDS[command].require_valid(config, ranks)
    return config, told


def refusal(command: str, *words: str) -> str:
    with pytest.raises(UsageError) as caught:
        taken(command, [*MOCK, *words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_150_command_lines_of_megatron(places: dict[str, str]) -> None:
    assert len(LINES) == 150 and len({source for _, _, source, _ in LINES}) == 150
    own = {command: parser_of(kind.settings, "x")._option_string_actions for command, kind in KINDS.items()}
    for outcome, command, source, line in LINES:
        words = words_of(line, places)
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        problem, told = "", list[str]()
        try:
            _, told = taken(command, words, ranks_of(words))
        except UsageError as error:
            problem = str(error)
        if outcome != "taken":  # a flag of the table, or an option of ours, and then what would be right
            assert re.match(rf"{outcome}\b.*: \w", problem), (source, problem)
            assert outcome in answers(command) or outcome in own[command]
            continue
        assert not problem, (source, problem)
        assert outcome == "taken", f"{source}: {outcome} is taken now"
        said = re.sub(r" \([^()]*\)", "", " ".join(told).split("defaults that are not")[0])
        for flag in flags - set(own[command]):  # once, and only these
            assert len(re.findall(rf"(?:^|[ ,]){re.escape(flag)}(?=[ :,])", said)) == 1, (source, flag, said)
    assert sum(outcome == "taken" for outcome, *_ in LINES) >= 100


#: lines by their place in Megatron-LM, and what their flags mean there: by our settings' names
MEANINGS: dict[str, dict[str, Any]] = {
    "v1.0:examples/pretrain_gpt2.sh": {
        "micro_batch_size": 8, "train_iters": 500000, "lr_decay_iters": 320000, "lr_warmup_iters": 3200,
        "recompute_granularity": "full", "fp16": True, "num_layers": 24, "lr_decay_style": "cosine",
    },
    "v1.0:examples/pretrain_bert_distributed.sh": {
        "micro_batch_size": 4, "lr_warmup_iters": 9900, "lr_decay_iters": 990000, "fp16": True,
    },
    "v2.0:examples/pretrain_gpt_distributed_with_mp.sh": {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 4,
        "global_batch_size": 16, "lr_warmup_iters": 3200, "recompute_granularity": "full",
    },
    "v2.6:README.md_GPT": {
        "micro_batch_size": 4, "global_batch_size": 8, "lr_warmup_iters": 3200, "recompute_granularity": "full",
        "save_interval": 500, "eval_iters": 10,
    },
    "v2.6:README.md_BERT": {"lr_warmup_iters": 9900, "min_lr": 1e-5, "split": "949,50,1"},
    "23.04:examples/pretrain_gpt.sh": {"lr_warmup_iters": 3200, "micro_batch_size": 4, "recompute_granularity": None},
    "core_v0.8.0:examples/bert/train_bert_340m_distributed.sh": {
        "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 16, "lr_warmup_iters": 9900,
        "weight_decay": 0.01, "clip_grad": 1.0,
    },
    "core_v0.12.0:tests/bert/bert_mr_mcore_tp2_pp2_dgx_a100_1N8G": {
        "deterministic": True, "lr_warmup_iters": 9900, "tensor_model_parallel_size": 2,
    },
    "HEAD:docs/user-guide/training-examples.md_1": {"lr_warmup_iters": 2000, "bf16": True, "min_lr": 3e-5},
    "v2.6:examples/sc21/run_figure_11.sh": {
        "loss_scale": 8192.0, "lr_warmup_iters": 3, "recompute_granularity": "full", "fp16": True,
    },
}  # fmt: skip
SMALL = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr-decay-iters 200 --eval-iters 0 --log-interval 1 "
    "--mock-data --vocab-size 100 --make-vocab-size-divisible-by 128 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 1 --device cpu"
)


def smaller(line: str) -> list[str]:
    """The words of a line, without files, folders and intervals that belong to them; small sizes win."""
    line = re.sub(
        r"--(save|load|save-interval|data-path|vocab-file|merge-file|tensorboard-dir|exit-interval) \S+", "", line
    )
    for old, new in (("--model-parallel-size", "--tensor-model-parallel-size"), ("--batch-size", "--micro-batch-size")):
        line = line.replace(f"{old} ", f"{new} ")
    line = re.sub(r"--lr-warmup-iters \S+", "--lr-warmup-iters 2", line)
    return [*shlex.split(line), *SMALL]


@pytest.mark.parametrize("source", MEANINGS)
def test_a_line_means_what_it_means_there(source: str, places: dict[str, str]) -> None:
    ((_, command, _, line),) = [one for one in LINES if one[2] == source]
    words = words_of(line, places)
    config, _ = taken(command, words, ranks_of(words))
    for name, value in MEANINGS[source].items():
        assert getattr(config, name) == value, name


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
def test_ten_of_them_train_two_steps_on_two_ranks(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [one for one in LINES if one[2] in MEANINGS]
    assert len(chosen) == 10
    for _, command, source, line in chosen:
        config = KINDS[command].read(smaller(line), 2, tell)
        said = capsys.readouterr().err
        assert said and len(set(said.splitlines())) == len(said.splitlines()), source
        with watched(config, world) as comm:
            trainer = TASKS[command].started(config, comm).trainer
            losses = [trainer.step().loss for _ in range(2)]
            trainer.close()
        # of a new model: that of a guess, and of BERT also of the order of two parts
        assert losses == pytest.approx([math.log(100) + math.log(2) * (command == "bert")] * 2, abs=0.3), source


def test_a_flag_is_answered_by_the_table_and_not_by_its_spelling() -> None:
    _, told = taken("gpt", [*MOCK, "--optimizer", "adam", "--rotary-percent=1.0", "--use-flash-attn"])
    assert told[0] == ("no effect here: --optimizer adam, --rotary-percent 1.0 (asks for what a run here does anyway)")
    assert told[1] == "no effect here: --use-flash-attn (chooses a kernel for the same numbers)"
    assert refusal("gpt", "--optimizer", "sgd").startswith("--optimizer sgd: a flag of Megatron-LM that is not here: ")
    assert refusal("gpt", "--rotary-percent", "0.5").endswith("; valid: 1.0")
    assert "use here --use-distributed-optimizer" in refusal("gpt", "--use-megatron-fsdp")
    assert "(is --use-flash-attn meant?)" in refusal("gpt", "--use-flash-atn")
    assert "--compile" not in refusal("gpt", "--optimiser", "adam")


def test_a_name_of_an_older_version_is_the_flag_of_today() -> None:
    config, told = taken("gpt", [*MOCK, "--model-parallel-size", "2", "--checkpoint-activations"], 2)
    assert config.tensor_model_parallel_size == 2 and config.recompute_granularity == "full"
    assert "--model-parallel-size 2: is --tensor-model-parallel-size 2 here" in told
    both = ["--model-parallel-size", "2", "--tensor-model-parallel-size"]
    assert taken("gpt", [*MOCK, *both, "2"], 2)[0].tensor_model_parallel_size == 2
    assert "--model-parallel-size 2: is --tensor-model-parallel-size 2, and" in refusal("gpt", *both, "4")
    assert "--use-rotary-position-embeddings: is --position-embedding-type rope, and" in refusal(
        "gpt", "--use-rotary-position-embeddings", "--position-embedding-type", "learned_absolute"
    )


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--optimizer"], "--optimizer: expected a value"),
        (["--optimizer="], "--optimizer: expected a value"),
        (["--use-flash-attn=1"], "--use-flash-attn=1: --use-flash-attn takes no value"),
        (["--use-flash-attn", "1"], "unrecognized arguments: 1"),
        (["--model-parallel-size", "x"], "--tensor-model-parallel-size: invalid int value: 'x'"),
        (["--train-samples", "x"], "--train-samples x: must be a number of samples"),
        (["--rampup-batch-size", "16", "16", "1000"], "--rampup-batch-size 16 16 1000: a flag of Megatron-LM that is"),
    ],
)
def test_what_is_no_value_is_named(words: list[str], problem: str) -> None:
    assert problem in refusal("gpt", *words)


def test_a_file_of_options_may_have_them_too(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("use-flash-attn: true\nno-rope-fusion: false\nrotary-percent: 1.0\nmodel-parallel-size: 2\n")
    config, told = taken("gpt", [*MOCK, "--config", str(file)], 2)
    assert config.tensor_model_parallel_size == 2
    assert "--use-flash-attn" in " ".join(told) and "--no-rope-fusion" not in " ".join(told)
    for words in (["--tensor-model-parallel-size", "1"], ["--model-parallel-size", "1"]):  # flags win
        assert taken("gpt", [*MOCK, "--config", str(file), *words])[0].tensor_model_parallel_size == 1
    file.write_text("tensor-model-parallel-size: 2\n")
    assert taken("gpt", [*MOCK, "--config", str(file), "--model-parallel-size", "1"])[0].tensor_model_parallel_size == 1
    file.write_text("optimizer: sgd\n")
    assert "--optimizer sgd" in refusal("gpt", "--config", str(file))
    taken("gpt", [*MOCK, "--config", str(file), "--optimizer", "adam"])  # flags win


def test_another_command_has_no_such_flags() -> None:
    from trainers.generate import COMMAND

    with pytest.raises(OptionError, match="unrecognized arguments: --use-flash-attn"):
        COMMAND.parse(["--use-flash-attn"])
