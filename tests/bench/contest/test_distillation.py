"""The contest of students without its runs: what it goes on with, its table and its picture."""

import json

import pytest

from bench.contest import __main__ as command
from bench.contest import distillation

SIDES = ["alone", "with a teacher"]


def run(folder, name, losses, speed):
    """A folder as a run of training leaves it."""
    (folder / name).mkdir(parents=True)
    rows = [{"iteration": 5, "lm_loss": 9.0}]
    rows += [{"iteration": 10 * n, "validation_loss": loss} for n, loss in enumerate(losses, 1)]
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / name / "report.json").write_text(json.dumps({"tokens_per_second": speed}))


@pytest.fixture
def students(tmp_path):
    run(tmp_path, "teacher", [4, 3], 100)
    for seed, (alone, taught) in enumerate([(5.0, 4.5), (5.2, 4.9), (4.8, 4.6)]):
        run(tmp_path, f"alone-{seed}", [6, alone], 200 + seed)
        run(tmp_path, f"with-a-teacher-{seed}", [6.1, taught], 120)
    return tmp_path


def test_the_table_and_the_picture_of_runs_that_are_there(students, capsys):
    """Nothing is trained: the folder has all. The differences are those of one seed, and not of the means."""
    argv = ["distillation", "--folder", str(students), "--sides", *SIDES]
    assert command.main([*argv, "--plot", str(students / "curves.png"), "--json", str(students / "r.json")]) == 0
    page, said = capsys.readouterr()
    names, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "|" in line]
    alone, taught = (dict(zip(names, row, strict=True)) for row in rows)
    assert alone["held-out loss"] == "5.0000 [4.8000, 5.2000]" and alone["tokens a second"] == "201"
    assert taught["minus alone, of one seed"] == "-0.3333 [-0.5000, -0.2000]"
    assert "held-out loss of 3.0000 nats" in page and said == ""
    assert (students / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((students / "r.json").read_text())["cases"][0]["curves"]["alone"][1] == [[10, 6], [20, 5.2]]


def test_the_commands_of_the_runs_that_are_missing(tmp_path, monkeypatch):
    """Students of one seed differ in their teacher alone."""
    found = []

    def trained(ranks, words, log, seconds):
        folder = words[words.index("--save") + 1]
        found.append(" ".join(words))
        run(tmp_path, folder.rpartition("/")[2], [3], 1)
        return ""

    monkeypatch.setattr(distillation, "failed", trained)
    argv = ["distillation", "--folder", str(tmp_path), "--seeds", "2", "--num-layers", "6", "--steps", "24"]
    assert command.main(argv) == 0
    assert len(found) == 1 + 2 * len(distillation.SIDES) and "--num-layers 6" in found[0] and "600" in found[0]
    alone, _, _, layers = found[1:5]
    assert "--teacher" not in alone and "--num-layers 3 --seed 1" in alone and "--train-iters 24" in alone
    assert layers.endswith(f"--teacher {tmp_path}/teacher --student-layers 0,2,4")
    assert command.main(argv) == 0 and len(found) == 9


TINY = """
hidden-size: 16
num-attention-heads: 2
seq-length: 16
micro-batch-size: 4
global-batch-size: 8
make-vocab-size-divisible-by: 64
mock-data: true
vocab-size: 100
eval-iters: 2
lr: 1.0e-2
"""


@pytest.mark.long
@pytest.mark.slow
def test_one_seed_of_two_kinds(tmp_path, monkeypatch):
    """Real runs, of a tiny model on mock data."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.setattr(distillation, "CONFIG", str(tmp_path / "tiny.yaml"))
    argv = ["distillation", "--folder", str(tmp_path), "--seeds", "1", "--steps", "20", "--teacher-steps", "20"]
    assert command.main([*argv, "--sides", *SIDES, "--json", str(tmp_path / "r.json")]) == 0
    (case,) = json.loads((tmp_path / "r.json").read_text())["cases"]
    alone, taught = (case["curves"][side][0] for side in SIDES)
    assert [step for step, _ in alone] == [step for step, _ in taught] and alone != taught
    assert all(0 < curve[-1][1] < curve[0][1] for curve in (alone, taught))


def test_other_settings_and_a_run_that_fails(students, capsys):
    assert command.main(["distillation", "--folder", str(students), "--sides", *SIDES]) == 0
    with pytest.raises(SystemExit) as ended:
        command.main(["distillation", "--folder", str(students), "--sides", *SIDES, "--num-layers", "8"])
    assert ended.value.code == 2 and "its runs have other settings; give another folder" in capsys.readouterr().err
