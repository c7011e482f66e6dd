"""README.md and the pages for users: the first commands, the example, and make, work as they are written."""

import importlib
import runpy
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import documents, mpirun
from tests.support.lab.make import make, nvidia_smi
from trainers.data.blend import blend_of
from trainers.scoring.settings import COMMAND as EVALUATE
from trainers.settings.command import Command

USERS = [
    mpirun.ROOT / page for page in ("README.md", *(f"docs/{name}.md" for name in ("training", "sizes", "weights")))
]
EXAMPLE = (mpirun.ROOT / "examples" / "inside_mpi.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "n, grid, calls",
    [
        pytest.param(4, "tensor=2, data=1", "1", marks=pytest.mark.long),
        (2, "tensor=1, data=1", None),
    ],
)
def test_the_example_prints_its_grid_shape_and_communication(tmp_path, n, grid, calls):
    (tmp_path / "example.py").write_text(EXAMPLE)
    done = mpirun.run(n, str(tmp_path / "example.py"), timeout=60)
    assert done.returncode == 0, done.stderr
    first, shape, head, *rows = done.stdout.splitlines()
    assert first == f"ProcessGrid({grid})" and shape == "[16, 1, 512]" and head.startswith("group")
    assert [row.split()[2:4] for row in rows] == ([] if calls is None else [["all_reduce", calls]])


@pytest.mark.long
@pytest.mark.slow
def test_a_rank_of_the_example_that_fails_ends_it(tmp_path):
    made = "            mlp = "
    assert EXAMPLE.count(made) == 1
    broken = EXAMPLE.replace(made, f"            assert MPI.COMM_WORLD.rank != 3, 'broken'\n{made}")
    (tmp_path / "example.py").write_text(broken)
    began = time.monotonic()
    done = mpirun.run(4, str(tmp_path / "example.py"), timeout=60)
    assert done.returncode != 0 and time.monotonic() - began < 40
    assert "[rank 3] Traceback" in done.stderr and "AssertionError: broken" in done.stderr


@pytest.mark.slow
def test_the_program_of_the_readme_says_the_same_on_any_number_of_ranks(tmp_path):
    (block,) = [block for block in documents.blocks(mpirun.ROOT / "README.md") if block.language == "python"]
    (tmp_path / "program.py").write_text(block.text)
    said = []
    for ranks in (1, 2):
        done = mpirun.run(ranks, str(tmp_path / "program.py"), timeout=60)
        assert done.returncode == 0, done.stderr
        said.append(float(done.stdout))
    assert said[0] == pytest.approx(said[1], rel=1e-5) and said[0] > 0


