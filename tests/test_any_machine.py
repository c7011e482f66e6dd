"""The commands on machines with GPUs that they cannot use, and in a small container.

The GPUs are pretended (tests/support/device/pretended): without CuPy, or fewer than ranks. No command is told a device,
and all end well on the CPU.
"""

import os
import subprocess

import pytest

from tests.support import mpirun

pytestmark = pytest.mark.slow

PRETENDED = str(mpirun.ROOT / "tests" / "support" / "device" / "pretended")
TINY = ("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16",
        "--tensor-model-parallel-size", "2")  # fmt: skip
MOCK = ("--mock-data", "--vocab-size", "64", *TINY)
TRAIN = ("-m", "trainers.pretrain_gpt", *MOCK, "--train-iters", "2")

WITHOUT_CUPY = (
    "CuPy cannot be imported (No module named 'cupy'): in a checkout of commengine, pip install '.[gpu-cuda13]'; "
    "--device-transport staged needs no CuPy, and --device cpu no GPU"
)
ONE_GPU = "2 ranks of this node use 1 CUDA device (this rank sees 1), and NCCL needs one for each rank: "


def run(*words, gpus=1, cupy=False, ranks=2, cwd=None):
    """Run a command where torch finds ``gpus`` GPUs."""
    path = f"{PRETENDED}:{mpirun.ROOT}"
    env = {
        "PYTHONPATH": path,
        "PRETENDED_GPUS": str(gpus),
        "PRETENDED_CUPY": str(int(cupy)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return mpirun.run(ranks, *words, env=env, cwd=cwd, timeout=100, fresh=True)


@pytest.mark.parametrize(
    "gpus, cupy, why",
    [
        (1, False, WITHOUT_CUPY),
        pytest.param(4, False, WITHOUT_CUPY, marks=pytest.mark.long),
        pytest.param(1, True, ONE_GPU, marks=pytest.mark.long),
    ],
)
def test_training_falls_back_to_the_cpu_and_says_why_in_one_line(gpus, cupy, why):
    done = run(*TRAIN, gpus=gpus, cupy=cupy)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "CPU" in line]
    assert len(said) == 1 and said[0].startswith(f"running on the CPU: {why}"), done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "gpus, cupy, why", [pytest.param(1, False, WITHOUT_CUPY, marks=pytest.mark.long), (1, True, ONE_GPU)]
)
def test_a_device_that_is_asked_for_is_still_an_error(gpus, cupy, why):
    done = run(*TRAIN, "--device", "cuda", gpus=gpus, cupy=cupy)
    assert done.returncode == 2 and why in done.stderr and done.stderr.count("error:") == 1
    assert "device='" not in done.stderr and "transport='" not in done.stderr  # Python's form


@pytest.mark.long
def test_training_on_the_cpu_says_nothing():
    done = run(*TRAIN, "--device", "cpu", gpus=4)
    assert done.returncode == 0 and "CPU" not in done.stderr
    same_bits = run(*TRAIN, "--deterministic", "--global-batch-size", "1", gpus=4)  # it has no device to choose
    assert same_bits.returncode == 0 and "CPU" not in same_bits.stderr


@pytest.mark.long
def test_the_other_commands_fall_back_too(tmp_path):
    saved = run(*TRAIN, "--save", str(tmp_path / "run"), "--device", "cpu", gpus=1)
    assert saved.returncode == 0, saved.stderr
    load = ("--load", str(tmp_path / "run"), "--tensor-model-parallel-size", "2")
    for words in (
        ("-m", "trainers.convert", *load, "--to", "hf", str(tmp_path / "hf")),
        ("-m", "bench.step", *MOCK, "--steps", "1", "--warmup", "1"),
    ):
        done = run(*words)
        assert done.returncode == 0 and f"running on the CPU: {WITHOUT_CUPY}" in done.stderr, done.stderr


@pytest.mark.long
def test_a_study_is_one_of_the_host(tmp_path):
    """Also where the step could run on GPUs: it would not have the collectives that are measured."""
    done = run(
        "-m", "bench.study", str(tmp_path / "here"), "--minutes", "0.001", "--max-bytes", "1K", gpus=4, cupy=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_study_refuses_another_device_before_it_measures(tmp_path):
    refused = run("-m", "bench.study", str(tmp_path / "there"), "--device", "cuda", gpus=4)
    assert refused.returncode == 2 and "argument --device: invalid choice: 'cuda' (choose from" in refused.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("inside_mpi.py",),
        pytest.param(("data_parallel.py",), marks=pytest.mark.long),
        pytest.param(("closure.py", "--exchanges", "2", "--forecast", "4"), marks=pytest.mark.long),
        pytest.param(("shallow_water/surrogate.py", "--steps", "2"), marks=pytest.mark.long),
    ],
    ids=lambda words: words[0],
)
def test_an_example_is_one_of_the_host(words, tmp_path):
    """Its tensors are, so that GPUs that it could use change nothing."""
    output = ("--output", str(tmp_path / "picture.png")) if len(words) > 1 else ()
    done = run(f"examples/{words[0]}", *words[1:], *output, gpus=4, cupy=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr


# A small container ------------------------------------------------------------------------------------------------

MADE = sorted((mpirun.ROOT / ".venv").glob(".installed-*"))
MOUNTS = os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


def in_container(writable, *words):
    """Run make as nobody, on one core, with 64 MB of /dev/shm, in this checkout, which is read-only there."""
    script = str(mpirun.ROOT / "tests" / "support" / "lab" / "container.sh")
    mpi = f"MPI={MADE[0].name.removeprefix('.installed-')}"
    argv = [script, str(mpirun.ROOT), "64", writable, "make", "--no-print-directory", mpi, *words]
    return mpirun.command(argv, timeout=500, env={"MAKEFLAGS": "", "MAKELEVEL": ""})


@pytest.mark.skipif(not (MADE and MOUNTS), reason="no .venv of make, or this user may not mount")
class TestSmallContainer:
    def test_a_checkout_without_a_place_to_write_is_one_line(self):
        done = in_container("no", "train")
        assert done.returncode == 2
        said = done.stderr.splitlines()
        assert (
            len(said) == 2
            and "/runs cannot be written to: mount a folder there that can, or work in a clone" in said[0]
        )

    @pytest.mark.long
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize(
        "words, said",
        [
            (("train", "ARGS=--train-iters 2 --eval-iters 1"), "token perplexity"),
            (("examples",), "picture: runs/examples"),
        ],
    )
    def test_the_commands_end_well(self, words, said):
        done = in_container("yes", *words)
        assert done.returncode == 0 and said in done.stdout, done.stderr
