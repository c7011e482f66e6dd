"""bench.conformance bits: each dependence that is planted in a transport is found, and no other."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from bench.conformance import bits, sums
from bench.conformance.bits import IN_JOB, opened
from bench.conformance.bits_page import verdicts
from bench.conformance.sums import BETWEEN, PERIOD, QUESTIONS, Sums, summands
from bench.transports.in_process import LocalTransport
from tests.support import mpirun

MOST = 700


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
def test_the_numbers_tell_orders_apart(ranks, dtype):
    rows = summands(ranks, dtype)
    orders = [*rows], [*rows.flip(0)], [*rows.roll(1, 0)]
    found = [sum(order[1:], order[0]) for order in orders]
    for one, other in itertools.combinations(found, 2):
        assert (one != other).sum() >= PERIOD // 2
    assert len(rows[0]) == PERIOD and torch.equal(rows, summands(ranks, dtype))


class Planted(LocalTransport):
    """Sums by MPI's gather, in rank order, but in another one where ``other`` says so.

    other: gets the transport, the output and whether the call is in place, and says for which elements.
    """

    name = "planted"
    in_place_only = ()

    def __init__(self, comm, other, capacity):
        self._comm, self._other, self.calls = comm, other, 0
        super().__init__(comm.rank, comm.Barrier, *(torch.zeros(capacity, dtype=torch.uint8) for _ in range(2)))

    def _start(self, call, in_place):
        send, recv = self._buffers.views(call, self._rank, in_place)
        return lambda: self._sum(send, recv, call, in_place)

    def _sum(self, send, recv, call, in_place):
        self.calls += 1
        rows = torch.tensor(self._comm.allgather(send.tolist()))
        if call.operation == "reduce_scatter":
            rows = rows.view(len(rows), len(rows), call.count)[:, self._rank]
        usual, reverse = (self._in_turn([*order]) for order in (rows, rows.flip(0)))
        if call.operation != "reduce" or self._rank == 0:
            recv.copy_(torch.where(torch.as_tensor(self._other(self, recv, in_place)), reverse, usual))

    @staticmethod
    def _in_turn(rows):
        return sum(rows[1:], rows[0])


def wait_until(holds, seconds):
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError):  # a process that ends just now
            if holds():
                return
        assert time.monotonic() < end
        time.sleep(0.2)


def of_index(flat):
    return torch.arange(len(flat))


#: what the order may depend on, and the questions of which the answer is then no
PLANTED = {
    "nothing": (lambda *_: False, {"holders"}),
    "size": (lambda _, out, __: len(out) > 300, {"size", "parts", "holders"}),
    "odd size": (lambda _, out, __: len(out) % 2 == 1, {"size", "parts", "holders"}),
    "index": (lambda _, out, __: of_index(out) >= 100, {"offset", "parts", "holders"}),
    "last elements": (lambda _, out, __: of_index(out) >= len(out) // 8 * 8, {"size", "offset", "parts", "holders"}),
    "address": (
        lambda me, out, _: out.data_ptr() % 64 != me._whole[1].data_ptr() % 64,
        {"parts", "address", "holders"},
    ),
    "in place": (lambda _, __, in_place: in_place, {"in place", "holders"}),
    "the call": (lambda me, *_: me.calls % 7 == 0, {"repetition"}),
    "rank": (lambda me, *_: me._rank == 1, {"ranks", "holders"}),
}


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    ("name", "operation"),
    [*((name, "all_reduce") for name in PLANTED), ("nothing", "reduce"), ("rank", "reduce_scatter")],
)
def test_a_planted_dependence_is_found_and_no_other(mpi_world, name, operation, monkeypatch):
    other, expected = PLANTED[name]
    ranks = mpi_world.size
    transport = Planted(mpi_world, other, Sums.capacity(ranks, torch.float32, MOST))
    monkeypatch.setattr(sums, "REPEATS", 8)
    answers = Sums(transport, mpi_world.rank, ranks, torch.float32, MOST).ask(operation, one_rank_apart=True)
    row, no = verdicts(mpi_world.allgather(answers.to_json()), [])
    asked = dict(zip(QUESTIONS | BETWEEN, row, strict=True))
    absent = {"nodes"} | {"reduce": {"ranks"}, "reduce_scatter": {"in place"}}.get(operation, set())
    assert {question for question, answer in asked.items() if answer == "-"} == absent
    if name == "the call":  # it shows in other questions, too
        assert expected <= set(no)
        return
    assert set(no) == expected - absent and all(" is 0x" in example for example in no.values())


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "engine-tree" else [pytest.mark.long])
        for name, (_, order) in IN_JOB.items()
        if order
    ],
)
def test_an_order_of_ours_depends_on_the_operands_of_each_rank_alone(world, name):
    ranks = world.size
    with opened(name, world, Sums.capacity(ranks, torch.float32, 70_000)) as transport:
        asked = sums.ask(transport, world.rank, ranks, torch.float32, 70_000, sums.OPERATIONS)
    for answers in zip(*world.mpi.allgather(asked), strict=True):
        row, no = verdicts(answers, [])
        assert set(no) == {"holders"} and row.count("yes") >= 6


def alone(*words):
    return mpirun.command([sys.executable, "-m", "bench.conformance", "bits", *words], timeout=120)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The run of a page, its text and its JSON."""
    folder = tmp_path_factory.mktemp("bits")
    words = ["--transports", "mpi4py", "gloo", "--operations", "all_reduce", "--ranks", "3", "--max-bytes", "2K"]
    files = ["--output", str(folder / "bits.md"), "--json", str(folder / "bits.json")]
    done = alone(*words, *files)
    assert done.returncode == 0, done
    return done, (folder / "bits.md").read_text(), folder / "bits.json"


