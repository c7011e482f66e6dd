"""bench.data_parallel: our contestant trains as torch alone does; the table has what was measured."""

import numpy as np
import pytest
import torch
from torch import nn

from bench.contests.comparison import measured
from bench.contests.driver import Contestant, rounds, started
from bench.contests.residual_net import ImageTask, build, make_step
from bench.data_parallel import __main__ as data_parallel
from tests.support import mpirun

TASK = ImageTask(width=4, blocks=1, pixels=8, global_batch_size=8, lr=0.1)


def test_the_networks_have_the_sizes_that_the_page_names():
    sizes = [sum(p.numel() for p in build(task).parameters()) / 1e6 for task in data_parallel.TASKS]
    assert sizes == [pytest.approx(0.27, abs=0.01), pytest.approx(9.8, abs=0.1)]
    assert not build(TASK)(TASK.batch(0, 2)[0]).isnan().any()


def test_options_choose_the_networks_and_faults_are_named():
    assert data_parallel.read([])[1] == list(data_parallel.TASKS.items())
    tasks = data_parallel.read(["--width", "8", "--pixels", "16", "--global-batch-size", "6"])[1]
    assert tasks == [(ImageTask(width=8, pixels=16, global_batch_size=6), 10)]
    with pytest.raises(ValueError, match="--global-batch-size 5: must be a multiple of 2"):
        data_parallel.read(["--global-batch-size", "5"])


def test_the_table_has_the_medians_of_every_network():
    programs = [
        Contestant(name, ranks, ["-m", "tests.jobs.contestant", "good", "0.002"],
                   {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(mpirun.ROOT)})
        for name, ranks in (("ours", 1), ("ddp", 1))
    ]  # fmt: skip
    with started(programs) as running:
        seconds = rounds(running, 2, 2)
        result = measured(running, seconds, "ours", 16)
    network = {"task": vars(TASK), "steps": 2, "parameters": 270_000, **result}
    surroundings = {"command": "", "date": "", "load_average_before": 0.0, "hardware": "", "versions": {}}
    table = data_parallel.markdown(surroundings | {"networks": [network, network]}, 2)
    assert table.count("## 0.3 million parameters") == 2
    assert table.count(f"| ddp | {1e3 * np.median(seconds['ddp']):.1f} [") == 2
    quotients = np.array(seconds["ddp"]) / np.array(seconds["ours"])
    assert f"| {np.median(quotients):.2f} [" in table


@pytest.mark.mpi
def test_our_contestant_has_the_losses_of_torch_with_a_batch_norm_for_each_part(mpi_world):
    from commengine import Communicator
    from trainers.data_parallel import DataParallel

    ranks = mpi_world.size
    with Communicator(mpi_world) as world:
        net = build(TASK)
        with DataParallel(net, world):
            step = make_step(TASK, net, world.rank, ranks)
            found = mpi_world.allgather([step() for _ in range(4)])
    alone = build(TASK)
    optimizer = torch.optim.SGD(alone.parameters(), lr=TASK.lr, momentum=TASK.momentum, weight_decay=TASK.weight_decay)
    expected = []
    for _ in range(4):
        optimizer.zero_grad()
        losses = []
        for images, labels in (TASK.batch(rank, ranks) for rank in range(ranks)):
            loss = nn.functional.cross_entropy(alone(images), labels)
            (loss / ranks).backward()
            losses.append(loss.item())
        optimizer.step()
        expected.append(losses)
    np.testing.assert_allclose(np.array(found).T, expected, rtol=1e-4)
    assert expected[0][0] - expected[3][0] > 0.1  # it learns


@pytest.mark.long
@pytest.mark.slow
def test_a_real_contest_has_equal_losses(tmp_path, capsys):
    sizes = ["--width", "4", "--pixels", "8", "--global-batch-size", "4"]
    counts = ["--rounds", "2", "--steps", "2", "--warmup", "4"]
    status = data_parallel.main([*sizes, *counts, "--output", str(tmp_path / "table.md")])
    table = (tmp_path / "table.md").read_text()
    assert "| ours | " in table and "| ddp | " in table and "losses of the first 4 steps differ by at most" in table
    assert status == 0 or "of a core while others were running" in capsys.readouterr().err
