"""The training command after --: its places, its settings, and how far its run has come."""

import pytest

from commengine import UsageError
from trainers.supervision.command import STEP_FILE, Position, TrainingCommand
from trainers.supervision.settings import Size, SuperviseSettings

_LAUNCH = "mpirun -n {ranks} python -m trainers.pretrain_gpt --mock-data --vocab-size 100 --global-batch-size 8"
LAUNCH = _LAUNCH.split()
SAVED = ["--save", "runs/x", "--load", "runs/x", "--save-interval", "5"]


def command(words, **given):
    settings = SuperviseSettings(**({"ranks": "4,2"} | given))
    settings.validate()
    return TrainingCommand(words, settings)


def test_places_are_filled_and_the_step_is_asked_for():
    words = ["env", "HOSTS={hosts}", *LAUNCH, *SAVED, "--tensor-model-parallel-size={tensor}"]
    made = command(words, ranks="4:2,2:1", hosts="a:2,b:2")
    filled = made.to_start(Size(4, 2), {"a": 2, "b": 2})
    assert filled[:5] == ["env", "HOSTS=a:2,b:2", "mpirun", "-n", "4"]
    assert filled[-3:] == ["--tensor-model-parallel-size=2", "--step-file", f"runs/x/{STEP_FILE}"]


def test_a_command_without_ranks_is_started_as_it_is():
    words = ["srun", "python", "-m", "trainers.pretrain_bert", "--mock-data", "--vocab-size", "100", *SAVED]
    assert command(words, ranks=None).to_start(None, {})[: len(words)] == words


def test_a_training_may_be_started_by_commengine():
    rest = ["--mock-data", "--vocab-size", "100", *SAVED]
    words = ["srun", "/opt/bin/commengine", "train", "bert", *rest]
    assert command(words, ranks=None).to_start(None, {})[: len(words)] == words
    with pytest.raises(UsageError, match="must start python -m"):
        command(["srun", "commengine", "generate", *rest], ranks=None)
    with pytest.raises(UsageError, match=r"^trainers\.pretrain_bert: .*--nothing"):
        command([*words, "--nothing"], ranks=None)


def test_a_fine_tuning_is_supervised_as_other_trainings_are(tmp_path):
    start = ["srun", "python", "-m", "trainers.finetune", "--task", "qqp", "--data", str(tmp_path)]
    words = [*start, "--pretrained-checkpoint", "runs/bert", *SAVED]
    made = command(words, ranks=None)
    assert made.to_start(None, {})[: len(words)] == words and str(made.folder) == "runs/x"


@pytest.mark.parametrize(
    "words, given, says",
    [
        (["true"], {"ranks": None}, "must start python -m trainers.pretrain_gpt or -m trainers.pretrain_bert or -m"),
        ([*LAUNCH], {}, "needs --save DIR --load DIR"),
        ([*LAUNCH, "--save", "a", "--load", "b", "--save-interval", "5"], {}, "--load DIR, of one folder"),
        ([*LAUNCH, "--save", "a", "--save-interval", "5"], {}, "--load DIR, of one folder"),
        ([*LAUNCH, "--save", "a", "--load", "a/../a"], {}, "and --save-interval N"),
        ([*LAUNCH, *SAVED], {"ranks": None}, "--ranks, and {ranks}"),
        ([*LAUNCH, *SAVED], {"ranks": "4:2"}, "--ranks N:T, and {tensor}"),
        ([*LAUNCH, *SAVED], {"hosts": "a:4"}, "--hosts, and {hosts}"),
        ([*LAUNCH, *SAVED, "{hosts}"], {}, "--hosts, and {hosts}"),
        ([*LAUNCH, *SAVED, "--frobnicate"], {}, "--frobnicate"),
        ([*LAUNCH, *SAVED, "--tensor-model-parallel-size", "4"], {}, "on 2 ranks: --tensor-model-parallel-size 4"),
        ([*LAUNCH, *SAVED, "--micro-batch-size", "4"], {}, "on 4 ranks: --global-batch-size 8"),
        (
            [*LAUNCH, *SAVED, "--hidden-size", "8", "--num-attention-heads", "4",
             "--tensor-model-parallel-size", "{tensor}"],
            {"ranks": "4:2,3:3"},
            "on 3 ranks: --tensor-model-parallel-size 3 does not divide all of --num-attention-heads 4",
        ),
        (
            [*(word for word in LAUNCH if word not in ("--global-batch-size", "8")), *SAVED], {},
            "needs --global-batch-size",
        ),
    ],
)  # fmt: skip
def test_a_command_that_cannot_be_supervised_is_refused(words, given, says):
    with pytest.raises(UsageError) as error:
        command(words, **given)
    assert says in str(error.value)


def test_position_is_what_the_run_has_written(tmp_path):
    words = [*LAUNCH, "--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "5"]
    made = command(words)
    assert made.position() == Position(None, 0)
    (tmp_path / STEP_FILE).write_text("17                 \n")
    assert made.position() == Position(17, 0)
    (tmp_path / STEP_FILE).write_text("")
    assert made.step() is None
    made.forget_step()
    assert not (tmp_path / STEP_FILE).exists()
    made.forget_step()