@pytest.mark.long
@pytest.mark.slow
def test_a_page_has_a_row_for_each_library(page):
    done, text, file = page
    assert done.stdout == text and "| mpi4py | " in text and "| gloo | " in text
    found = json.loads(file.read_text())
    assert {(one["transport"], one["rank"]) for one in found["answers"]} == {
        (name, rank) for name in ("mpi4py", "gloo") for rank in range(3)
    }
    assert all(one["no"].get("holders") for one in found["answers"])  # three operands have several sums everywhere


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-bytes", "much"], "--max-bytes: 'much' is not a size"),
        (["--transports", "smoke-signals"], "--transports"),
        (["--ranks", "2"], "--ranks"),
        (["--beside", "nowhere.json"], "--beside nowhere.json: is no --json of this command"),
        (["--beside", "SAME"], "its ranks were on as many nodes (1)"),
    ],
)
def test_bad_options_are_named(words, said, tmp_path, capsys):
    same = tmp_path / "same.json"
    same.write_text(json.dumps({"nodes": 1, "answers": []}))
    with pytest.raises(SystemExit) as end:
        bits.alone([str(same) if word == "SAME" else word for word in words])
    told = capsys.readouterr().err
    assert end.value.code == 2 and said in told and len(told.splitlines()) == 1


@pytest.mark.long
@pytest.mark.slow
def test_a_job_asks_its_own_mpi(tmp_path):
    words = ["--transports", "mpi4py", "engine-tree", "--operations", "reduce", "--max-bytes", "1K"]
    done = mpirun.run(3, "-m", "bench.conformance", "bits", *words, timeout=120)
    assert done.returncode == 0 and "| engine-tree | yes | yes | yes | yes | yes | no | yes | - | - |" in done.stdout


@pytest.mark.slow
def test_a_command_that_is_terminated_ends_its_jobs():
    """As the launcher of a batch system, or the program ``timeout``, ends it."""
    mark = "--max-bytes=3999k"

    def jobs():
        lines = [path.read_bytes().replace(b"\0", b" ").decode() for path in Path("/proc").glob("[0-9]*/cmdline")]
        return [line for line in lines if "--max-bytes 3999k" in line]

    words = [sys.executable, "-m", "bench.conformance", "bits", "--transports", "mpi4py", mark]
    command = mpirun.start(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(jobs, 60)
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait(30) == 128 + signal.SIGTERM
        wait_until(lambda: not jobs(), 30)
    finally:
        mpirun.stop(command)
