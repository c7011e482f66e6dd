"""The network process: its times do not depend on the order in which ranks speak, and it ends when they do."""

import socket
import threading
from dataclasses import replace
from multiprocessing.connection import Client

import pytest

from bench.emulator import hub
from bench.emulator.hub import Hub
from bench.emulator.machine import EmulatedMachine, Wire
from bench.emulator.network import Network

PLAIN = replace(
    EmulatedMachine.drawn(0, 1, 3), inside=Wire(1e-3, 1e-9), speed=(1.0,) * 3, contention=0.1, jitter=0.0, short=0
)


class Served:
    """A network process in a thread of this one, and a connection for each rank."""

    def __init__(self, folder):
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(str(folder / "network"))
        self.listening.listen()
        self.failed = []
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()
        self.ranks = []
        for rank in range(3):
            self.ranks.append(Client(str(folder / "network"), "AF_UNIX"))
            self.say(rank, rank=rank)

    def serve(self):
        try:
            Hub(PLAIN, 0).serve(self.listening)
        except TimeoutError as error:
            self.failed.append(error)

    def say(self, to, /, **said):
        self.ranks[to].send(said)

    def reduce(self, rank, members, time, number=0):
        self.say(
            rank, actor=0, time=time, group=("g", *members), number=number, members=members, operation="all_reduce",
            nbytes=3e6,
        )  # fmt: skip

    def answer(self, rank):
        assert self.ranks[rank].poll(20)
        actor, time = self.ranks[rank].recv()
        assert actor == 0
        return time

    def close(self):
        for one in self.ranks:
            one.close()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.listening.close()


@pytest.fixture
def served(tmp_path):
    found = Served(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_order_of_words_changes_nothing(served, order):
    for rank in order:
        served.reduce(rank, [0, 1, 2], 0.5 + 0.001 * rank)
    network, expected = Network(PLAIN), {}
    for rank in range(3):
        network.join("g", 0, [0, 1, 2], rank, "all_reduce", 3e6, 0.5 + 0.001 * rank, expected.__setitem__)
    network.run(float("inf"))
    assert min(expected.values()) >= 0.5079  # three steps after the last rank
    for rank in sorted(expected, key=expected.__getitem__):
        assert served.answer(rank) == expected[rank]
        served.say(rank, actor=0, time=None)


@pytest.mark.slow
def test_a_collective_waits_for_a_rank_that_may_still_come_before_it(served):
    """Ranks 0 and 1 are ready at 0.5. Rank 2, at 0.1, could still send a message over the same links before."""
    served.reduce(0, [0, 1], 0.5)
    served.reduce(1, [0, 1], 0.5)
    assert not served.ranks[0].poll(0.5)
    served.say(2, actor=0, time=0.9)
    assert served.answer(0) == served.answer(1) == pytest.approx(0.5 + 2 * (1e-3 + 1.5e6 * 1e-9))


def test_a_rank_that_only_waits_holds_nothing_up(served):
    served.reduce(0, [0, 1], 0.5)
    served.reduce(1, [0, 1], 0.5)
    served.say(2, actor=0, time=None)
    assert served.answer(0) == served.answer(1)


def test_a_rank_that_has_left_holds_nothing_up(served):
    served.reduce(0, [0, 1], 0.5)
    served.reduce(1, [0, 1], 0.5)
    served.ranks[2].close()
    assert served.answer(0) == served.answer(1)


def test_it_ends_if_no_rank_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "PATIENCE", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "network"))
        listening.listen()
        with pytest.raises(TimeoutError, match=r"no word for 0.1 s; ranks that run: 0, 1, 2"):
            Hub(PLAIN, 0).serve(listening)


def test_silence_ends_it_and_names_the_ranks_that_run(served, monkeypatch):
    monkeypatch.setattr(hub, "PATIENCE", 0.2)
    served.reduce(0, [0, 1], 0.5)
    served.thread.join(20)
    assert str(served.failed[0]) == "no word for 0.2 s; ranks that run: 1, 2"
