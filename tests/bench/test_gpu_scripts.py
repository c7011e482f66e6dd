"""bench/gpu.sh and bench/gpu-carry.sh: dry runs, and stages that fail, time out or are misspelt."""

import os
import re
import shutil
import signal
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.support import mpirun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = mpirun.ROOT
STAGES = {
    "live": "machine hello raw_nccl binding gpu_tests gpu_serial staged_tests raw_nccl_2 gpu_tests_2 "
    "gpu_tests_serial compile_tests",
    "right": "cuda tp2_staged dp2_staged zero1_staged overlap_staged bf16 raw_nccl_2 tp2_nccl dp2_nccl cpu resumed "
    "losses",
    "fast": "overhead profile flops overlap overlap_unordered flops_large",
}


@pytest.fixture
def repository(tmp_path):
    """The repository by links, with a copy of gpu.sh that a test may edit."""
    root = tmp_path / "repository"
    (root / "bench").mkdir(parents=True)
    for name in ("commengine", "tplayers", "trainers", "tests", "pyproject.toml", "README.md"):
        (root / name).symlink_to(ROOT / name)
    for path in (ROOT / "bench").iterdir():
        if path.suffix == ".sh":
            (root / "bench" / path.name).write_bytes(path.read_bytes())
            (root / "bench" / path.name).chmod(0o755)
        else:
            (root / "bench" / path.name).symlink_to(path)
    return root


def edit(root, old, new):
    script = root / "bench" / "gpu.sh"
    text = script.read_text()
    assert old in text
    script.write_text(text.replace(old, new))


def run(root, *words, timeout=300, **env):
    out = root.parent / "out"
    done = mpirun.command(
        [str(root / "bench" / "gpu.sh"), *words, str(out)], timeout=timeout, env={"PYTHON": sys.executable, **env}
    )
    summary = (out / "summary.txt").read_text() if (out / "summary.txt").exists() else ""
    return done, summary


def archived(root, job):
    with tarfile.open(root.parent / "out" / f"gpu-{job}.tar.gz") as archive:
        return archive.getnames()


@pytest.mark.long
@pytest.mark.parametrize("job", STAGES)
def test_dry_run_of_a_whole_job(repository, job):
    done, summary = run(repository, "--dry-run", job)
    assert done.returncode == 0, summary
    for name in STAGES[job].split():
        assert f"ok        {job} {name} (" in summary
        assert f"results/{name}.log" in archived(repository, job)
    assert "FAILED" not in summary and "TIMED OUT" not in summary
    assert "needs a GPU: live nvlink: nvidia-smi topo" in summary or job != "live"
    out = repository.parent / "out"
    assert {path.name for path in out.iterdir()} == {"summary.txt", f"gpu-{job}.tar.gz"}  # few files come back
    if job == "right":
        assert "verdict: good" in summary
        names = archived(repository, job)
        assert {"results/losses.md", "results/losses.json", "results/runs/cpu/metrics.jsonl"} <= set(names)
        assert not any("/iter_" in name for name in names)  # checkpoints are large


@pytest.mark.long
def test_carried_packages_are_installed_and_the_corpus_is_trained_on(repository, tmp_path):
    carry = tmp_path / "carry"
    script = str(repository / "bench" / "gpu-carry.sh")
    env = {"PYTHON": sys.executable}
    done = mpirun.command([script, "--dry-run", "--python-version", "3.12", str(carry)], timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in carry.iterdir()} == {"wheels", "nccl", "corpus"}
    assert len(list((carry / "nccl").iterdir())) > 2  # pieces
    done, summary = run(repository, "--dry-run", "--carry", str(carry), "--only", "cpu", "right", PYTHONPATH="/none")
    assert done.returncode == 0, summary
    assert "ok        right carried" in summary and "ok        right cpu" in summary
    assert "installed: commengine_carry_check-1.0-py3" in summary and "site/nccl/libnccl.so.2" in summary
    edit(repository, '--data-path $work/corpus/tiny"', '--data-path $work/corpus/small"')
    done, summary = run(repository, "--dry-run", "--carry", str(carry), "--only", "cpu", "right")
    assert done.returncode == 1 and "FAILED    right cpu" in summary


