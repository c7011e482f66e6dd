"""Make a Chakra trace with mlc-chakra's own messages and its own writer: what other people's programs would write.

    python -m tests.support.traces.chakra_files FOLDER

mlc-chakra is installed apart from its dependencies (pip install --no-deps mlc-chakra), because they bring a hundred
packages. The trace is that of tests/bench/recordings/chakra-groups: four ranks in two groups of two.
"""

import json
import sys
from pathlib import Path

GROUPS = {"1": [0, 1], "2": [2, 3]}


def write(folder: Path) -> None:
    """Write work.0.et to work.3.et, and comm_groups.json."""
    from chakra.schema.protobuf import et_def_pb2 as et
    from chakra.src.third_party.utils.protolib import encodeMessage

    def node(number, kind, after=(), micros=0, **attributes):
        made = et.Node(id=number, name=f"{kind} {number}", type=getattr(et, kind), data_deps=after)
        made.duration_micros = micros
        made.attr.add(name="is_cpu_op", bool_val=False)
        for name, value in attributes.items():
            number_field = "int32_val" if name in ("comm_src", "comm_dst") else "int64_val"
            made.attr.add(name=name, **{"string_val" if isinstance(value, str) else number_field: value})
        return made

    for rank in range(4):
        pg = "1" if rank < 2 else "2"
        message = {"comm_dst": rank + 2} if rank < 2 else {"comm_src": rank - 2}
        kind = "COMM_SEND_NODE" if rank < 2 else "COMM_RECV_NODE"
        nodes = [
            node(1, "COMP_NODE", micros=100),
            node(2, "COMM_COLL_NODE", [1], 40, comm_type=et.ALL_REDUCE, comm_size=4096, pg_name=pg, dtype="bfloat16"),
            # The reduction of gradients runs beside compute, and beside the message; the gather waits for both.
            node(3, "COMM_COLL_NODE", [2], 60, comm_type=et.REDUCE_SCATTER, comm_size=8192, pg_name=pg),
            node(4, "COMP_NODE", [2], 50),
            node(5, kind, [4], 5, comm_size=512, comm_tag=0, **message),
            node(6, "MEM_LOAD_NODE", [4], tensor_size=100),
            node(7, "COMM_COLL_NODE", [3, 5], 30, comm_type=et.ALL_GATHER, comm_size=4096, pg_name=pg),
            node(8, "COMM_COLL_NODE", [7, 6], 9, comm_type=et.BROADCAST, comm_size=10),
        ]
        with (folder / f"work.{rank}.et").open("wb") as file:
            encodeMessage(file, et.GlobalMetadata(version="1.0.0"))
            for one in nodes:
                encodeMessage(file, one)
    (folder / "comm_groups.json").write_text(json.dumps(GROUPS) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
