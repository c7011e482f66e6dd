"""The checks as the loop calls them: what they find on any rank, and whole runs with them."""

import json
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from commengine import UsageError
from trainers.checkpoints.run_folder import BATCHES
from trainers.checks.in_run import FEWEST, InRunChecks
from trainers.training.trainer import Step

STEP = Step({"lm_loss": 2.0}, norm=1.0, rate=1e-3)


@pytest.fixture
def folder(tmp_path_factory, world):
    """A folder of this rank's own."""
    return tmp_path_factory.mktemp(f"rank-{world.rank}")


@pytest.mark.mpi
def test_a_difference_is_a_problem_at_the_next_step_of_the_interval(world, trainer, folder):
    if world.size == 1:
        pytest.skip("one rank has no replicas")
    one, said = trainer(world, check_replicas=2), []
    checks = InRunChecks(one, folder, said.append)
    for step in range(1, 5):
        with checks.watching():
            done = one.step()
        if step == 3 and world.rank == 1:
            with torch.no_grad():
                next(one.model.parameters()).view(-1)[0] += 1e-3
        assert checks.after(done, 0.1) == {}
        assert (checks.problem() is None) == (step < 4)
    assert checks.problem().startswith("step 4: --check-replicas: ") and "rank" in checks.problem() and said == []


@pytest.mark.mpi
def test_a_jump_leaves_its_batch_and_a_line(world, trainer, folder):
    one, said = trainer(world, check_for_spiky_loss=10.0, save=str(folder)), []
    checks = InRunChecks(one, folder, said.append)
    for step in range(1, FEWEST + 3):
        one.iteration = step
        checks.after(replace(STEP, losses={"lm_loss": 2.0 + 0.01 * (step % 3)}), 0.1)
    assert said == []
    one.iteration += 1
    checks.after(replace(STEP, losses={"lm_loss": 9.0}, skipped=True), 0.1)
    assert said == [] and not (folder / BATCHES).exists()
    checks.after(replace(STEP, losses={"lm_loss": 9.0}), 0.1)
    (line,) = said
    name = f"step_{one.iteration:07d}-replica_{one.grid.data.rank}.safetensors"
    assert f"iteration {one.iteration}: the loss 9.0000 is" in line and f"{folder / BATCHES}/step_" in line
    batch = next(iter(one.batches(one.iteration - 1)))
    assert load_file(folder / BATCHES / name)["numbers"].tolist()[: len(batch.numbers)] == list(batch.numbers)


@pytest.mark.slow
@pytest.mark.mpi
def test_a_slow_rank_is_named_with_its_host(world, trainer, folder):
    one, said = trainer(world, log_straggler=True, log_interval=2), []
    checks = InRunChecks(one, folder, said.append)
    slow, found = world.size - 1, []
    objective = one.objective

    def slowly(*arguments):
        time.sleep(0.2 if world.rank == slow else 0.0)
        return objective(*arguments)

    slowly.names, one.objective = objective.names, slowly
    for _ in range(2):
        began = time.perf_counter()
        with checks.watching():
            done = one.step()
        found.append(checks.after(done, time.perf_counter() - began))
    if world.size == 1:
        assert found == [{}, {}] and said == []
        return
    assert found[0] == {} and found[1]["slowest_rank"] == slow and found[1]["slowest_own_ms"] > 200
    if world.rank > 0:
        assert said == []  # rank 0 speaks
        return
    (line,) = said
    assert line.startswith(f"iteration 2: rank {slow} on ") and "keeps the others waiting" in line


#: each step multiplies the weights by 1 - lr * weight decay, a million
DIVERGES = ("--lr", "1000", "--weight-decay", "1000", "--clip-grad", "0")


@pytest.mark.slow
def test_whole_runs(pretrain, mock, rows, tmp_path):
    good, diverged = tmp_path / "good", tmp_path / "diverged"
    checked = ["--check-replicas", "2", "--check-for-spiky-loss", "10", "--log-straggler"]
    again = tmp_path / "again"  # of an older run
    (again / BATCHES).mkdir(parents=True)
    one, other, third, refused = pretrain(
        (2, [*mock, *checked, "--train-iters", "5", "--bf16", "--use-distributed-optimizer", "--save", good]),
        (2, [*mock, "--train-iters", "9", *DIVERGES, "--save", diverged]),
        (2, [*mock, "--train-iters", "2", "--overwrite", "--save", again]),
        (2, [*mock, "--train-iters", "9", "--check-for-spiky-loss", "10"]),
    )
    assert one.codes == [0, 0], one.err
    found = rows(good, "own_ms")
    assert [row["iteration"] for row in found] == [1, 2, 3, 4, 5]
    # Of two ranks the faster one is the median, so rank 0, whose steps iteration_ms times, has as many own_ms or more.
    assert all(0 < row["own_ms"] <= min(row["slowest_own_ms"], row["iteration_ms"]) for row in found), found
    assert not (good / BATCHES).exists() and json.loads((good / "report.json").read_text())["iteration"] == 5

    assert other.codes == [2, 2], other.err
    (line,) = [line for line in other.err[0].splitlines() if line.startswith("error: ")]
    step = int(line.partition("step ")[2].partition(":")[0])
    assert "the run has diverged" in line and f"{diverged / BATCHES}/step_{step:07d}-replica_*.safetensors" in line
    files = [load_file(diverged / BATCHES / f"step_{step:07d}-replica_{replica}.safetensors") for replica in (0, 1)]
    numbers = [number for file in files for number in file["numbers"].tolist()]
    assert numbers == list(range(8 * (step - 1), 8 * step)) and files[0]["tokens"].shape == (4, 16)

    assert not (again / BATCHES).exists() and third.codes == [0, 0], third.err
    assert refused.codes == [2, 2] and "--check-for-spiky-loss: needs --save DIR" in refused.err[0]


@pytest.mark.mpi
def test_without_a_folder_nothing_is_saved_and_the_error_says_so(world, trainer):
    one = trainer(world, lr=1000.0, weight_decay=1000.0, clip_grad=0.0, lr_warmup_iters=0)
    checks = InRunChecks(one, None, print)

    def steps():
        for _ in range(9):
            with checks.watching():
                one.step()

    with pytest.raises(UsageError, match=r"has diverged.*its batch is not saved, because there is no --save"):
        steps()
