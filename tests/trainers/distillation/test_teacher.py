"""A student and its teacher: equal losses at every layout, what they are, where a student starts, and refusals."""

import json

import pytest
import torch

from tests.support.training.runs import Runs, measured, weights

pytestmark = pytest.mark.slow

STEPS = 20
SMALL = [
    "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--make-vocab-size-divisible-by", "64",
    "--micro-batch-size", "1", "--global-batch-size", "4", "--log-interval", "1", "--lr", "5e-3", "--mock-data",
    "--vocab-size", "100", "--eval-iters", "2",
]  # fmt: skip
GPT = [*SMALL, "--sample-tokens", "0"]
STUDENT = ["--num-layers", "2", "--train-iters", str(STEPS), "--hidden-dropout", "0.1"]
TENSOR, TEACHER = "--tensor-model-parallel-size", "--teacher-tensor-model-parallel-size"
#: the ranks of each layout, and its options
LAYOUTS = {
    "TP 2": (2, [TENSOR, 2]), "TP 2, teacher 1": (2, [TENSOR, 2, TEACHER, 1, "--sequence-parallel"]),
    "teacher 2": (2, [TEACHER, 2]), "PP 2": (2, ["--pipeline-model-parallel-size", 2]),
    "ZeRO-1": (2, ["--use-distributed-optimizer"]),
    "TP 2, teacher 4": (4, [TENSOR, 2, TEACHER, 4, "--sequence-parallel"]),
    "TP 4, teacher 2": (4, [TENSOR, 4, TEACHER, 2]),
    "PP 2, teacher 2": (4, ["--pipeline-model-parallel-size", 2, TEACHER, 2]),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pretrain):
    """The folder of each run by (command, name)."""
    root = tmp_path_factory.mktemp("distillation")
    made = {}
    for kind, base in (("gpt", GPT), ("bert", SMALL)):
        teacher = root / f"{kind}-teacher"
        commands = {"teacher": (1, [*base, "--num-layers", 4, "--train-iters", 10])}
        student = [*base, *STUDENT, "--teacher", teacher, "--distill-cosine", 0.7]
        commands["1"] = (1, student)
        commands["no angle"] = (1, [*student, "--distill-cosine", 0])
        commands["alpha 0"] = (1, [*student, "--distill-alpha", 0, "--distill-cosine", 0])
        commands["alone"] = (1, [*base, *STUDENT])
        commands["from layers"] = (1, [*student, "--student-layers", "3,1", "--train-iters", 1, "--lr", "1e-12"])
        half = ["--bf16", "--use-distributed-optimizer", TENSOR, 2]
        commands["from layers, in halves"] = (
            2,
            [*student, "--student-layers", "3,1", "--train-iters", 1, "--lr", "1e-12", *half],
        )
        commands |= {name: (ranks, [*student, *words]) for name, (ranks, words) in LAYOUTS.items()}
        folders = {name: root / f"{kind}-{name}" for name in commands}
        made[kind] = Runs(commands, folders, pretrain, command=f"pretrain_{kind}")
    return made


def rows_of(runs, kind, name, rows):
    """The numbers of a run, after its teacher's, by iteration and name."""
    runs[kind]["teacher"]
    folder = runs[kind][name]
    more = {
        (row["iteration"], "distillation_loss"): row["distillation_loss"] for row in rows(folder, "distillation_loss")
    }
    return measured(folder, rows) | more


@pytest.mark.parametrize("kind, layout", [
    ("gpt", "TP 2, teacher 1"), ("gpt", "PP 2"), ("bert", "teacher 2"),
    *(
        pytest.param(kind, layout, marks=pytest.mark.long) for kind in ("gpt", "bert") for layout in LAYOUTS
        if (kind, layout) not in {("gpt", "TP 2, teacher 1"), ("gpt", "PP 2"), ("bert", "teacher 2")}
    ),
])  # fmt: skip
def test_losses_are_those_of_one_rank(runs, rows, kind, layout):
    expected, found = (rows_of(runs, kind, name, rows) for name in ("1", layout))
    assert set(found) == set(expected) and (STEPS, "distillation_loss") in found
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4 if key[1] == "grad_norm" else 1e-5, abs=1e-6), key


def test_with_alpha_0_it_is_the_run_without_a_teacher(runs, rows):
    expected, found = (rows_of(runs, "gpt", name, rows) for name in ("alone", "alpha 0"))
    for (step, name), value in expected.items():
        name = "distillation_loss" if name == "lm_loss" else name
        assert found[step, name] == pytest.approx(value, rel=1e-6), (step, name)


