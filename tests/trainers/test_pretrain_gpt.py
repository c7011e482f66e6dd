"""The command: what it refuses and how, what it reports, that it learns, and that a dead rank ends it."""

import json
import math
import re
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support import mpirun
from tests.support.training.runs import has_long_tests
from trainers.data.indexed import IndexedDataset
from trainers.data.indexed_writer import IndexedDatasetWriter

pytestmark = pytest.mark.slow

COMMAND = ["-m", "trainers.pretrain_gpt"]


def text() -> str:
    """Documents whose words follow from the words before: far more to learn than how often each occurs."""
    animals, verbs, places = (
        ["cat", "dog", "owl", "fox"],
        ["sleeps", "runs", "hides", "sings"],
        ["barn", "wood", "hill"],
    )
    lines = []
    for n in range(600):
        animal, verb, place = animals[n % 4], verbs[(n // 4) % 4], places[(n // 2) % 3]
        lines.append(f"The {animal} {verb} near the old {place}, and then the {animal} {verb} again in the {place}.")
    return "\n\n".join(lines)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The prefix of a data set of that text, as preprocess_data makes it, with its tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(text())
    words = ["--input", str(folder / "text.txt"), "--split-on-blank-lines", "--train-bpe", "290"]
    argv = [sys.executable, "-m", "trainers.preprocess_data", *words, "--output-prefix", str(folder / "tokens")]
    done = subprocess.run(argv, env=mpirun.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "tokens"


def dataset(prefix: Path, documents: list[list[int]]) -> str:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for tokens in documents:
            writer.add_document(np.array(tokens))
    return str(prefix)


# Bad input ------------------------------------------------------------------------------------------------------

# Arguments (placeholders: {dir}, a folder; {data}, the data set), and what the one line must say, as patterns.
REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "TP does not divide the world": (["--tensor-model-parallel-size", "3"], ["--tensor-model-parallel-size 3", r"\[1"]),
    "TP 0": (["--tensor-model-parallel-size", "0"], ["--tensor-model-parallel-size 0", "at least 1"]),
    "heads do not divide hidden": (["--num-attention-heads", "5"], ["num.attention.heads.5", "hidden.size.32"]),
    "global batch": (["--micro-batch-size", "3"], ["--global-batch-size 8", "--micro-batch-size 3", "such as 6"]),
    "no layers": (["--num-layers", "0"], ["--num-layers 0", "at least 1"]),
    "negative seed": (["--seed=-1"], ["--seed -1", "negative"]),
    "seed of too many bits": (["--seed", str(2**63)], ["--seed 9223372036854775808", "below 2..63"]),
    "dropout of 1": (["--hidden-dropout", "1"], ["--hidden-dropout 1.0", "below 1"]),
    "min-lr above lr": (["--lr", "0.1", "--min-lr", "0.2"], ["--min-lr 0.2", "--lr 0.1"]),
    "lr not a number": (["--lr", "nan"], ["--lr nan"]),
    "lr without end": (["--lr", "inf"], ["--lr inf", "finite"]),
    "a loss scale that fp32 does not hold": (
        ["--fp16", "--min-loss-scale", "1e-40"],
        ["--min-loss-scale 1e-40", "2..-126"],
    ),
    "negative init": (["--init-method-std=-1"], ["--init-method-std -1.0", "negative"]),
    "no eps": (["--adam-eps", "0"], ["--adam-eps 0.0", "positive"]),
    "negative eps": (["--adam-eps=-1"], ["--adam-eps -1.0", "negative"]),
    "sequence above positions": (
        ["--max-position-embeddings", "8"],
        ["--seq-length 16", "--max-position-embeddings 8"],
    ),
    "unknown flag": (["--frobnicate", "3"], ["--frobnicate"]),
    "abbreviated flag": (["--num-lay", "3"], ["--num-lay"]),
    "wrong type": (["--num-layers", "two"], ["--num-layers", "two"]),
    "not a choice": (["--lr-decay-style", "square"], ["--lr-decay-style", "square", "cosine"]),
    "missing value": (["--num-layers"], ["--num-layers"]),
    "no configuration file": (["--config", "{dir}/none.yaml"], ["--config", "none.yaml"]),
    "configuration is a folder": (["--config", "{dir}"], ["{dir}"]),
    "configuration of unknown keys": (["--config", "{dir}/unknown.yaml"], ["frobnicate"]),
    "configuration of a wrong type": (["--config", "{dir}/type.yaml"], ["--clip-grad", "two"]),
    "configuration is a list": (["--config", "{dir}/list.yaml"], ["--config", "list.yaml"]),
    "configuration is not YAML": (["--config", "{dir}/broken.yaml"], ["--config", "broken.yaml"]),
    "mock data and a data set": (["--data-path", "{data}"], ["--mock-data", "--data-path"]),
    "mock data without vocabulary": (["{plain}", "--mock-data"], ["--vocab-size"]),
    "no data at all": (["{plain}"], ["--data-path", "--mock-data"]),
    "data set is not there": (["{plain}", "--data-path", "{dir}/none"], ["--data-path", "none.bin"]),
    "data set named by a file": (
        ["{plain}", "--data-path", "{data}.bin"],
        ["--data-path {data}.bin", r"\.bin\.bin does not exist", "give the prefix alone: {data}$"],
    ),
    "data set without vocabulary": (["{plain}", "--data-path", "{dir}/bare"], ["--vocab-size"]),
    "data set is damaged": (["{plain}", "--vocab-size", "9", "--data-path", "{dir}/cut"], ["cut.idx", "truncated"]),
    "data set is empty": (["{plain}", "--vocab-size", "9", "--data-path", "{dir}/empty"], ["empty"]),
    "vocabulary below the tokenizer's": (
        ["{plain}", "--data-path", "{data}", "--vocab-size", "200"],
        ["--vocab-size 200"],
    ),
    "no tokenizer there": (
        ["{plain}", "--data-path", "{data}", "--tokenizer-model", "{dir}/no"],
        ["--tokenizer-model", "no"],
    ),
    "not a tokenizer": (
        ["{plain}", "--data-path", "{data}", "--tokenizer-model", "{dir}/list.yaml"],
        ["--tokenizer-model", "list.yaml"],
    ),
    "split of no weights": (["{plain}", "--data-path", "{data}", "--split", "a,b"], ["--split a,b", "weights"]),
    "split without validation": (
        ["{plain}", "--data-path", "{data}", "--split", "1,0,0", "--eval-iters", "1"],
        ["--split 1,0,0", "--eval-iters 0"],
    ),
    "sequence longer than the data": (
        ["{plain}", "--data-path", "{dir}/bare", "--vocab-size", "9", "--seq-length", "100"],
        ["seq.length 100", "20 tokens"],
    ),
    "token outside the vocabulary": (
        ["{plain}", "--data-path", "{dir}/outside", "--vocab-size", "50"],
        ["step 1", "vocabulary of 50", "--vocab-size"],
    ),
    "one rank's token outside": (
        ["{plain}", "--data-path", "{dir}/once", "--vocab-size", "50", "--train-iters", "9"],
        ["vocabulary of 50"],
    ),
    "held-out token outside": (
        ["{plain}", "--data-path", "{dir}/held", "--vocab-size", "50", "--eval-iters", "9", "--split", "80,20"],
        ["held-out", "vocabulary of 50"],
    ),
    "save below a file": (["--save", "{dir}/file/run"], ["--save {dir}/file/run"]),
    "save is a file": (["--save", "{dir}/file"], ["--save {dir}/file"]),
    "tensorboard below a file": (["--tensorboard-dir", "{dir}/file/run"], ["--tensorboard-dir {dir}/file/run"]),
    "two half precisions": (["--bf16", "--fp16"], ["--bf16 and --fp16", "exclude each other"]),
    "loss scale without fp16": (["--loss-scale", "8"], ["--loss-scale 8.0", "--fp16"]),
    "loss scale 0": (["--fp16", "--loss-scale", "0"], ["--loss-scale 0.0", "positive"]),
    "smallest loss scale above the first": (
        ["--fp16", "--min-loss-scale", "4", "--initial-loss-scale", "2"],
        ["--min-loss-scale 4.0", "--initial-loss-scale 2.0"],
    ),
    "no hysteresis": (["--fp16", "--hysteresis", "0"], ["--hysteresis 0", "at least 1"]),
    "smallest loss scale overflows": (
        ["--fp16", "--min-loss-scale", "1e30", "--initial-loss-scale", "1e30", "--train-iters", "3"],
        ["step 2", r"loss scale of 1e\+30", "--min-loss-scale", "--bf16"],
    ),
    "a value of two dashes": (["--save=--"], ["--save: expected a value"]),
    "an empty value, of a variable that is not set": (["--load", ""], ["--load: expected a value, and got an empty"]),
    "a byte that is not UTF-8": (["--save", "runs/caf\udce9"], ["--save", "UTF-8"]),
    "a number of more than 64 bits": (["--train-iters", "9" * 30], ["--train-iters 9{30}", "below 2..63"]),
    "a number of more digits than a page": (["--train-iters", "9" * 100_000], ["^.{1,2100}$", "--train-iters"]),
    "a key that is there twice": (
        ["--config", "{dir}/twice.yaml"],
        ["--config {dir}/twice.yaml", "seq-length", "twice"],
    ),
    "a list for a flag": (["--config", "{dir}/flag.yaml"], ["--config: bf16: want one value"]),
    "a mapping for an option": (["--config", "{dir}/nested.yaml"], ["--config: lr: want one value"]),
    "a key that is a number": (["--config", "{dir}/number.yaml"], ["number.yaml: line 1: '3' is no key"]),
    "a file that names another": (["--config", "{dir}/more.yaml"], ["more.yaml: config: is no option of a file"]),
    "aliases": (["--config", "{dir}/alias.yaml"], ["alias.yaml: line 1: no anchors and aliases"]),
    "a CPU of a number": (["--device", "cpu:5"], ["--device cpu:5: must be cpu, cuda"]),
    "a split of words on mock data": (["--split", "a"], ["--split a: want up to three weights"]),
    "a split without end": (["--split", "1e99999999,1"], ["--split 1e99999999,1"]),
    "a warm-up longer than the decay": (
        ["--lr-warmup-iters", "9", "--lr-decay-iters", "9"],
        ["--lr-warmup-iters 9: must be below --lr-decay-iters 9"],
    ),
    "a model that no memory holds": (
        ["--hidden-size", "1048576", "--num-layers", "100"],
        ["the model needs [\\d,.]+ GB a rank", "--hidden-size 1048576"],
    ),
    "a micro-batch that no memory holds": (
        ["--micro-batch-size", str(2**24), "--global-batch-size", str(2**25), "--seq-length", "4096"],
        ["the model needs", f"--micro-batch-size {2**24}"],
    ),
    "a norm that does not exist": (["--normalization", "L2"], ["--normalization", "L2", "RMSNorm"]),
    "query groups without grouped queries": (
        ["--num-query-groups", "2"],
        ["--num-query-groups 2: needs --group-query-attention"],
    ),
    "query groups that do not divide the heads": (
        ["--group-query-attention", "--num-query-groups", "3"],
        [r"--num-query-groups 3 does not divide --num-attention-heads 4; \[1, 2, 4\] do"],
    ),
    "scaling of positions that are learned": (
        ["--use-rope-scaling"],
        ["--use-rope-scaling: needs --position-embedding-type rope"],
    ),
    "scaling without a middle": (
        ["--position-embedding-type", "rope", "--use-rope-scaling", "--rope-low-freq-factor", "4"],
        ["--rope-low-freq-factor 4.0: must be below --rope-high-freq-factor 4.0"],
    ),
    "rotated heads of an odd size": (
        ["--position-embedding-type", "rope", "--kv-channels", "5"],
        ["--kv-channels 5 is odd"],
    ),
    "grouped queries that no memory holds": (
        ["--hidden-size", "1048576", "--num-layers", "100", "--group-query-attention", "--swiglu"],
        ["the model needs [\\d,.]+ GB a rank", "--hidden-size 1048576"],
    ),
    "verified mock data": (["--verify-data"], ["--verify-data: mock data"]),
    "a data set with a changed byte": (
        ["{plain}", "--vocab-size", "9", "--data-path", "{dir}/flipped", "--verify-data"],
        [r"--verify-data: {dir}/flipped.bin: damaged: bytes 0 to 40"],
    ),
    "a data set without checksums": (
        ["{plain}", "--vocab-size", "9", "--data-path", "{dir}/old", "--verify-data"],
        ["{dir}/old.xxh3 does not exist"],
    ),
    "exit without save": (["--exit-interval", "2"], ["--exit-interval", "--save"]),
    "save interval without save": (["--save-interval", "2"], ["--save-interval", "--save"]),
}


@pytest.fixture(scope="module")
def refused(request, tmp_path_factory, data, tiny, mock, pretrain):
    """(ranks, case) -> (outcome, what the line must say)."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in (
        ("unknown.yaml", "frobnicate: 3\n"), ("type.yaml", "clip-grad: two\n"), ("list.yaml", "- num-layers\n- 2\n"),
        ("broken.yaml", "num-layers: [2\n"), ("file", "x"), ("twice.yaml", "seq-length: 16\nseq-length: 8\n"),
        ("flag.yaml", "bf16: [true]\n"), ("nested.yaml", "lr: {a: 1}\n"), ("number.yaml", "3: 4\n"),
        ("more.yaml", "config: type.yaml\n"), ("alias.yaml", "split: &a [a, a]\nsave: [*a, *a]\n"),
    ):  # fmt: skip
        (folder / name).write_text(content)
    for name in ("bare", "flipped", "old"):
        dataset(folder / name, [[1, 2, 3, 4, 5]] * 4)
    (folder / "old.xxh3").unlink()
    (folder / "flipped.bin").write_bytes((folder / "bare.bin").read_bytes()[:-2] + struct.pack("<H", 4))
    dataset(folder / "cut", [[1, 2, 3]])
    (folder / "cut.idx").write_bytes((folder / "cut.idx").read_bytes()[:40])
    dataset(folder / "empty", [])
    dataset(folder / "outside", [[1, 2, 60] * 50] * 4)
    dataset(folder / "once", [[1, 2, 3] * 50] * 4 + [[1, 2, 3] * 20 + [60] + [1, 2, 3] * 20])
    dataset(folder / "held", [[1, 2, 3] * 50] * 4 + [[1, 2, 60] * 50])
    places = {"{dir}": str(folder), "{data}": str(data)}

    def filled(word: str) -> str:
        for place, value in places.items():
            word = word.replace(place, value)
        return word

    commands, keys = [], []
    for n in (1, 2) if has_long_tests(request) else (2,):
        for name, (words, _) in REFUSED.items():
            base = tiny if words[0] == "{plain}" else mock
            arguments = [filled(word) for word in words if word != "{plain}"]
            commands.append((n, [*base, "--train-iters", "2", *arguments]))
            keys.append((n, name))
    outcomes = pretrain(*commands)
    says = {name: [filled(words) for words in patterns] for name, (_, patterns) in REFUSED.items()}
    return {key: (outcome, says[key[1]]) for key, outcome in zip(keys, outcomes, strict=True)}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.long), 2])
def test_bad_input_is_one_line_and_exit_code_2_on_all_ranks(refused, n, name):
    outcome, says = refused[n, name]
    assert outcome.codes == [2] * n, outcome.err
    assert all(err == "" for err in outcome.err[1:])
    assert "Traceback" not in outcome.err[0]
    (line,) = [line for line in outcome.err[0].splitlines() if line.startswith("error: ")]
    assert outcome.err[0].count("error:") == 1
    for pattern in says:
        assert re.search(pattern, line), line
    assert all(out == "" for out in outcome.out)


@pytest.mark.parametrize(
    "words, says",
    [
        (
            ["--mock-data", "--vocab-size", "100", "--tensor-model-parallel-size", "3"],
            "error: --tensor-model-parallel-size 3",
        ),
        (["--help"], ""),
    ],
)
def test_under_mpiexec(words, says):
    """The exit code, one line, one help text: as a shell sees them."""
    began = time.monotonic()
    done = mpirun.run(2, *COMMAND, *words)
    assert time.monotonic() - began < 30
    if says:
        assert done.returncode == 2
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert [line for line in lines if "error:" in line] == [line for line in lines if line.startswith(says)]
        assert sum(line.startswith(says) for line in lines) == 1 and "Traceback" not in done.stderr
    else:
        assert done.returncode == 0
        assert done.stdout.startswith("usage: pretrain_gpt") and done.stdout.count("usage:") == 1
        assert "--tensor-model-parallel-size" in done.stdout


# Runs that end well ---------------------------------------------------------------------------------------------

YAML = """
num-layers: 2
hidden-size: 32
num-attention-heads: 4
seq_length: 32
micro-batch-size: 8
global-batch-size: 16
train-iters: 999
lr: 1.0e-2
lr-warmup-iters: 5
hidden-dropout: 0
attention-dropout: 0
log-interval: 20
eval-interval: 50
eval-iters: 100
sample-tokens: 12
make-vocab-size-divisible-by: 128
split: "80,15,5"
overlap_grad_reduce: true
"""

# What importing TensorBoard meets on a machine without it.
NO_TENSORBOARD = """
import sys
sys.modules["tensorboard"] = None
"""


@pytest.fixture(scope="module")
def learned(tmp_path_factory, data):
    """A run on the text, by file and flags, on two data-parallel ranks; its folder and its output."""
    folder = tmp_path_factory.mktemp("learned")
    (folder / "run.yaml").write_text(YAML)
    words = ["--config", str(folder / "run.yaml"), "--train-iters", "120", "--data-path", str(data)]
    done = mpirun.run(2, *COMMAND, *words, "--save", str(folder / "run"), timeout=90)
    assert done.returncode == 0, done.stderr
    return folder / "run", done


@pytest.fixture(scope="module")
def report(learned):
    return json.loads((learned[0] / "report.json").read_text())


FP16 = ["--fp16", "--initial-loss-scale", str(2.0**26), "--hysteresis", "1", "--loss-scale-window", "4"]
TRACED = (1, 2, 0)  # every how many steps
#: the example of Megatron-LM's README for GPT, with small numbers and mock data, as two of its versions spell it
MEGATRON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 3 --lr-decay-iters 320 "
    "--lr-decay-style cosine --lr-warmup-fraction .01 --fp16 --log-interval 1 --save-interval 500 --eval-interval 100 "
    "--eval-iters 1 --checkpoint-activations --distributed-backend nccl --tokenizer-type NullTokenizer "
    "--vocab-size 100 --mock-data --device cpu"
)


@pytest.fixture(scope="module")
def short(tmp_path_factory, data, tiny, mock, pretrain):
    """Runs of a few steps, all in one job: name -> (outcome, folder)."""
    root = tmp_path_factory.mktemp("short")
    plain = [*tiny, "--data-path", data, "--train-iters", "3", "--sample-tokens", "4", "--split", "1,0,0"]
    evaluated = ["--train-iters", "3", "--eval-iters", "3", "--eval-interval", "2", "--sample-tokens", "3"]
    tensor = ["--tensor-model-parallel-size", "2"]
    scaled = [*FP16, *tensor, "--use-distributed-optimizer", "--lr-warmup-iters", "10", "--lr", "1e-3"]
    commands = {
        "fp16": (2, [*mock, *scaled, "--train-iters", "20", "--save", root / "fp16"]),
        "off": (1, [*plain, "--save", root / "off"]),
        "on": (2, [*mock, *evaluated, *tensor, "--save", root / "on"]),
        "not saved": (1, [*mock, "--train-iters", "1"]),
        "megatron": (2, [*MEGATRON.split(), "--save", root / "megatron", "--load", root / "megatron"]),
    }
    for steps in TRACED:
        traced = ["--log-communication-interval", str(steps), "--save", root / f"traced {steps}"]
        commands[f"traced {steps}"] = (2, [*mock, "--train-iters", "5", *traced])
    ended = zip(commands, pretrain(*commands.values()), strict=True)
    return {name: (outcome, root / name) for name, outcome in ended}


def test_flags_win_over_the_file(learned, report):
    state = json.loads((learned[0] / "iter_0000120" / "state.json").read_text())
    assert report["iteration"] == state["settings"]["train_iters"] == 120
    assert state["settings"]["num_layers"] == 2 and state["settings"]["overlap_grad_reduce"] is True
    assert state["settings"]["clip_grad"] == 1.0  # in neither


def test_rows_are_those_asked_for(learned, report, rows):
    found = rows(learned[0])
    assert [row["iteration"] for row in found] == [20, 40, 60, 80, 100, 120]
    assert all(row["tokens_per_second"] > 0 and row["iteration_ms"] > 0 for row in found)
    assert found[-1]["lm_loss"] == report["train_loss"]
    evaluations = rows(learned[0], "validation_loss")
    assert [row["iteration"] for row in evaluations] == [50, 100, 120]
    assert evaluations[-1]["validation_loss"] == report["validation_loss"]
    assert evaluations[0]["validation_loss"] > evaluations[-1]["validation_loss"]


@pytest.mark.long
def test_what_an_fp16_run_says_of_its_loss_scale(short, rows):
    """It begins with a scale that truly overflows, and finds one that does not. The losses are not scaled."""
    outcome, folder = short["fp16"]
    assert outcome.codes == [0, 0], outcome.err
    found = rows(folder)
    skipped = [row["grad_norm"] is None for row in found]
    assert 3 < skipped.count(True) < 15 and all(skipped[:3])
    scale = 2.0**26
    good = 0
    for number, (row, bad) in enumerate(zip(found, skipped, strict=True), 1):
        good = 0 if bad else good + 1
        scale *= 0.5 if bad else 2.0 if good % 4 == 0 else 1.0
        assert row["loss_scale"] == scale and row["skipped"] == sum(skipped[:number])
        done = number - 1 - sum(skipped[: number - 1])
        assert done >= 10 or row["learning_rate"] == pytest.approx(1e-3 * (done + 1) / 10)
        assert 4 < row["lm_loss"] < 5
    report = json.loads((folder / "report.json").read_text())
    assert report["skipped_steps"] == sum(skipped) and report["loss_scale"] == scale
    assert f"skipped steps{sum(skipped):>21,} of 20: the loss scale is {scale:g}" in outcome.out[0]


def test_the_example_of_megatrons_readme_trains(short, rows):
    outcome, folder = short["megatron"]
    assert outcome.codes == [0, 0], outcome.err
    assert [row["iteration"] for row in rows(folder)] == [1, 2, 3]
    said = outcome.err[0]
    assert said.count("--lr-warmup-fraction .01: is --lr-warmup-iters 3 here") == 1 and "here" not in outcome.err[1]
    assert said.count("--checkpoint-activations: is --recompute-granularity full here") == 1
    assert said.count("no effect here: --distributed-backend nccl (host tensors travel by MPI") == 1
    assert said.count("defaults that are not Megatron-LM's: --min-lr") == 1
    settings = json.loads((folder / "iter_0000003" / "state.json").read_text())["settings"]
    assert settings["recompute_granularity"] == "full" and settings["vocab_size"] == 100


def test_it_learns_more_than_how_often_tokens_occur(report):
    assert report["validation_loss"] < report["unigram_entropy"] - 1.5
    assert report["validation_loss"] > 0.05  # and the text has choices that nobody can foresee


def test_unigram_entropy_is_that_of_the_data(data, report):
    """Counted here from the tokens alone: add-one smoothed training counts, on the held-out labels."""
    found = IndexedDataset(data)
    documents = [found.document(i).tolist() for i in range(len(found))]
    assert len(documents) == 600
    training = Counter(token for document in documents[:480] for token in document)
    held_out = [token for document in documents[480:570] for token in document]
    labels = held_out[1 : (len(held_out) - 1) // 32 * 32 + 1]
    assert report["validation_tokens"] == len(labels)
    size = 290
    total = sum(training.values()) + size
    entropy = -sum(math.log((training[token] + 1) / total) for token in labels) / len(labels)
    assert report["unigram_entropy"] == pytest.approx(entropy, rel=1e-12)


def test_report_for_people_and_pictures(learned, report):
    folder, done = learned
    image = (folder / "loss.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n") and image.endswith(b"IEND\xaeB`\x82")
    assert (folder / "report.txt").read_text() in done.stdout
    assert done.stdout.count("held-out loss") == 1  # one rank speaks
    assert "[The " in done.stdout or "[" + report["sample_prompt"] in done.stdout
    assert len(report["sample"]) > 0 and report["sample"] in done.stdout
    assert report["tensor_model_parallel_size"] == 1 and report["data_parallel_size"] == 2
    # embedding 384 x 32, positions, 2 layers, the last norm: counted by hand
    layer = 4 * 32 * 32 + 4 * 32 + 2 * 4 * 32 * 32 + 5 * 32 + 4 * 32
    assert report["parameters"] == 384 * 32 + 32 * 32 + 2 * layer + 2 * 32


def test_communication_may_be_traced_in_some_steps_only(short):
    """The same training; the report says of how many steps it is, and each step has the same collectives."""
    outcomes, folders = zip(*(short[f"traced {steps}"] for steps in TRACED), strict=True)
    assert all(outcome.codes == [0, 0] for outcome in outcomes)
    every, some, none = (json.loads((folder / "report.json").read_text()) for folder in folders)
    assert [one["traced_steps"] for one in (every, some, none)] == [5, 2, 0]
    assert every["traced_seconds"] == every["step_seconds"] and none["traced_seconds"] == 0
    assert 0 < some["traced_seconds"] < some["step_seconds"]
    assert every["train_loss"] == some["train_loss"] == none["train_loss"]
    counts = [{row["operation"]: (row["count"], row["bytes"]) for row in one["communication"]} for one in (every, some)]
    assert counts[0].keys() == counts[1].keys() and none["communication"] == []
    for operation, (count, nbytes) in counts[0].items():
        assert counts[1][operation] == (count * 2 // 5, nbytes * 2 // 5)
    heads = [next(line for line in outcome.out[0].splitlines() if "of rank 0 in" in line) for outcome in outcomes]
    assert [head.removeprefix("communication of rank 0 in ") for head in heads] == [
        "training steps", "2 traced steps", "0 traced steps",
    ]  # fmt: skip
    assert "  not traced" in outcomes[2].out[0]


def test_report_counts_the_bytes_of_gradients(report):
    """Data-parallel, without TP: every step sums every gradient once, and two scalars."""
    (row,) = [row for row in report["communication"] if row["operation"] == "all_reduce"]
    assert row["group"] == "data" and row["size"] == 2
    assert 0 <= row["bytes"] - 120 * 4 * report["parameters"] <= 120 * 64


def test_other_ways_to_run(short, rows):
    """No evaluation; a split without validation documents then; more TP; no --save at all."""
    outcomes, folders = zip(*(short[name] for name in ("off", "on", "not saved")), strict=True)
    assert [outcome.codes for outcome in outcomes] == [[0], [0, 0], [0]], [outcome.err for outcome in outcomes]
    off, on = (json.loads((folder / "report.json").read_text()) for folder in folders[:2])
    assert off["validation_loss"] is None and off["unigram_entropy"] is None and off["validation_tokens"] == 0
    assert rows(folders[0], "validation_loss") == [] and "held-out" not in outcomes[0].out[0]
    assert on["validation_tokens"] == 3 * 8 * 16
    assert [row["iteration"] for row in rows(folders[1], "validation_loss")] == [2, 3]
    assert len(on["sample"].split()) == 3 and outcomes[1].out[1] == ""
    assert all(row["group"] == "tensor" for row in on["communication"])
    assert "1 steps" in outcomes[2].out[0] and "written to" not in outcomes[2].out[0]


# Ranks that die -------------------------------------------------------------------------------------------------

# In the third step one rank is gone, while the others run into a collective that it never joins.
DIE = (
    NO_TENSORBOARD
    + """
import os, signal
from commengine import launch
from trainers import pretrain_gpt
from trainers.training.trainer import Trainer
plain = Trainer.step
def step(self):
    if self.iteration == 3 and self.grid.world.rank == 1:
        if os.environ["HOW"] == "raise":
            raise KeyError("rank one has had enough")
        os.kill(os.getpid(), getattr(signal, os.environ["HOW"]))
    return plain(self)
Trainer.step = step
launch.run(pretrain_gpt.main)
"""
)


@pytest.mark.parametrize(
    "how, tensor",
    [
        pytest.param("raise", 1, marks=pytest.mark.long),
        ("raise", 2),
        pytest.param("SIGKILL", 2, marks=pytest.mark.long),
        pytest.param("SIGSTOP", 2, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_dies_in_training_ends_the_job(tmp_path, mock, rows, how, tensor):
    """On a machine without TensorBoard, too."""
    words = [*mock, "--train-iters", "100000", "--tensor-model-parallel-size", str(tensor), "--overlap-grad-reduce"]
    words += ["--distributed-timeout-minutes", "0.05", "--tensorboard-dir", str(tmp_path / "tensorboard")]
    began = time.monotonic()
    done = mpirun.run(2, "-c", DIE, *words, "--save", str(tmp_path), env={"HOW": how}, timeout=60)
    ended = time.monotonic()
    assert done.returncode != 0
    assert ended - began < 50
    last = (tmp_path / "metrics.jsonl").stat().st_mtime
    assert time.time() - (time.monotonic() - ended) - last < 10  # since the last step that was done
    assert len(rows(tmp_path)) == 3
    assert "nothing is written there, because TensorBoard is not installed" in done.stderr
    assert not list((tmp_path / "tensorboard").iterdir())
    if how == "raise":
        assert done.stderr.count("Traceback (most recent call last)") == 1
        assert "[rank 1] Traceback" in done.stderr and "rank one has had enough" in done.stderr
    else:
        assert "Traceback" not in done.stderr
    if how == "SIGSTOP":
        assert re.search(r"^missing: rank 1, all_reduce #\d+ \(it does not answer\)$", done.stderr, re.M), done.stderr
