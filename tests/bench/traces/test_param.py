"""PyTorch's execution traces in JSON: as its observer writes them for NCCL, and ours as PARAM's parser reads them."""

import gzip
import json
from types import SimpleNamespace

import pytest

from bench.step_study.recording import Group
from bench.traces import foreign, formats, param
from commengine import CollectiveEvent, UsageError


def node(number, name, values, **attributes):
    """A node as PyTorch's observer writes it."""
    attrs = [{"name": "rf_id", "type": "uint64", "value": number}, {"name": "tid", "type": "uint64", "value": 1}]
    attrs += [{"name": key, "type": "string", "value": value} for key, value in attributes.items()]
    inputs = {"values": values, "shapes": [[] for _ in values], "types": ["" for _ in values]}
    empty = {"values": [], "shapes": [], "types": []}
    return {"id": number, "name": name, "ctrl_deps": 2, "inputs": inputs, "outputs": empty, "attrs": attrs}


def call(number, name, request, rank, sent, received, *, pg="0", dtype="Float", tensor=True, **more):
    """A node of a collective: before its request is its input, a list of tensors, unless it has none."""
    values = [[[7, 8, 0, sent, 4, "cuda:0"]]] * tensor + [request, [pg, "x"], rank, name, [], [], 0, 1, 4]
    about = {
        "collective_name": name, "dtype": dtype, "in_msg_nelems": sent, "out_msg_nelems": received,
        "in_split_size": "[]", "out_split_size": "[]", "pg_name": pg, "pg_size": 4,
    } | more  # fmt: skip
    return node(number, "record_param_comms", values, **about)


def step(rank):
    """Four ranks, two groups of two: a reduction that is waited for later, and a ring of messages."""
    pg = "1" if rank < 2 else "2"
    groups = [
        {"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 4, "group_count": 3},
        {"pg_name": "1", "pg_desc": "tp", "ranks": [0, 1], "group_size": 2, "group_count": 3},
        {"pg_name": "2", "pg_desc": "tp", "ranks": [2, 3], "group_size": 2, "group_count": 3},
    ]
    return [
        node(9, "## process_group:init ##", [json.dumps(groups)]),
        node(10, "aten::mm", []),
        call(11, "_allgather_base", [1, False], 0, 50, 100, pg=pg, dtype="BFloat16"),
        call(12, "allreduce", [1, False], 0, 30, 30),
        call(13, "broadcast", [2, False], 1, 7, 7, pg=pg, dtype="Long"),
        call(14, "wait", [1, False], 0, 0, 0, tensor=False),
        call(15, "send", [3, True], (rank + 1) % 4, 5, 5),
        call(16, "recv", [4, True], (rank - 1) % 4, 5, 5),
        call(17, "all_to_allv", [5, False], 0, 10, 10, in_split_size="[1, 2, 3, 4]"),
        call(18, "barrier", [6, False], 0, 0, 0, dtype="Byte", tensor=False),
        call(19, "init", [7, False], 0, 0, 0, tensor=False),
    ]


def write(path, nodes, schema="1.1.0-chakra.0.0.4"):
    text = json.dumps({"schema": schema, "pid": 1, "time": "", "start_ts": 0, "finish_ts": 1, "nodes": nodes})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.fixture
def folder(tmp_path):
    for rank in range(4):
        write(tmp_path / f"rank-{rank}.json{'.gz' * (rank % 2)}", step(rank))
    return tmp_path


def read(trace):
    return formats.parse(formats.read(trace))


def test_the_collectives_of_an_execution_trace(folder):
    data = formats.read(folder)
    what = formats.parse(data)
    everyone = Group("group 0", (0, 1, 2, 3))
    for rank, calls in enumerate(what.calls):
        pair = Group("tp", (0, 1)) if rank < 2 else Group("tp", (2, 3))
        assert [(one.operation, one.dtype, one.bytes, what.groups[one.group], one.root) for one in calls] == [
            ("all_gather", "bfloat16", 200, pair, None), ("all_reduce", "float32", 120, everyone, None),
            ("broadcast", "int64", 56, pair, 1), ("sendrecv", "float32", 20, everyone, (rank + 1) % 4),
            ("barrier", "none", 0, everyone, None),
        ]  # fmt: skip
        assert calls[3].peers == ((rank + 1) % 4, (rank - 1) % 4)
        # The reduction is waited for after the broadcast, so its group has a stream; the other group has none.
        assert [one.stream for one in calls] == [0, 1, 0, 1, 1]
        assert calls[2].enqueue < calls[1].wait_start < calls[3].enqueue
    assert data["format"] == "param"
    assert "not replayed: 4 all_to_allv with unequal parts, 4 init" in data["notes"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "rank-2.json").unlink(), "there are traces of 3 ranks, and none of rank 2"),
        (lambda f: write(f / "rank-0.json", [], schema="1.0.1"), r"rank-0.json: not an .* 1.0.3 or newer.* '1.0.1'"),
        (lambda f: write(f / "rank-0.json", {}), "rank-0.json: not an execution trace"),
        (lambda f: write(f / "rank-0.json", step(0)[2:]), "rank-0.json: node 11: the ranks of its group '1' are not"),
        (lambda f: write(f / "rank-0.json", step(2)), r"rank 0, all_gather: the rank is not in 'tp'"),
        (lambda f: write(f / "rank-0.json", step(0)[:3]), "the traces do not fit"),
        (lambda f: write(f / "rank-0.json", [{"id": 1}]), "rank-0.json: node 1: 'name' is missing"),
        (
            lambda f: write(f / "rank-0.json", [*step(0), call(20, "reduce", 8, 9, 1, 1)]),
            "rank 0, reduce: the root or peer 9",
        ),
        (lambda f: write(f / "rank-0.json", [*step(0), call(20, "reduce", 8, 0, -1, 1)]), "reduce of -1 elements"),
    ],
    ids=range(9),
)
def test_damaged_traces_are_named(damage, message, folder):
    damage(folder)
    with pytest.raises(UsageError, match=message):
        read(folder)