def test_a_student_learns_what_its_teacher_says(runs, rows):
    """The held-out loss is that of the text alone; that of the training has both parts, and both fall."""
    found = rows_of(runs, "gpt", "1", rows)
    assert found[STEPS, "distillation_loss"] < found[1, "distillation_loss"] - 0.3
    assert found[STEPS, "validation_loss"] > found[STEPS, "distillation_loss"] + 1
    report = json.loads((runs["gpt"]["1"] / "report.json").read_text())
    assert report["validation_loss"] == pytest.approx(found[STEPS, "validation_loss"])


@pytest.mark.parametrize("kind", ["gpt", pytest.param("bert", marks=pytest.mark.long)])
def test_the_angle_of_the_first_step(runs, rows, kind):
    """It is about that of drawn weights, which is right, and it makes another run."""
    found, without = (rows_of(runs, kind, name, rows) for name in ("1", "no angle"))
    first = found[1, "distillation_loss"] - without[1, "distillation_loss"]
    assert 0.7 * 0.5 < first < 0.7 * 1.5
    last = found[STEPS, "distillation_loss"] - without[STEPS, "distillation_loss"]
    assert last < 0.8 * first


@pytest.mark.parametrize("kind, name", [
    ("gpt", "from layers"), pytest.param("bert", "from layers", marks=pytest.mark.long),
    pytest.param("gpt", "from layers, in halves", marks=pytest.mark.long),
])  # fmt: skip
def test_a_student_starts_from_layers_of_its_teacher(runs, kind, name):
    teacher, halves = weights(runs[kind]["teacher"], 10), "halves" in name
    student = weights(runs[kind][name], 1)
    for name, one in student.items():
        theirs = name
        for number, layer in enumerate((3, 1)):
            if name.startswith(f"layers.{number}."):
                theirs = name.replace(f"layers.{number}.", f"layers.{layer}.", 1)
        expected = teacher[theirs].bfloat16().float() if halves else teacher[theirs]
        torch.testing.assert_close(one.float(), expected, rtol=0, atol=1e-9)


REFUSED = {
    "--distill-temperature 0": "--distill-temperature 0",
    "--distill-alpha 1.5": "--distill-alpha 1.5",
    "--distill-cosine -1": "--distill-cosine -1",
    "--distill-cosine 1 --hidden-size 48": "--distill-cosine 1.0: --teacher {teacher} is 32 wide, and the run 48; val",
    "--vocab-size 101": "--teacher {teacher}: has 100 tokens, and the run 101; valid: a teacher with the same",
    "--make-vocab-size-divisible-by 48": "--make-vocab-size-divisible-by 48: pads the vocabulary to 144",
    "--seq-length 32": "--seq-length 32: --teacher {teacher} knows 16 positions; valid: at most as many",
    "--dry-run": "--dry-run: excludes --teacher",
    "--student-layers 0,4": "--student-layers 0,4: want 2 numbers, one for each layer, from 0 to 3",
    "--student-layers 0": "--student-layers 0: want 2 numbers",
    "--student-layers a,b": "--student-layers a,b: want numbers of layers, such as 0,2,4",
    "--student-layers 0,1 --ffn-hidden-size 96": "--student-layers 0,1: layers.0.mlp.up.weight is [96, 32] in the run",
    "--student-layers 0,1 --pipeline-model-parallel-size 2": "--student-layers 0,1: needs a teacher with the same",
    "--teacher-tensor-model-parallel-size 3": "--teacher-tensor-model-parallel-size 3: must divide",
    "--context-parallel-size 2": "--context-parallel-size 2: excludes --teacher",
    "--deterministic": "--deterministic: excludes --teacher",
    "--teacher {none}": "--teacher {none}: no such folder; valid: the --save folder",
    "--teacher {bert}": "holds a BERT, and a GPT is needed",
}


def test_refusals(runs, pretrain, tmp_path):
    names = {"teacher": runs["gpt"]["teacher"], "bert": runs["bert"]["teacher"], "none": tmp_path / "none"}
    student = [*GPT, *STUDENT, "--teacher", names["teacher"]]
    commands = [(2, [*student, *words.format(**names).split(), "--save", tmp_path / "run"]) for words in REFUSED]
    commands.append((2, [*GPT, *STUDENT, "--distill-alpha", "0.3", "--save", tmp_path / "run"]))
    said = [*(words.format(**names) for words in REFUSED.values()), "--distill-alpha 0.3: needs --teacher"]
    for outcome, words in zip(pretrain(*commands), said, strict=True):
        assert set(outcome.codes) == {2} and words in outcome.err[0], (words, outcome.err)
        assert outcome.err[0].count("\n") == 1 and outcome.err[1] == ""
