"""examples/slurm/gpt-8.3b.sbatch: its command is checked on the ranks that it asks for, without a cluster."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from commengine.errors import UsageError
from tests.support import mpirun
from trainers.settings.rules import require_valid
from trainers.tasks.commands import PRETRAIN_GPT
from trainers.tasks.dry_run import forecast

pytestmark = pytest.mark.slow

SCRIPT = mpirun.ROOT / "examples" / "slurm" / "gpt-8.3b.sbatch"
ASKED = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", SCRIPT.read_text(), re.M))
#: stands for srun: a line for each word, and the variables that a rank would get
SRUN = """#!/bin/bash
printf '%s\\n' "$@" >>"$LOG"
env | grep -E '^(NCCL|OMP|SLURM|SRUN)_' >"$LOG.variables"
[[ $* == *pretrain_gpt* ]] && exit "${STATUS:-0}"
exit 0
"""


@pytest.fixture
def started(tmp_path):
    """``started(*words, **variables)``: the status, the words of srun, a rank's variables, the calls of scontrol."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" >>"$LOG.scontrol"\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)

    def started(*words, **variables):
        log = tmp_path / "log"
        given = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": ASKED["ntasks-per-node"], "LOG": str(log)}
        given |= {
            "SLURM_CPUS_PER_TASK": ASKED["cpus-per-task"],
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            **variables,
        }
        done = subprocess.run(["bash", SCRIPT, *words], env=given, cwd=tmp_path, check=False)
        found = dict(line.split("=", 1) for line in Path(f"{log}.variables").read_text().splitlines())
        scontrol = Path(f"{log}.scontrol")
        return done.returncode, log.read_text().splitlines(), found, scontrol.read_text() if scontrol.exists() else ""

    return started


@pytest.mark.parametrize("nodes", [64, 16, 1])
def test_its_settings_are_valid_on_its_ranks_and_fit(started, nodes):
    """What ``--dry-run`` does on so many ranks, but for the rate of products, which it measures."""
    assert (ASKED["nodes"], ASKED["ntasks-per-node"], ASKED["gpus-per-node"]) == ("64", "8", "8")
    status, words, _, _ = started("--dry-run")
    module = words.index("trainers.pretrain_gpt")
    assert status == 0 and words[module - 2 : module] == ["python", "-m"]
    config, ranks = PRETRAIN_GPT.parse(words[module + 1 :]), 8 * nodes
    assert config.dry_run
    require_valid(config, ranks)
    found = forecast(config, ranks, 1e14, torch.device("cpu"), None)
    assert (config.tensor_model_parallel_size, config.global_batch_size) == (8, 512)
    assert found.tokens == 512 * 1024
    assert sum(found.memory.values()) < {64: 11e9, 16: 12e9, 1: 25e9}[nodes]
    assert {"tensor", "data"} >= set(found.collectives) and ("data" in found.collectives) == (nodes > 1)


def test_a_layout_that_does_not_fit_is_refused(started):
    """The last of two equal options counts, so the script's own can be replaced."""
    _, words, _, _ = started("--micro-batch-size", "16")
    config = PRETRAIN_GPT.parse(words[words.index("trainers.pretrain_gpt") + 1 :])
    assert config.micro_batch_size == 16
    with pytest.raises(UsageError, match="--global-batch-size 512"):
        require_valid(config, 512)


def test_each_rank_sees_all_gpus_and_nothing_forbids_a_link(started):
    _, words, variables, _ = started(NCCL_P2P_DISABLE="1", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="eth0")
    options = words[: words.index("python")]
    assert {"--gpu-bind=none", "--cpu-bind=cores", "--kill-on-bad-exit=1"} == set(options)
    assert not re.search(r"gpus-per-task|CUDA_VISIBLE_DEVICES", SCRIPT.read_text())
    assert {name: value for name, value in variables.items() if name.startswith("NCCL_")} == {
        "NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    assert variables["SRUN_CPUS_PER_TASK"] == variables["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"), [(75, 2, "requeue 7\n"), (75, 100, ""), (1, 0, ""), (0, 0, "")]
)
def test_it_goes_on_in_another_job_if_steps_are_left(started, status, restarts, requeued):
    ended, words, _, scontrol = started(STATUS=str(status), SLURM_RESTART_COUNT=str(restarts))
    assert ended == status and scontrol == requeued
    assert words.count("true") == restarts