def test_what_is_written_is_what_params_parser_takes(tmp_path):
    """The attributes and inputs of nodes, in the places where et_replay's commsTraceParser looks for them."""

    def event(operation, enqueue, *, shape, stream=None, wait=None, **more):
        return CollectiveEvent(
            operation, None, None, "bfloat16", shape, shape[0], 2 * shape[0], "tensor", 2, stream, enqueue, enqueue,
            enqueue + 1, wait, wait, **more,
        )  # fmt: skip

    events = [
        event("all_gather", 1.0, shape=(8,), stream="tensor/stream1", wait=5.0),
        event("reduce_scatter", 2.0, shape=(6,)),
        event("sendrecv", 3.0, shape=(4,), peers=(1, 1), buffers=((8, False), (12, False))),
    ]
    groups = {"tensor": [1, 3]}
    numbers = foreign.numbered([*groups.items(), ("data", [0, 1])])
    trace = SimpleNamespace(events=events)
    param.write_rank(foreign.Written(tmp_path / "rank-3.json", 3, 4, trace, groups, numbers))
    data = json.loads((tmp_path / "rank-3.json").read_text())
    assert data["schema"] == "1.1.0-chakra.0.0.4" and [one["id"] for one in data["nodes"]] == list(range(1, 9))
    init = next(one for one in data["nodes"] if "process_group:init" in one["name"])
    assert [(one["pg_name"], one["ranks"]) for one in json.loads(init["inputs"]["values"][0])] == [
        ("0", []), ("1", [0, 1]), ("2", [1, 3]),
    ]  # fmt: skip
    found = []
    for one in data["nodes"]:
        if one["name"] == "record_param_comms":
            about = {attribute["name"]: attribute["value"] for attribute in one["attrs"]}
            request, (pg, _), rank, name = one["inputs"]["values"][:4]
            assert about["collective_name"] == name and about["pg_name"] == pg == "2" and about["pg_size"] == 2
            assert (about["global_rank_start"], about["global_rank_stride"]) == (1, 2)
            found.append((name, request, rank, about["dtype"], about["in_msg_nelems"], about["out_msg_nelems"]))
    assert found == [
        ("_allgather_base", [0, False], 1, "BFloat16", 4, 8), ("_reduce_scatter_base", [2, False], 1, "BFloat16", 6, 3),
        ("send", [4, True], 1, "BFloat16", 4, 4), ("recv", [5, True], 1, "BFloat16", 6, 6),
        ("wait", [0, False], 0, "Byte", 0, 0),
    ]  # fmt: skip