@pytest.mark.parametrize(
    "words", [["--drry-run", "folder"], [], ["--platfrom", "x", "folder"], ["--nccl"]], ids=" ".join
)
def test_wrong_arguments_of_carry_are_named(words):
    done = mpirun.command([str(ROOT / "bench" / "gpu-carry.sh"), *words], timeout=20)
    assert done.returncode == 2 and "bench/gpu-carry.sh: error: " in done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--nccl"], "--nccl needs a value"),
        (["--jobs", "live rigth", "folder"], "--jobs rigth: must be live, right or fast"),
        (["--python", "/none", "folder"], "--python /none: does not run"),
        ([], "FOLDER is missing"),
    ],
)
def test_wrong_arguments_of_the_rehearsal_are_named(words, named, tmp_path):
    done = mpirun.command([str(ROOT / "bench" / "gpu-rehearsal.sh"), *words], timeout=20, cwd=tmp_path)
    assert done.returncode == 2 and f"bench/gpu-rehearsal.sh: error: {named}" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_rehearsal_says_which_steps_fail_and_keeps_those_done(tmp_path):
    """On this Python, which has not what a GPU machine has: no CuPy, and nothing carried."""
    folder = tmp_path / "rehearsal"
    for name in ("environment", "carry"):
        (folder / name).mkdir(parents=True)
        (folder / name / "whole").touch()
    (folder / "environment" / "bin").mkdir()
    python = folder / "environment" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    words = ["--jobs", "live", "--only", "hello", str(folder)]
    done = mpirun.command([str(ROOT / "bench" / "gpu-rehearsal.sh"), *words], timeout=120)
    assert done.returncode == 1
    for name in ("one_nccl", "first_line_of_live", "dry_run_of_live"):
        assert f"FAILED    {name} (" in done.stdout
    assert "holds no wheels" in done.stdout and "NOT all ended as they must" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "old", ["--only-binary=:all:", "--python-version ", "--train-bpe 300", "--input README.md", "split -b "]
)
def test_misspelt_option_of_carry_fails_the_dry_run(repository, tmp_path, old):
    script = repository / "bench" / "gpu-carry.sh"
    head, start, body = script.read_text().partition("source=''")
    assert old in body
    script.write_text(head + start + body.replace(old, old.replace("-", "-Q", 1).replace(".md", ".x")))
    done = mpirun.command(
        [str(script), "--dry-run", str(tmp_path / "carry")], timeout=60, env={"PYTHON": sys.executable}
    )
    assert done.returncode != 0


@pytest.mark.parametrize("words", [["live"], ["quick", "out"], ["--drry-run", "live", "out"], ["live", "a", "b"]])
def test_wrong_arguments_are_named(words):
    done = mpirun.command([str(ROOT / "bench" / "gpu.sh"), *words], timeout=20)
    assert done.returncode == 2 and "bench/gpu.sh: error: " in done.stderr and "--dry-run" in done.stderr


def test_without_a_gpu_nothing_is_run(repository):
    done, _ = run(repository, "live", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "torch finds no CUDA device here" in done.stderr


@pytest.mark.long
def test_a_stage_that_does_not_exist_fails(repository):
    done, summary = run(repository, "--dry-run", "--only", "helo", "live")
    assert done.returncode == 2 and "--only helo: live has no such stage" in summary


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "stage", "old", "new"),
    [
        ("live", "machine", "bench.gpu machine", "bench.gpu machines"),
        ("live", "hello", "mpi4py.bench helloworld", "mpi4py.bench hello"),
        ("live", "raw_nccl", "tests/jobs/raw_nccl.py", "tests/jobs/raw_ncl.py"),
        ("live", "binding", "device/test_nccl_binding.py", "device/test_nccl_bindings.py"),
        ("live", "gpu_tests", "device/test_gpu.py", "device/test_gpus.py"),
        ("live", "gpu_serial", "training/test_clipping.py", "training/test_clippings.py"),
        ("live", "compile_tests", "--maxfail=5", "--max-fail=5"),
        ("live", "staged_tests", "tests/run --long -m", "tests/run --long -mm -m"),
        ("right", "cpu", "--lr-warmup-iters", "--lr-warm-up-iters"),
        ("right", "tp2_staged", "--device-transport staged", "--device-transport stage"),
        ("right", "dp2_nccl", "trainers.pretrain_gpt", "trainers.pretrain_gtp"),
        ("right", "losses", "--without", "--with-out"),
        ("fast", "overhead", "--sizes 8 1M", "--sizes 8 1X"),
        ("fast", "profile", "bench.gpu profile", "bench.gpu profile --kernel 3"),
        ("fast", "flops", "--models 355M", "--modles 355M"),
        ("fast", "overlap", "--bucket-mb", "--buckets-mb"),
    ],
)
def test_misspelt_option_or_missing_file_fails_the_dry_run(repository, job, stage, old, new):
    if stage == "losses":
        edit(repository, "without=''", "without='--without compiled'")
    edit(repository, old, new)
    done, summary = run(repository, "--dry-run", "--only", stage, job)
    assert done.returncode == 1, summary
    assert f"FAILED    {job} {stage}, status " in summary
    assert f"results/{stage}.log" in archived(repository, job)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.long
