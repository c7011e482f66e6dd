"""Event files of TensorBoard are shortened to the events up to a step; other bytes stay as they are."""

import struct

import pytest

from trainers.checkpoints import event_files


def record(step: int | None, text: bytes = b"") -> bytes:
    """A record as TensorFlow documents it; its checksums stand for those that TensorBoard computes."""
    event = b"\x09" + struct.pack("<d", 1.5e9)
    if step is not None:
        varint, rest = b"", step
        while rest > 127:
            varint, rest = varint + bytes([rest & 127 | 128]), rest >> 7
        event += b"\x10" + varint + bytes([rest])
    event += b"\x1a" + bytes([len(text)]) + text
    return struct.pack("<Q", len(event)) + b"sum1" + event + b"sum2"


def test_events_of_later_steps_go_and_a_file_without_others(tmp_path):
    version = record(None, b"brain.Event:2")
    files = {
        "mixed": version + record(1) + record(3, b"x" * 100) + record(300) + record(299, b"y") + record(7)[:-3],
        "before": version + record(1) + record(299) + record(4)[:-1],
        "later": version + record(300) + record(1 << 40),
    }
    for name, content in files.items():
        (tmp_path / f"events.out.tfevents.{name}").write_bytes(content)
    (tmp_path / "notes").write_bytes(files["later"])
    event_files.cut(tmp_path, 299)
    found = {path.name.removeprefix("events.out.tfevents."): path.read_bytes() for path in tmp_path.iterdir()}
    assert found == {
        "mixed": version + record(1) + record(3, b"x" * 100) + record(299, b"y"),
        "before": files["before"],
        "notes": files["later"],
    }


def test_what_tensorboard_reads_is_what_was_kept(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    from trainers.run.metrics import Metrics

    metrics = Metrics(None, 0, 9, tensorboard=tmp_path, active=True)
    for step in range(1, 400):
        metrics.log({"iteration": step, "lm_loss": 1.0})
    metrics.close()
    event_files.cut(tmp_path, 300)
    (path,) = tmp_path.iterdir()
    steps = [event.step for event in loader.EventFileLoader(str(path)).Load() if event.HasField("summary")]
    assert steps == list(range(1, 301))
