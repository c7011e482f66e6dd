"""The contest of two replicas: our contestant trains as torch alone does; a real contest."""

import numpy as np
import pytest
import torch
from torch import nn

from bench.contest import __main__ as command
from bench.contest.data_parallel import CONTEST
from bench.programs.image_task import ImageTask, build, make_step

TASK = ImageTask(width=4, blocks=1, pixels=8, global_batch_size=8, lr=0.1)


def tasks(*argv):
    return list(CONTEST.tasks(command.read("data_parallel", argv)))


def test_the_networks_have_the_sizes_that_the_page_names():
    sizes = [one.labels["million parameters"] for one in tasks()]
    assert sizes == [pytest.approx(0.27, abs=0.01), pytest.approx(9.8, abs=0.1)]
    assert not build(TASK)(TASK.batch(0, 2)[0]).isnan().any()


def test_options_choose_the_networks():
    assert [(one.task, one.steps) for one in tasks()] == [
        (ImageTask(width=16, global_batch_size=8), 10), (ImageTask(width=96, global_batch_size=8), 2),
    ]  # fmt: skip
    (found,) = tasks("--width", "8", "--pixels", "16", "--global-batch-size", "6", "--steps", "3")
    assert (found.task, found.steps, found.items) == (ImageTask(width=8, pixels=16, global_batch_size=6), 3, 6)


@pytest.mark.long
@pytest.mark.slow
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
    counts = ["--rounds", "2", "--steps", "2"]
    status = command.main(["data_parallel", *sizes, *counts, "--output", str(tmp_path / "table.md")])
    table = (tmp_path / "table.md").read_text()
    assert (
        "| ours | " in table
        and "| ddp | " in table
        and "largest difference of the losses of the first 4 steps" in table
    )
    assert status == 0 or "of a core while others were running" in capsys.readouterr().err
