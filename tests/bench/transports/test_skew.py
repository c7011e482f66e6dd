"""How unequally ranks send: shares that add up, the largest buffer, and routing that was recorded."""

import json

import pytest
import torch

from bench.transports import skew
from bench.transports.operations import CollectiveCall
from commengine import UsageError


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", skew.NAMES)
def test_each_rank_sends_as_much_and_the_popular_experts_rank_receives_most(name, ranks):
    for largest in (ranks, 1000, 99_991):
        rows = skew.matrix(name, ranks, largest)
        sent, received = [sum(row) for row in rows], [sum(row[rank] for row in rows) for rank in range(ranks)]
        assert len(set(sent)) == 1
        assert largest * 0.95 - 2 * ranks <= max(*sent, *received) <= largest + ranks
        assert all(count >= 0 for row in rows for count in row)
        if name != "uniform" and ranks > 1 and largest > 100:
            assert received[0] == max(received) > 1.2 * sent[0]
        assert sum(skew.parts(name, ranks, largest)) == largest


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", skew.NAMES)
def test_the_size_of_a_call_is_its_largest_buffer(name, ranks):
    for nbytes in (1, 16, 100, 4096, 100_000):
        call = CollectiveCall.of("all_to_all_v", torch.float32, "none", 0, ranks, nbytes, name)
        buffers = [sum(call.to(rank)) for rank in range(ranks)] + [sum(call.fro(rank)) for rank in range(ranks)]
        assert call.nbytes == 4 * max(buffers) > 0 and 0 <= call.bus_factor <= 1
    assert CollectiveCall.of("all_to_all_v", torch.float32, "none", 0, 2, 16, "hot").nbytes == 8


def test_half_of_all_rows_go_to_a_hot_expert():
    experts = 8
    (share, _), _ = skew.shares("hot", 2)
    assert share == pytest.approx(0.5 + 0.5 * (experts // 2 - 1) / (experts - 1))
    (first, second), _ = skew.shares("zipf", 2)
    assert first / second == pytest.approx(sum(1 / n for n in range(1, 5)) / sum(1 / n for n in range(5, 9)))


def test_recorded_routing(tmp_path):
    path = tmp_path / "routing.json"
    path.write_text(json.dumps([[10, 20, 30, 40], [0, 0, 50, 50]]))
    assert skew.shares(str(path), 2) == [[0.3, 0.7], [0.0, 1.0]]
    assert skew.of_tokens(str(path), 2, 10) == ((3, 7), (0, 10))
    bad = {
        "a row for each of 2 ranks": [[1, 2]], "as many experts": [[1], [2]], "not the tokens": {},
        "no expert fewer": [[1, -1], [1, 1]], "a rank has tokens": [[0, 0], [1, 1]],
    }  # fmt: skip
    for words, wrong in bad.items():
        path.write_text(json.dumps(wrong))
        with pytest.raises(UsageError, match=words):
            skew.shares(str(path), 2)


@pytest.mark.parametrize("name", skew.NAMES)
@pytest.mark.parametrize("operation", ["all_to_all_v", "all_gather_v"])
def test_the_pieces_of_a_call_are_those_that_were_sent(operation, name):
    call = CollectiveCall.of(operation, torch.float32, "none", 0, 4, 4000, name)
    inputs = []
    for rank in range(4):
        (piece,) = call.sent(rank)
        inputs.append(torch.empty(piece.count))
        piece.write(inputs[-1])
    for rank in range(4):
        right = inputs
        if operation == "all_to_all_v":
            right = [one.split(call.to(k))[rank] for k, one in enumerate(inputs)]
        output = torch.cat(right)
        pieces = call.received(rank)
        assert [piece.count for piece in pieces] == call.fro(rank) == [len(one) for one in right]
        at = 0
        for piece in pieces:
            assert piece.wrong(output[at : at + piece.count]) == 0
            at += piece.count
    assert 0 < call.bus_factor <= 1 and call.skew == name
