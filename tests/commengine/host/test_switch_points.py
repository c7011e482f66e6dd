"""The table of switch points: which row is taken, and its file."""

import pytest
import torch

from commengine.host import switch_points
from commengine.host.switch_points import AMD, KINDS, NEVER, OTHERS, REDUCING, Key, Point, SwitchPoints, agreed

TABLE = SwitchPoints({
    Key("all_reduce", "full", 2): Point(window=100, bounce=1000),
    Key("all_reduce", "full", 8): Point(window=200, two_level=300),
    Key("all_reduce", "half", 2): Point(bounce=50),
    Key("broadcast", "full", 2): Point(window=400),
})  # fmt: skip


def test_row_of_a_call():
    """By operation, kind and ranks: the row of the most ranks that are not more; none for fewer than any row's."""
    assert TABLE.point("all_reduce", torch.float32, 4) == (100, 1000, NEVER)
    assert TABLE.point("all_reduce", torch.int64, 12) == (200, NEVER, 300)
    assert TABLE.point("all_reduce", torch.bfloat16, 2) == (NEVER, 50, NEVER)
    assert TABLE.point("broadcast", torch.bfloat16, 2) == (400, NEVER, NEVER)
    assert TABLE.point("reduce_scatter", torch.float32, 2) == (NEVER, NEVER, NEVER)
    assert TABLE.least == 50
    assert min(TABLE.least_of("all_reduce", kind, windows=True) for kind in KINDS) == 50
    assert min(TABLE.least_of("broadcast", kind, windows=False) for kind in KINDS) == NEVER
    assert TABLE.least_of("all_reduce", "full", windows=True) == 100
    assert TABLE.least_of("all_reduce", "full", windows=False) == 300
    assert TABLE.least_of("all_gather", "full", windows=True) == NEVER
    assert SwitchPoints({}).least == NEVER


def test_beyond_twice_the_ranks_that_were_measured_all_goes_by_mpi():
    """For each row by itself; the points of a user's machine serve the ranks that it measured."""
    assert TABLE.point("all_reduce", torch.float32, 16) == (200, NEVER, 300)
    assert TABLE.point("all_reduce", torch.float32, 17) == Point()
    assert TABLE.point("all_reduce", torch.bfloat16, 4) == (NEVER, 50, NEVER)
    assert TABLE.point("all_reduce", torch.bfloat16, 5) == TABLE.point("broadcast", torch.float32, 5) == Point()
    assert not TABLE.private_too(17, spanning=False) and not TABLE.private_too(17, spanning=True)
    assert TABLE.private_too(4, spanning=False) and not TABLE.private_too(8, spanning=False)
    assert TABLE.private_too(8, spanning=True) and not TABLE.private_too(4, spanning=True)
    own = SwitchPoints({**TABLE.rows, Key("all_reduce", "full", 64): Point(window=500)})
    assert own.point("all_reduce", torch.float32, 16) == (200, NEVER, 300)
    assert own.point("all_reduce", torch.float32, 17) == own.point("all_reduce", torch.float32, 63) == Point()
    assert own.point("all_reduce", torch.float32, 64) == own.point("all_reduce", torch.float32, 128) == Point(500)
    assert own.point("all_reduce", torch.float32, 129) == own.point("all_reduce", torch.bfloat16, 64) == Point()


@pytest.mark.parametrize(("table", "measured"), [(AMD, 4), (OTHERS, 2)], ids=lambda value: getattr(value, "stem", ""))
def test_a_table_that_comes_with_the_package_says_nothing_of_many_ranks(table, measured):
    """Intel's has no row that was measured on AMD's processors, which it had for 4 ranks."""
    points = SwitchPoints.load(table)
    for operation, kind in {key[:2] for key in points.rows}:
        dtype = torch.bfloat16 if kind == "half" else torch.float32
        assert points.point(operation, dtype, measured) != Point()
        beyond = 3 if table == OTHERS else 2 * measured + 1
        assert {points.point(operation, dtype, ranks) for ranks in (beyond, 9, 64, 128)} == {Point()}
    assert not points.private_too(64, spanning=False) and not points.private_too(64, spanning=True)
    other = SwitchPoints.load(OTHERS if table == AMD else AMD).rows
    same = [key for key in points.rows if key.ranks > 2 and points.rows[key] == other.get(key)]
    assert same == []


@pytest.mark.parametrize("table", [AMD, OTHERS], ids=lambda path: path.stem)
def test_measured_table(table):
    """A row of two ranks for each operation and kind; reductions alone have two levels between nodes."""
    measured = SwitchPoints.load(table)
    two = {key[:2]: point for key, point in measured.rows.items() if key.ranks == 2}
    reducing = {(operation, kind) for operation in REDUCING for kind in KINDS}
    assert set(two) == reducing | {("all_gather", "full"), ("broadcast", "full")}
    assert all(two[row].bounce < NEVER for row in reducing)
    assert all(key[:2] in reducing for key, point in measured.rows.items() if point.two_level < NEVER)


def test_table_of_the_processor(tmp_path, monkeypatch):
    """Without a file, the table of the processor's maker; a machine that does not tell has that of the others."""
    for text, table in (("vendor_id\t: AuthenticAMD\n", AMD), ("vendor_id\t: GenuineIntel\n", OTHERS), (None, OTHERS)):
        told = tmp_path / "cpuinfo"
        told.unlink(missing_ok=True)
        if text is not None:
            told.write_text(text)
        monkeypatch.setattr(switch_points, "PROCESSORS", told)
        assert SwitchPoints.load() == SwitchPoints.load(table)
    assert SwitchPoints.load(AMD) != SwitchPoints.load(OTHERS)


@pytest.mark.mpi(min_size=2)
def test_every_rank_has_the_table_of_rank_zero(mpi_world, monkeypatch, tmp_path):
    """Also where the ranks' processors differ."""
    told = tmp_path / "cpuinfo"
    told.write_text("AuthenticAMD" if mpi_world.rank == 0 else "GenuineIntel")
    monkeypatch.setattr(switch_points, "PROCESSORS", told)
    assert agreed(mpi_world, mpi_world.rank, None) == SwitchPoints.load(AMD)
    assert agreed(mpi_world, mpi_world.rank, TABLE) == TABLE


def test_file(tmp_path):
    path = tmp_path / "points.json"
    TABLE.save(path)
    assert SwitchPoints.load(path) == TABLE
    assert SwitchPoints.load(path).digest == TABLE.digest != SwitchPoints.load().digest
    for text in ("", "{}", '{"switch_points": {"all_reduce": 1}}',
                 '{"switch_points": [{"operation": "all_reduce"}]}',
                 '{"switch_points": [{"operation": "all_reduce", "kind": "full", "ranks": 2, "bounced": 1}]}',
                 '{"switch_points": [{"operation": "send", "kind": "full", "ranks": 2}]}'):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError, match=r"points\.json has no switch points"):
            SwitchPoints.load(path)
    with pytest.raises(ValueError, match="No such file"):
        SwitchPoints.load(tmp_path / "none")
