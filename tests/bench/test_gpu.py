"""bench.gpu: rows are in their files as soon as they are measured, and FLOPs are those of the paper's formula."""

import json

import pytest


def test_a_row_is_in_the_files_when_it_is_added(tmp_path, capsys):
    from bench.gpu_study.rows import RowFile

    table, numbers = tmp_path / "a.md", tmp_path / "a.json"
    rows = RowFile(["# Title"], ["| a |", "|---|"], {"date": "now"}, output=str(table), json_file=str(numbers))
    assert table.read_text() == "# Title\n\n| a |\n|---|\n"
    for number in range(3):
        rows.add(f"| {number} |", {"a": number})
        assert table.read_text().splitlines()[-1] == f"| {number} |"
        assert json.loads(numbers.read_text()) == {"date": "now", "rows": [{"a": n} for n in range(number + 1)]}
    assert capsys.readouterr().out == table.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"a.md", "a.json"}  # nothing half written is left


def test_flops_of_a_step_are_those_of_its_products():
    """Three times the forward products: a backward has two for each."""
    from bench.gpu_study.flops import flops
    from tplayers import GPTConfig

    layers, h, s, b, v = 3, 64, 48, 2, 1024
    layer = 2 * b * s * (3 * h * h + h * h + 2 * 4 * h * h) + 2 * 2 * b * s * s * h
    forward = layers * layer + 2 * b * s * h * v
    assert flops(GPTConfig(layers, h, 4, v, s), b, s) == pytest.approx(3 * forward)


@pytest.mark.mpi
def test_speed_of_a_small_model_is_measured(mpi_world):
    from mpi4py import MPI

    from bench.gpu_study.flops import ceiling, model_speed
    from commengine import Communicator
    from tplayers import GPTConfig

    with Communicator(MPI.COMM_SELF, device="cpu") as single:
        config = GPTConfig(1, 32, 2, 128, 16, hidden_dropout=0.0, attention_dropout=0.0)
        assert model_speed(single, config, 2, 16, compiled=False) > 0
        assert ceiling(single.device, 64) > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: STUDY"),
        (["speed"], "invalid choice: 'speed'"),
        (["overlap", "--rounds", "0"], "--rounds 0: must be at least 1"),
        (["flops", "--tiny", "--output", "/no/where.md"], "--output /no/where.md: there is no folder /no"),
    ],
)
def test_bad_options_are_named(argv, message):
    from bench import gpu

    with pytest.raises(ValueError) as raised:
        gpu.parse(argv)
    assert message in str(raised.value)
