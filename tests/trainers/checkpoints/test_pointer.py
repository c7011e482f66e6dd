"""Which checkpoint is the newest one, and which are kept."""

import random

import pytest

from commengine import UsageError
from trainers.checkpoints import pointer


@pytest.fixture
def folder(tmp_path):
    """A folder with checkpoints of 2, 4, 6 and 8 steps, of which 6 is the newest, and with what killed runs left."""
    for name in ("iter_0000002", "iter_0000004", "iter_0000006", "iter_0000008", "iter_0000010.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    (tmp_path / "iter_0000009").mkdir()  # somebody's
    (tmp_path / "iter_notes").mkdir()
    pointer.point_to(tmp_path, "iter_0000006")
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_pointer_counts_and_without_one_the_highest_complete(folder):
    assert pointer.latest(folder).name == "iter_0000006"
    (folder / "latest").unlink()
    assert pointer.latest(folder).name == "iter_0000008"
    assert pointer.latest(folder / "iter_notes") is None and pointer.latest(folder / "none") is None


def test_an_older_versions_pointer_is_read(folder):
    (folder / "latest").write_text("iter_0000004\n")
    assert pointer.latest(folder).name == "iter_0000004"


def test_every_changed_byte_of_a_pointer_is_refused_by_name(folder):
    whole = (folder / "latest").read_bytes()
    draw = random.Random(1)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << draw.randrange(8)
        (folder / "latest").write_bytes(changed)
        with pytest.raises(UsageError, match=r"latest is damaged.*iter_0000004, iter_0000006, iter_0000008"):
            pointer.latest(folder)


@pytest.mark.parametrize("raw", [b"", b"\n", b"iter_0000006", b"../iter_0000006\n", b"iter_0000006\n\n", b"\xff\n"])
def test_what_is_no_pointer_is_refused_by_name(folder, raw):
    (folder / "latest").write_bytes(raw)
    with pytest.raises(UsageError, match="latest is damaged"):
        pointer.latest(folder)


def test_a_pointer_to_nothing_names_what_there_is(folder):
    pointer.point_to(folder, "iter_0000012")
    with pytest.raises(UsageError, match=r"iter_0000012, which is not a complete .*iter_0000008$"):
        pointer.latest(folder)


def test_a_checkpoint_whose_replacement_was_killed_is_the_newest_and_gets_its_name_back(folder):
    (folder / "iter_0000006").rename(folder / "iter_0000006.old")
    assert pointer.latest(folder).name == "iter_0000006.old"
    (folder / "iter_0000004").rename(folder / "iter_0000004.old")
    (folder / "iter_0000004").mkdir()
    pointer.make_room(folder)
    assert names(folder) == [
        "iter_0000002", "iter_0000004", "iter_0000006", "iter_0000008", "iter_0000009", "iter_notes", "latest",
    ]  # fmt: skip
    assert pointer.latest(folder).name == "iter_0000006"


@pytest.mark.parametrize(
    ("last", "every", "kept"),
    [(1, None, "68"), (2, None, "468"), (9, None, "2468"), (1, 4, "468"), (1, 2, "2468"), (1, 100, "68")],
)
def test_what_is_kept(folder, last, every, kept):
    """Never more than was asked for, and nothing of another branch's that is newer than the newest one."""
    pointer.keep(folder, last, every)
    assert [path.name[-1] for path in pointer.complete(folder)] == list(kept)
    assert {"iter_0000009", "iter_notes", "latest"} <= set(names(folder))
    assert pointer.latest(folder).name == "iter_0000006"


def test_a_longer_pointer_that_a_killed_run_left_beside_is_replaced(tmp_path):
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "iter_0000002" / "state.json").write_text("{}")
    (tmp_path / "latest.tmp").write_text("iter_10000000\n0123456789abcdef\n")
    pointer.point_to(tmp_path, "iter_0000002")
    assert pointer.latest(tmp_path) == tmp_path / "iter_0000002"


def test_the_best_checkpoint_is_named_apart_and_stays(folder):
    assert pointer.best(folder) is None
    pointer.point_to(folder, "iter_0000002", pointer.BEST)
    assert pointer.best(folder).name == "iter_0000002" and pointer.latest(folder).name == "iter_0000006"
    pointer.keep(folder, 1, None)
    assert [path.name for path in pointer.complete(folder)] == ["iter_0000002", "iter_0000006", "iter_0000008"]
    pointer.point_to(folder, "iter_0000006", pointer.BEST)
    pointer.keep(folder, 1, None)
    assert [path.name for path in pointer.complete(folder)] == ["iter_0000006", "iter_0000008"]
    (folder / "best").write_text("iter_0000002\n")
    with pytest.raises(UsageError, match="best names iter_0000002, which is not a complete checkpoint"):
        pointer.best(folder)