def test_the_readme_is_one_screen_and_its_picture_is_of_the_table():
    text = (mpirun.ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    assert text.count("![") == 1 and "docs/images/all_reduce.png" in text
    script = runpy.run_path(str(mpirun.ROOT / "docs" / "picture.py"))
    times = script["times"](script["TABLE"].read_text())
    assert script["PICTURE"].exists() and set(script["DRAWN"]) <= set(times)
    large = [size for size in times["mpi4py"] if size >= 64 << 10]
    shares = [times[name][size] / times["mpi4py"][size] for name in ("private", "in window") for size in large]
    assert min(shares) > 0.14 and max(shares) < 0.6  # what the picture's title says


def accepted(command: str, data: Path) -> Any:
    """The settings of a training command, such as ``mpirun -n N python -m trainers.pretrain_gpt ...``, valid for N.

    data: a data set that is there, in place of what the command reads, if it reads one.
    """
    words = shlex.split(command)
    ranks, at = int(words[words.index("-n") + 1]), words.index("-m") + 1
    command_of: Command[Any] = importlib.import_module(words[at]).COMMAND
    mock = "--mock-data" in words
    data_path = [] if mock or "--data-path" in words else ["--data-path", str(data)]
    config = command_of.parse([*words[at + 1 :], *data_path])
    blend_of(config)
    command_of.require_valid(config if mock else replace(config, data_path=str(data)), ranks)
    return config


@pytest.fixture
def data(tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"tokens{suffix}").touch()
    return tmp_path / "tokens"


def writes_a_run(words):
    return "trainers.pretrain_gpt" in words and "--dry-run" not in words


def test_commands_of_the_readme_are_valid_and_none_writes_into_make_trains_folder(data):
    """Those that train a GPT; tests/test_documents.py parses the commands of every other task."""
    commands = [command for command in documents.commands(*USERS) if command.text.startswith("mpirun ")]
    found = [accepted(command.text, data) for command in commands if writes_a_run(command.words)]
    assert [config.save for config in found] == [
        "runs/four",
        "runs/mine",
        "runs/four",
        "runs/blend",
        "runs/student",
        "runs/large",
        "runs/tuned",
    ]
    assert found[2].load == "runs/four" and found[2].train_iters > found[0].train_iters


@pytest.mark.parametrize(
    "words, changed",
    [
        (
            [],
            {
                "save": "runs/main",
                "overwrite": True,
                "data_path": "runs/data/stdlib",
                "micro_batch_size": 16,
                "device": "cpu",
            },
        ),
        (["NP=4"], {"overwrite": True, "micro_batch_size": 8}),
        (["NP=8"], {"overwrite": True, "micro_batch_size": 4}),
        (["NP=1"], {"tensor_model_parallel_size": 1, "micro_batch_size": 16, "global_batch_size": 16}),
        (["NP=3"], {"tensor_model_parallel_size": 1, "micro_batch_size": 5, "global_batch_size": 15}),
        (["NP=6"], {"tensor_model_parallel_size": 2, "micro_batch_size": 5, "global_batch_size": 15}),
        (["NP=12"], {"tensor_model_parallel_size": 2, "micro_batch_size": 3, "global_batch_size": 18}),
        (["NP=64"], {"tensor_model_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 32}),
        (["ARGS=--device-transport staged --device=cuda:1"], {"device": "cuda:1", "device_transport": "staged"}),
        (["ARGS=--load runs/main --train-iters 900"], {"load": "runs/main", "save": "runs/main", "train_iters": 900}),
        (["ARGS=--save runs/x"], {"save": "runs/x", "overwrite": False}),
        (["ARGS=--bf16 --save=runs/x"], {"save": "runs/x", "overwrite": False}),
        (["CONFIG={yaml}"], {"save": "runs/mine", "overwrite": False, "device": None}),
        (["CONFIG={yaml}", "DEVICE=cpu"], {"save": "runs/mine", "device": "cpu"}),
        (["DATA={data}"], {"data_path": "{data}", "overwrite": True}),
    ],
)
def test_make_train(data, tmp_path, words, changed):
    """What make would run, by its word."""
    (tmp_path / "mine.yaml").write_text("save: runs/mine\n")
    places = {"data": data, "yaml": tmp_path / "mine.yaml"}
    done = make("--dry-run", "train", *(word.format(**places) for word in words))
    assert done.returncode == 0, done.stderr
    *_, command, after = [line for line in done.stdout.splitlines() if "python -m trainers." in line]
    config = accepted(command.replace(str(mpirun.ROOT), "."), data)
    for name, value in changed.items():
        if name != "data_path":
            assert getattr(config, name) == value
    assert ("--data-path" in command) == ("DATA={data}" in words)
    words = shlex.split(after)
    evaluated = EVALUATE.parse(words[words.index("-m") + 2 :])
    assert (evaluated.load, evaluated.device) == (config.save, config.device)
    assert evaluated.device_transport == config.device_transport
    assert f"mpiexec -n {command.split()[2]} " in after


@pytest.mark.parametrize(
    "gpus, cuda, extra", [(1, "13.0", "gpu-cuda13"), (4, "12.8", "gpu"), (3, "13.1", "gpu-cuda13")]
)
def test_make_train_on_gpus_takes_one_rank_for_each_and_what_fits_the_driver(tmp_path, data, gpus, cuda, extra):
    done = make("--dry-run", "train", "DEVICE=cuda", programs=nvidia_smi(tmp_path, gpus, cuda))
    assert f"pip install --quiet --editable '.[{extra}]'" in done.stdout and done.stderr == ""
    trained, evaluated = [line for line in done.stdout.splitlines() if "mpiexec" in line]
    config = accepted(trained.partition(" ||")[0], data)
    assert f"mpiexec -n {gpus} " in trained and f"mpiexec -n {gpus} " in evaluated
    assert config.device == "cuda" and config.tensor_model_parallel_size == 2 - gpus % 2
    assert evaluated.endswith("--device cuda")


@pytest.mark.parametrize("gpus, cuda, said", [
    (0, "13.0", "DEVICE=cuda: nvidia-smi is not there, or finds no GPU. DEVICE=cpu trains on the CPU"),
    (1, "11.8", "DEVICE=cuda: the driver is one for CUDA 11, and 12 or newer is needed"),
    (1, "N/A", "DEVICE=cuda: the driver is one for CUDA of no known version, and 12 or newer is needed"),
])  # fmt: skip
def test_make_train_on_a_gpu_that_it_cannot_use_says_why(tmp_path, gpus, cuda, said):
    done = make("--dry-run", "train", "DEVICE=cuda", programs=nvidia_smi(tmp_path, gpus, cuda))
    assert done.returncode != 0 and said in done.stderr and done.stdout == ""


def test_make_knows_two_devices():
    done = make("--dry-run", "train", "DEVICE=gpu")
    assert done.returncode != 0 and "DEVICE=gpu: choose cpu or cuda" in done.stderr


def test_make_train_does_not_make_up_data(tmp_path):
    done = make("--dry-run", "train", f"DATA={tmp_path / 'none'}")
    assert done.returncode != 0 and f"DATA={tmp_path / 'none'}: there is no {tmp_path / 'none'}.bin" in done.stderr


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not [*(mpirun.ROOT / ".venv").glob(".installed-*")], reason="no .venv of make")
@pytest.mark.parametrize("chosen", [(), ("DEVICE=cpu",)], ids=["nothing", "the CPU"])
def test_make_train_tells_who_has_chosen_nothing_of_the_gpu(data, tmp_path, chosen):
    mpi = next((mpirun.ROOT / ".venv").glob(".installed-*")).name.removeprefix(".installed-")
    words = (f"MPI={mpi}", f"DATA={data}", "ARGS=--no-such-option", *chosen)
    done = make("train", *words, programs=nvidia_smi(tmp_path, 1))
    said = "make: this machine has a GPU: make train DEVICE=cuda trains on it\n"
    assert done.stderr.count(said) == (not chosen) and "--no-such-option" in done.stderr.replace(said, "")