def test_a_stage_over_its_limit_ends_with_all_its_ranks_and_the_next_one_runs(repository):
    """Each rank ignores the interrupt, and has a child in a session of its own."""
    program, pids = repository / "sleeper.py", repository / "pids"
    pids.mkdir()
    program.write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        f"[pathlib.Path({str(pids)!r}, str(pid)).touch() for pid in (os.getpid(), child.pid)]\n"
        "time.sleep(300)\n"
    )
    edit(repository, 'stage hello 40 "$mpiexec" -n 2 "$python" -m mpi4py.bench helloworld',
         f'stage hello 4 "$mpiexec" -n 2 "$python" {program}')  # fmt: skip
    edit(repository, "timeout -s INT -k 10", "timeout -s INT -k 2")
    done, summary = run(repository, "--dry-run", "--only", "hello,raw_nccl", "live")
    assert done.returncode == 1
    assert "TIMED OUT live hello" in summary and "ok        live raw_nccl" in summary
    started = [int(path.name) for path in pids.iterdir()]
    assert len(started) == 4
    deadline = time.monotonic() + 5
    while any(map(alive, started)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in started if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    assert "results/hello.log" in archived(repository, "live")


@pytest.mark.long
def test_a_hang_names_its_place(repository):
    """Eight seconds before its limit, and the program's own sitecustomize still runs."""
    program, other = repository / "waiting.py", repository / "other"
    program.write_text("import time\ndef wait_for_nothing():\n    time.sleep(5)\nwait_for_nothing()\n")
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('the other sitecustomize')\n")
    edit(repository, 'stage hello 40 "$mpiexec" -n 2 "$python" -m mpi4py.bench helloworld',
         f'stage hello 10 "$mpiexec" -n 2 "$python" {program}')  # fmt: skip
    done, summary = run(repository, "--dry-run", "--only", "hello", "live", PYTHONPATH=str(other))
    assert done.returncode == 0, summary
    assert summary.count("in wait_for_nothing") == 2 and "the other sitecustomize" in summary


@pytest.mark.long
def test_nccl_that_starts_only_without_its_own_memory_is_found_and_said(repository):
    program = repository / "starts.py"
    program.write_text("import os, sys\nsys.exit(os.environ.get('NCCL_CUMEM_ENABLE') != '0')\n")
    edit(repository, 'raw="tests/jobs/raw_nccl.py ${dry:+--on-host --elements 100}"', f'raw="{program}"')
    done, summary = run(repository, "--dry-run", "--only", "raw_nccl,raw_nccl_no_cumem,raw_nccl_2", "live")
    assert done.returncode == 1 and "FAILED    live raw_nccl," in summary
    assert (
        "ok        live raw_nccl_no_cumem" in summary
        and "all later stages and jobs have NCCL_CUMEM_ENABLE=0" in summary
    )
    assert "ok        live raw_nccl_2" in summary


@pytest.mark.long
def test_two_ranks_on_one_gpu_have_hosts_of_their_own(repository):
    """Where that does not work it is a trial, and no failure of the job."""
    program = repository / "hosts.py"
    program.write_text(
        "import os, sys\nfrom mpi4py import MPI\n"
        "hosts = MPI.COMM_WORLD.allgather(os.environ.get('NCCL_HOSTID'))\n"
        "if MPI.COMM_WORLD.rank == 0:\n    print('the hosts are', *hosts)\n"
        "sys.exit(len(set(hosts)) < 2 or None in hosts or 'no' in sys.argv)\n"
    )
    edit(repository, 'raw="tests/jobs/raw_nccl.py ${dry:+--on-host --elements 100}"', f'raw="{program}"')
    done, summary = run(repository, "--dry-run", "--only", "raw_nccl_2", "live")
    assert done.returncode == 0 and "the hosts are commengine-rank-0 commengine-rank-1" in summary, summary
    edit(repository, f'raw="{program}"', f'raw="{program} no"')
    done, summary = run(repository, "--dry-run", "--only", "raw_nccl_2,gpu_tests_2", "live")
    assert done.returncode == 0 and "FAILED    live raw_nccl_2" in summary, summary
    assert "left out  live gpu_tests_2: two ranks on one GPU" in summary


@pytest.mark.long
def test_a_job_without_time_says_which_stages_did_not_run(repository):
    done, summary = run(repository, "--dry-run", "--only", "hello,raw_nccl", "live", JOB_SECONDS="16")
    assert done.returncode == 1
    assert "not run   live hello: no time is left" in summary and "not run   live raw_nccl" in summary
    assert (repository.parent / "out" / "gpu-live.tar.gz").exists()


@pytest.mark.long
def test_the_stages_of_one_rank_have_their_tests(tmp_path):
    """Without a GPU, where torch is made to say that there is one: the tests run, and fail because of torch's build."""
    program = tmp_path / "pretending.py"
    program.write_text(
        "import sys, pytest, torch\ntorch.cuda.is_available = lambda: True\nsys.exit(pytest.main(sys.argv[1:]))\n"
    )
    files = ["tests/commengine/device/test_gpu.py", "tests/tplayers/models/test_compile_alone.py"]
    words = ["--with-mpi", "-m", "gpu and mpi", "-q", "-p", "no:cacheprovider"]
    listed = mpirun.command([sys.executable, str(program), *words, "--collect-only", *files], timeout=100)
    counts = [sum(line.startswith(file) for line in listed.stdout.splitlines()) for file in files]
    assert counts[0] > 400 and counts[1] == 32, listed.stdout[-1500:]
    case = "test_on_one_device[gpt-aot_eager-False-nccl]"
    done = mpirun.command([sys.executable, str(program), *words, f"{files[1]}::{case}"], timeout=100)
    assert done.returncode == 1 and "built without CUDA" in done.stdout, done.stdout[-1500:]


# What travels -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def carry(tmp_path_factory):
    """What a dry run of gpu-carry.sh gathers, without the data set."""
    folder = tmp_path_factory.mktemp("carry")
    script = (ROOT / "bench" / "gpu-carry.sh").read_text()
    made, _, _ = script.replace('"$(dirname "$0")/.."', str(ROOT)).partition('mkdir -p "$folder/corpus"')
    (folder / "carry.sh").write_text(made)
    words = ["sh", str(folder / "carry.sh"), "--dry-run", "--python-version", "3.12", str(folder / "all")]
    done = mpirun.command(words, timeout=120, env={"PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr
    return folder / "all"


def install(carry, site):
    words = [str(ROOT / "bench" / "gpu-install.sh"), str(carry), str(site)]
    return mpirun.command(words, timeout=120, env={"PYTHON": sys.executable})


@pytest.mark.long
def test_libraries_of_a_wheel_are_installed_too(carry, tmp_path):
    """Pip --target leaves them out, and MPI's library is one. NCCL's library comes out of its pieces."""
    site = tmp_path / "site"
    done = install(carry, site)
    assert done.returncode == 0, done.stderr
    assert (site / "lib" / "libcommengine_carry_check.so.1").read_text() == "no library\n"
    assert (site / "bin" / "commengine-carry-check").exists()
    assert (site / "commengine_carry_check-1.0.dist-info").is_dir()
    assert len(list((carry / "nccl").iterdir())) > 3
    assert (site / "nccl" / "libnccl.so.2").read_text() == "no library\n"
    assert f"NCCL: {site}/nccl/libnccl.so.2" in done.stdout


@pytest.mark.parametrize(
    "damage",
    [pytest.param(Path.unlink, id="missing"),
     pytest.param(lambda piece: piece.write_bytes(b"wrong"), id="wrong", marks=pytest.mark.long)],
)  # fmt: skip
@pytest.mark.parametrize("number", [pytest.param("00", marks=pytest.mark.long), "01"])
def test_missing_and_damaged_pieces_are_noticed(carry, tmp_path, damage, number):
    copied = shutil.copytree(carry, tmp_path / "carry")
    (piece,) = (copied / "nccl").glob(f"*.{number}")
    damage(piece)
    done = install(copied, tmp_path / "site")
    assert done.returncode == 1 and "missing" in done.stderr
    assert not (tmp_path / "site" / "nccl" / "libnccl.so.2").exists()


def test_a_folder_without_wheels_is_an_error(tmp_path):
    done = install(tmp_path, tmp_path / "site")
    assert done.returncode == 1 and "holds no wheels" in done.stderr


def test_the_tests_that_a_dry_run_selects_exist():
    """A keyword that selects nothing fails the job, and the whole dry run is a long test."""
    script = (mpirun.ROOT / "bench" / "gpu.sh").read_text()
    (also, some), *more = re.findall(r"also=(\S+) some='(\w+)'", script)
    assert not more and re.search(rf"^def test_\w*{some}", (mpirun.ROOT / also).read_text(), re.MULTILINE)
