"""--only fit: a known piecewise model comes back from noisy times; its file loads; damaged results are named."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench.collective_study import piecewise
from bench.collective_study.fitted_series import FittedSeries, as_json, draw, tables
from bench.collective_study.measurement import Measurement, SeriesKey
from bench.collective_study.piecewise import FittedSegment, PiecewiseFit
from bench.collective_study.results import Series, read
from bench.collective_study.tables import draw as collectives_picture
from bench.study import fitting
from commengine import cost
from tests.bench.study import drawn

SIZES = [2.0**k for k in range(3, 28)]
#: (from, alpha, beta)
ONE = [(0, 5e-6, 1e-10)]
THREE = [(0, 2e-6, 5e-10), (16384, 12e-6, 1.2e-10), (1 << 21, 60e-6, 2.5e-10)]


def seconds(model, size):
    _, alpha, beta = [part for part in model if part[0] <= size][-1]
    return alpha + size * beta


def row(size, spent, spread=0.02, **other):
    half = 1.96 * spread * spent
    statistics = dict.fromkeys(("p50", "p95", "p99", "min", "max", "mean"), spent)
    return {
        "operation": "all_reduce", "transport": "engine", "group": "world", "ranks": 2, "dtype": "float32",
        "redop": "sum", "root": None, "in_place": True, "bytes": int(size), "count": int(size) // 4, "iterations": 100,
        "seconds": statistics, "ci": [spent - half, spent + half],
        "algbw": size / spent, "busbw": size / spent, "wrong": 0,
    } | other  # fmt: skip


def results(path, rows):
    data = {"format": 1, "command": "python -m bench.collectives", "date": "2026-11-21", "hardware": "synthetic"}
    path.write_text(json.dumps(data | {"versions": {"python": "3"}, "rows": rows, "clock": {}}))
    return path


def call(*argv):
    return fitting.main([str(one) for one in argv])


def noisy(model, seed, sizes=SIZES, spread=0.02):
    random = np.random.default_rng(seed)
    exact = np.array([seconds(model, size) for size in sizes])
    return piecewise.fit(
        np.array(sizes), exact * (1 + spread * random.standard_normal(len(sizes))), np.full(len(sizes), spread)
    )


@pytest.mark.slow
def test_known_model_comes_back_and_its_intervals_hold_it():
    """Over 20 noisy data sets: the number of segments, switch points, and 95% intervals that hold in about 95%."""
    right = held = asked = 0
    for seed in range(20):
        found = noisy(THREE, seed).segments
        right += len(found) == 3
        if len(found) != 3:
            continue
        for part, (start, alpha, beta) in zip(found, THREE, strict=True):
            assert part.from_interval[0] <= start <= part.from_interval[1]
            assert start / 2 <= part.from_bytes <= start  # between the sizes around it
            assert part.beta == pytest.approx(beta, rel=0.15)
            held += part.alpha_interval[0] <= alpha <= part.alpha_interval[1]
            held += part.beta_interval[0] <= beta <= part.beta_interval[1]
            asked += 2
        assert found[0].alpha == pytest.approx(2e-6, rel=0.05) and found[1].alpha == pytest.approx(12e-6, rel=0.08)
    assert right >= 18
    assert 0.88 <= held / asked <= 1
    widths = [part.alpha_interval[1] - part.alpha_interval[0] for part in found[:2]]
    assert widths[0] < 0.1 * 2e-6 and widths[1] < 0.2 * 12e-6  # they hold it without being useless


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 5, 8, 25])
def test_one_line_stays_one_line(count):
    sizes = [float(size) for size in np.logspace(1, 8, count)]
    found = [len(noisy(ONE, seed, sizes).segments) for seed in range(20)]
    assert found.count(1) >= 19
    exact = noisy(ONE, 0, sizes, spread=1e-9)
    assert len(exact.segments) == 1
    assert (exact.segments[0].alpha, exact.segments[0].beta) == (pytest.approx(5e-6), pytest.approx(1e-10))


def test_wide_intervals_weigh_little():
    """A size measured badly does not move the line, and one measured well does."""
    sizes = np.array([1e3, 1e4, 1e5, 1e6, 1e7])
    spent = 1e-5 + sizes * 1e-9
    spent[2] *= 1.5
    errors = np.full(5, 0.01)
    wrong = piecewise.fit(sizes, spent, errors).segments[0]
    errors[2] = 0.5
    found = piecewise.fit(sizes, spent, errors)
    assert found.segments[0].beta == pytest.approx(1e-9, rel=1e-3)
    assert abs(wrong.beta / 1e-9 - 1) > 10 * abs(found.segments[0].beta / 1e-9 - 1)
    assert found.residuals[2] == pytest.approx(1 / 3, abs=0.01)  # (measured - model) / measured


def test_alpha_and_beta_are_not_negative():
    sizes = np.array([1.0, 2.0, 3.0, 4.0])
    for spent in (np.array([1.0, 2.5, 4.0, 5.5]), np.array([4.0, 3.9, 3.8, 3.7])):
        part = piecewise.fit(sizes, spent, np.zeros(4)).segments[0]
        assert min(part.alpha, part.beta, part.alpha_interval[0], part.beta_interval[0]) == 0


@pytest.mark.slow
def test_model_file_loads_and_predicts(tmp_path, capsys):
    random = np.random.default_rng(0)

    def rows(model, **other):
        return [row(n, seconds(model, n) * (1 + 0.01 * random.standard_normal()), 0.01, **other) for n in SIZES]

    random_order = (
        rows(THREE)
        + rows(ONE, ranks=4)
        + rows(ONE, in_place=False)
        + rows(ONE, transport="mpi4py")
        + rows(ONE, operation="gather")
    )
    random_order += [row(n, 1e-6, operation="broadcast") for n in (1, 2)] + rows(ONE, ranks=1)
    random.shuffle(random_order)
    random_order.sort(key=lambda one: one["transport"])  # the engine's first
    path = results(tmp_path / "results.json", random_order)
    assert call(path, "--output", tmp_path / "model.json", "--plot", tmp_path / "fit.png") == 0
    printed = capsys.readouterr()
    assert "left out: broadcast, 2 ranks" in printed.err and "at least 3 different sizes" in printed.err
    assert printed.out.count("| all_reduce | 2 | engine world float32 sum in place |") == 3
    assert (tmp_path / "fit.png").read_bytes()[:4] == b"\x89PNG"

    model = cost.FittedModel.load(tmp_path / "model.json")
    assert set(model.collectives) == {"all_reduce"}  # commengine.cost knows no gather
    for size in SIZES:
        assert model.seconds("all_reduce", size, 2) == pytest.approx(seconds(THREE, size), rel=0.05)
        assert model.seconds("all_reduce", size, 4) == pytest.approx(seconds(ONE, size), rel=0.05)
    file = json.loads((tmp_path / "model.json").read_text())
    assert file["measured"]["hardware"] == "synthetic"
    assert file["command"].startswith("python -m bench.study --only fit")
    assert sum(one["in_model"] for one in file["series"]) == 2 and len(file["series"]) == 5
    first = next(one for one in file["series"] if one["in_model"] and one["ranks"] == 4)
    assert len(first["points"]) == len(SIZES) and max(abs(point["residual"]) for point in first["points"]) < 0.05
    ring = first["segments"][0]["links"]["ring"]  # 6 messages; 6/4 of the bytes
    assert ring["alpha"] == pytest.approx(5e-6 / 6, rel=0.05) and ring["beta"] == pytest.approx(1e-10 / 1.5, rel=0.05)

    assert call(path, "--transport", "mpi4py", "--output", tmp_path / "mpi.json") == 0
    assert cost.FittedModel.load(tmp_path / "mpi.json").seconds("all_reduce", 0, 2) == pytest.approx(5e-6, rel=0.05)


@pytest.mark.parametrize("bounded", [True, False])
def test_very_noisy_times_are_fitted_and_the_model_is_json(bounded, tmp_path, monkeypatch):
    """A machine that others use: every other median is a thousand times too long, and known to a factor of 4.

    Where the bootstrap can tell no interval, the model has null, not the Infinity that JSON has not.
    """
    if not bounded:

        def nothing(split, *_):
            return np.zeros((3, len(split.firsts))), np.full((3, len(split.firsts)), math.inf)

        monkeypatch.setattr(piecewise, "_intervals", nothing)
    random = np.random.default_rng(3)
    rows = []
    for number, size in enumerate(SIZES[:14]):
        spent = seconds(ONE, size) * (1000 * random.lognormal() if number % 2 else 1)
        width = (0.2, 3.0) if number % 2 else (0.99, 1.01)
        rows.append(row(size, spent, ci=[width[0] * spent, width[1] * spent]))
    path, model = results(tmp_path / "results.json", rows), tmp_path / "model.json"
    assert call(path, "--output", model, "--plot", tmp_path / "fit.png", "--markdown", tmp_path / "fit.md") == 0

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    (series,) = json.loads(model.read_text(), parse_constant=refuse)["series"]
    for part in series["segments"]:
        for name in ("alpha", "beta"):
            low, high = part[f"{name}_interval"]
            assert (low <= part[name] <= high) if bounded else [low, high] == [0, None]
    loaded = cost.FittedModel.load(model)
    assert all(math.isfinite(loaded.seconds("all_reduce", size, 2)) for size in SIZES)


@pytest.mark.parametrize(
    ("edit", "argv", "message"),
    [
        (lambda d: d.pop("rows"), (), 'there is no list "rows"'),
        (lambda d: d.update(format=2), (), "format 2; this version reads 1"),
        (lambda d: d["rows"][1].pop("bytes"), (), "rows[1]: bytes is missing"),
        (lambda d: d["rows"][1]["seconds"].pop("p50"), (), "rows[1]: 'p50' is missing"),
        (lambda d: d["rows"][1]["seconds"].update(p50=0), (), "seconds.p50=0.0: a time is above 0"),
        (lambda d: d["rows"][1]["seconds"].update(p50=math.nan), (), "seconds.p50=nan: should be a finite number"),
        (lambda d: d["rows"][1].update(seconds=1.0), (), "rows[1]: seconds=1.0: should be an object"),
        (lambda d: d["rows"][1].update(bytes="8"), (), "bytes='8': should be a valid integer"),
        (lambda d: d["rows"][1].update(ci=[2, 1]), (), "ci=[2.0, 1.0]: the low end is above"),
        (lambda d: d["rows"][1].update(ci=3), (), "ci=3: should be"),
        (lambda d: d["rows"][1].update(wrong=4), (), "had 4 wrong values"),
        (lambda d: d["rows"][1].update(ranks=1.5), (), "ranks=1.5: should be a valid integer"),
        (lambda d: d["rows"].insert(1, 7), (), "rows[1]: should be an object"),
        (lambda d: d["rows"].clear(), (), "nothing to fit"),
        (lambda d: d.update(rows=d["rows"][:2]), (), "at least 3 different sizes, not 2"),
        (lambda d: None, ("--transport", "nccl"), "--transport nccl: not among the results, which have engine"),
        (lambda d: None, ("--segments", "2"), "unrecognized arguments: --segments 2"),
        (lambda d: None, ("--plot", "fit.xyz"), "xyz"),
        (lambda d: None, ("--output", "results.json"), "--output results.json: is a file that this command reads"),
        (lambda d: None, ("--output", "a.md", "--markdown", "a.md"), "--markdown a.md: is the file of --output, too"),
        (lambda d: None, ("--output", "nowhere/model.json"), "nowhere/model.json"),
    ],
)
def test_bad_input_is_one_clear_error(edit, argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = results(tmp_path / "results.json", [row(n, seconds(ONE, n)) for n in SIZES[:6]])
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(SystemExit) as ended:
        call(path, *argv)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def fitted_model(path, *argv):
    model = path.with_name("model.json")
    assert call(path, "--output", model, *argv) == 0
    return json.loads(model.read_text())


def test_rows_that_may_not_be_compared_move_no_fit_and_are_named(tmp_path, capsys):
    """A disturbed row, and one of few calls whose interval has no width, as its least and largest time are one."""
    good = [row(n, seconds(ONE, n)) for n in SIZES[:12]]
    alone = fitted_model(results(tmp_path / "results.json", good))
    bad = [row(64.0, 3e-3, disturbed=True), row(2.0**16, 9e-4, 0.0, iterations=1), row(128.0, 1e-6, iterations=5)]
    found = fitted_model(results(tmp_path / "results.json", [bad[0], *good, *bad[1:]]))
    assert found["collectives"] == alone["collectives"]
    assert found["series"][0]["segments"] == alone["series"][0]["segments"]
    assert len(found["series"][0]["left_out"]) == 3
    said = capsys.readouterr().out
    assert (
        "left out: 64 bytes (measured in another state only), 65,536 bytes (1 calls, and an interval needs 6)" in said
    )


@pytest.mark.parametrize("first", [0, 1])
def test_a_model_has_one_state_dtype_and_reduction_whatever_comes_first(first, tmp_path, capsys):
    usual = [row(n, seconds(ONE, n), state="state 1") for n in SIZES[:8]]
    slow = [row(n, 3 * seconds(ONE, n), state="state 2", iterations=30) for n in SIZES[:8]]
    half = [row(n, seconds(ONE, n) / 2, dtype="bfloat16", state="state 1") for n in SIZES[:8]]
    most = [row(n, seconds(ONE, n) / 3, redop="max", state="state 1") for n in SIZES[:8]]
    one_way = [row(n, 2e-6 + 1e-10 * n, operation="send", redop="none", state="state 1") for n in SIZES[:8]]
    both_ways = [row(n, 4e-6 + 2e-10 * n, operation="sendrecv", redop="none", state="state 1") for n in SIZES[:8]]
    parts = [slow, half, most, both_ways, usual, one_way]
    path = results(tmp_path / "results.json", [one for part in (parts if first else parts[::-1]) for one in part])

    def at_0(*argv):
        found = cost.FittedModel.from_json(fitted_model(path, *argv))
        return [round(1e6 * found.seconds(name, 0, 2), 3) for name in found.collectives]

    assert at_0() == [5, 2]
    said = capsys.readouterr().out
    assert "float32 of bfloat16, float32 (--dtype chooses)" in said and "state 1 of state 1, state 2" in said
    assert at_0("--redop", "max") == [1.667, 2] and at_0("--dtype", "bfloat16") == [2.5]
    (fast,) = fitted_model(path, "--state", "state 2")["collectives"]["all_reduce"]
    assert fast["alpha"] == pytest.approx(15e-6)
    with pytest.raises(SystemExit):
        call(path, "--state", "state 3")
    assert "--state state 3: not among the results, which have state 1, state 2" in capsys.readouterr().err
    rows = [*half, *(one | {"dtype": "float64"} for one in usual)]
    with pytest.raises(SystemExit):
        call(results(path, rows))
    assert "--dtype: the results have several; give one of bfloat16, float64" in capsys.readouterr().err
    alone = results(path, both_ways)
    assert fitted_model(alone)["notes"] == ["p2p on 2 ranks is sendrecv, because no send was fitted"]


def test_times_that_do_not_depend_on_the_size_have_no_bandwidth(tmp_path, capsys):
    path = results(tmp_path / "results.json", [row(n, 5e-6, 0.0) for n in SIZES[:9]])
    assert call(path) == 0
    assert "| infinity [infinity to infinity] |" in capsys.readouterr().out
    assert call(results(path, [row(n, 1e-9 * n, 0.0) for n in SIZES[:9]])) == 0
    assert "| 0 [0 to 0] | 1 [1 to 1] |" in capsys.readouterr().out


@pytest.mark.slow
def test_drawn_files_keep_their_bounds(tmp_path):
    """A sample of ``python -m tests.bench.study.drawn``: bounds hold for many files, and nothing moves a model."""
    found = [drawn.judged(1, number, tmp_path) for number in range(24)]
    assert not any(one["moved"] for one in found)
    straight = [one for one in found if not one["broken"]]
    broken = [one["found"] for one in found if one["broken"]]
    assert len(straight) > 5 and sum(one["false"] for one in straight) <= 1 and sum(broken) >= 0.75 * len(broken)
    held = [each for one in straight for each in one.get("held", [])]
    assert sum(held) >= 0.8 * len(held)
    assert np.median([each for one in straight for each in one.get("wide", [])]) <= drawn.WIDE


def test_file_that_is_none_is_named(tmp_path, capsys):
    (tmp_path / "text.json").write_text("{")
    for name in ("text.json", "nowhere.json"):
        with pytest.raises(SystemExit):
            call(tmp_path / name)
        assert name in capsys.readouterr().err


def test_an_end_that_the_data_do_not_bound_reads_0_or_infinity():
    way = SeriesKey("all_reduce", 2, "engine", in_place=True)
    sizes = np.array([8.0, 64.0, 512.0])
    segment = FittedSegment(0.0, (0.0, 0.0), 1e-6, (0.0, math.inf), 1e-9, (0.0, math.inf))
    series = Series(way, sizes, 1e-6 + 1e-9 * sizes, np.zeros(3))
    fitted = FittedSeries(series, PiecewiseFit((segment,), (0.0, 0.0, 0.0), 0.0))
    row = list(tables([fitted]))[2]
    assert "| 1 [0 to infinity] | 1 [0 to infinity] |" in row
    data = as_json([fitted], {}, Path("r.json"), {})
    assert data["series"][0]["segments"][0]["alpha_interval"] == [0.0, None]  # JSON has no infinity


def test_a_wide_interval_stays_on_the_axis_and_what_was_disturbed_has_a_cross(tmp_path):
    """An interval of plus or minus 150% of the time reaches below 0. What was disturbed is in no fit."""
    sizes = [8, 64, 512, 4096]
    rows = [
        {"operation": "all_reduce", "transport": way, "ranks": 2, "dtype": "float32", "redop": "sum", "in_place": True,
         "bytes": size, "seconds": {"p50": 1e-6 + 1e-9 * size}, "ci": [0.0, 3e-6] if size == 64 else None}
        | ({"disturbed": True} if size == 512 else {})
        for way in ("mpi4py", "shared") for size in sizes
    ]  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps({"format": 1, "rows": rows}))
    series, _ = read(tmp_path / "r.json")
    fitted = [FittedSeries(one, piecewise.fit(one.sizes, one.seconds, one.errors)) for one in series]
    figure = draw(fitted)
    left, right = figure.axes
    ends = [segment[:, 1].min() for bars in left.collections for segment in bars.get_segments()]
    assert len(ends) == 6 and min(ends) > 0.2  # microseconds, of a time of 1.1
    crosses = [line for line in left.get_lines() if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[512], [512]]
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert labels == [
        "2 ranks, plain MPI, float32, sum, in place", "2 ranks, window, float32, sum, in place",
        "does not count (~ another state, ? few calls)",
    ]  # fmt: skip
    figure.canvas.draw()
    assert not right.yaxis.get_label().get_window_extent().overlaps(left.get_window_extent())


def test_fits_have_the_lines_of_the_collectives_and_legends_beside_them():
    """A colour is a transport, a dash a place; no legend lies over a plot."""
    sizes = np.array([8.0, 64.0, 512.0, 4096.0])
    fitted, rows = [], []
    for transport in ("engine", "mpi4py"):
        for in_place in (False, True):
            way = SeriesKey("all_reduce", 2, transport, dtype="float32", redop="sum", in_place=in_place)
            times = 1e-6 + 1e-9 * sizes
            series = Series(way, sizes, times, np.full(4, 0.01))
            fitted.append(FittedSeries(series, piecewise.fit(series.sizes, series.seconds, series.errors)))
            rows += [
                Measurement(**way._asdict(), bytes=int(size), seconds={"p50": spent}, busbw=size / spent)
                for size, spent in zip(sizes, times, strict=True)
            ]
    looks = []
    for figure in (draw(fitted), collectives_picture(rows)):
        figure.canvas.draw()
        left, right = figure.axes
        legend = right.get_legend().get_window_extent()
        assert not any(legend.overlaps(axes.get_window_extent()) for axes in (left, right))
        assert legend.x1 <= figure.bbox.x1 and legend.y0 >= 0
        lines = [line for line in right.get_lines() if not line.get_label().startswith("_")]
        looks.append([(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines])
    assert looks[0] == looks[1] and len(set(looks[0])) == 4


def test_a_line_between_two_sizes_has_no_residual() -> None:
    ends = (1.0, 1.0)
    parts = tuple(FittedSegment(start, ends, 1e-6, ends, 1e-9, ends) for start in (0.0, 20.0, 24.0))
    sizes = np.array([8.0, 16.0, 32.0])
    series = Series(SeriesKey("all_reduce", 2, None), sizes, np.full(3, 1e-6), np.full(3, 0.01))
    found = [*tables([FittedSeries(series, PiecewiseFit(parts, (0.5, 0.0, 0.25), 0.0))])]
    assert [line.split("|")[-3:-1] for line in found[2:5]] == [
        [" 35.4% ", " +50.0% "],
        [" - ", " - "],
        [" 25.0% ", " +25.0% "],
    ]
