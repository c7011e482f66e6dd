"""The messages of MLCommons Chakra's execution traces, as a table, and the files that hold them.

A file is a sequence of messages, each after its length as a varint: a GlobalMetadata, then a Node for each operation of
a rank. The names and numbers of fields are those of et_def.proto in mlc-chakra 1.0.0. Unknown fields are skipped.
mlc-chakra itself is not imported, because its dependencies bring a hundred packages; protobuf alone reads its files.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.traces.opening import read_bytes
from commengine import UsageError
from commengine.files.reading import InputFileError

PACKAGE = "ChakraProtoMsg"
INSTALL = "Chakra traces need protobuf; install it with pip install '.[chakra]'"
#: the kinds of a node, by number
NODES = (
    "INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE",
    "COMM_RECV_NODE", "COMM_COLL_NODE",
)  # fmt: skip
#: the collectives of a COMM_COLL_NODE, by number, as ours
COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter", "barrier",
)  # fmt: skip
#: the types of an attribute's value: the field KIND_val of number 3 + 2 i, and the list KIND_list of 4 + 2 i
_KINDS = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
    "sfixed64", "bool", "string", "bytes",
)  # fmt: skip
#: the fields of the messages, in the order of their numbers: (name, type); "*" is a list
_MESSAGES: dict[str, tuple[tuple[str, str], ...]] = {
    **{f"{kind.capitalize()}List": (("values", f"{kind}*"),) for kind in _KINDS},
    "GlobalMetadata": (("version", "string"), ("attr", "AttributeProto*")),
    "IOInfo": (("values", "string"), ("shapes", "string"), ("types", "string")),
    "Node": (
        ("id", "uint64"), ("name", "string"), ("type", "uint32"), ("ctrl_deps", "uint64*"), ("data_deps", "uint64*"),
        ("start_time_micros", "uint64"), ("duration_micros", "uint64"), ("inputs", "IOInfo"), ("outputs", "IOInfo"),
        ("attr", "AttributeProto*"),
    ),
    "AttributeProto": (
        ("name", "string"), ("doc_string", "string"),
        *(pair for kind in _KINDS for pair in ((f"{kind}_val", kind), (f"{kind}_list", f"{kind.capitalize()}List"))),
    ),
}  # fmt: skip


@functools.cache
def message_types() -> dict[str, Any]:
    """The classes of the messages, by name. Raises UsageError where protobuf is missing."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise UsageError(INSTALL) from None
    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="commengine/chakra.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for number, (field, kind) in enumerate(fields, start=1):
            of = kind.rstrip("*")
            label = field_type.LABEL_REPEATED if kind.endswith("*") else field_type.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            if of in _MESSAGES:
                added.type, added.type_name = field_type.TYPE_MESSAGE, f".{PACKAGE}.{of}"
            else:
                added.type = getattr(field_type, f"TYPE_{of.upper()}")
            if name == "AttributeProto" and number > 2:
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()  # its own: where mlc-chakra is imported too, the names would be there twice
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
    }


def read_messages(path: Path) -> tuple[Any, list[Any]]:
    """The GlobalMetadata of a file and its Nodes. Raises InputFileError that says where the file is damaged."""
    types, data = message_types(), io.BytesIO(read_bytes(path))
    metadata = _message(path, data, types["GlobalMetadata"])
    if metadata is None:
        raise InputFileError(f"{path}: no Chakra trace: the file is empty")
    return metadata, list(iter(lambda: _message(path, data, types["Node"]), None))


def _message(path: Path, data: io.BytesIO, kind: Any) -> Any:
    """The next message, or None at the end."""
    from google.protobuf import proto

    at, name = data.tell(), kind.DESCRIPTOR.name
    try:
        return proto.parse_length_prefixed(kind, data)
    except Exception as error:  # protobuf's DecodeError, of another class in each of its implementations
        why = f"the {name} at byte {at} cannot be read: {str(error)[:200]}"
        raise InputFileError(f"{path}: no Chakra trace: {why}") from None


def write_messages(path: Path, metadata: Any, nodes: Iterable[Any]) -> None:
    """Write a file of a GlobalMetadata and Nodes."""
    from google.protobuf import proto

    with path.open("wb") as file:
        for message in (metadata, *nodes):
            proto.serialize_length_prefixed(message, file)


def attributes(message: Any) -> dict[str, Any]:
    """The attributes of a GlobalMetadata or a Node: numbers, strings, bytes, and lists of these."""
    found = {}
    for one in message.attr:
        kind = one.WhichOneof("value")
        if kind is not None:
            value = getattr(one, kind)
            found[one.name] = list(value.values) if kind.endswith("_list") else value
    return found


def attribute(name: str, kind: str, value: Any) -> Any:
    """An AttributeProto. kind: the name of the field that holds the value, such as int64_val."""
    made = message_types()["AttributeProto"](name=name)
    if kind.endswith("_list"):
        getattr(made, kind).SetInParent()  # also an empty list is a value
        getattr(made, kind).values.extend(value)
    else:
        setattr(made, kind, value)
    return made
