"""The number of the step under way, in a file."""

import pytest

from trainers.run.metrics import StepFile


def test_the_file_holds_the_last_step(tmp_path):
    path = tmp_path / "step"
    path.write_text("1234567890123456789012345 from another run")
    file = StepFile(path)
    assert path.read_text() == ""
    for step in (100, 7):
        file.begin(step)
        assert int(path.read_text()) == step
    file.close()
    assert int(path.read_text()) == 7


def test_a_file_that_cannot_be_written_is_left_out(tmp_path):
    for path in (None, tmp_path / "none" / "step", tmp_path):
        file = StepFile(path)
        file.begin(1)
        file.close()


@pytest.mark.slow
def test_what_an_earlier_start_has_left_is_of_its_last_step(tmp_path, pretrain, mock):
    """An evaluation may take longer than supervise waits for a step."""
    run = [*mock, "--train-iters", "6", "--eval-iters", "2", "--eval-interval", "2"]
    commands = []
    for step in (4, 6):
        words = [*run, *(word for option in ("--save", "--load") for word in (option, tmp_path / str(step)))]
        stop = [["evaluation", step, 0, "TERM"]]
        commands += [(2, words, stop), (2, [*words, "--step-file", tmp_path / f"step-{step}"], stop)]
    outcomes = pretrain(*commands)
    assert [one.codes for one in outcomes] == [[75, 75]] * 4, [one.err for one in outcomes]
    assert [int((tmp_path / f"step-{step}").read_text()) for step in (4, 6)] == [4, 6]
