"""The number of the step under way, in a file."""

from trainers.run.step_file import StepFile


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
