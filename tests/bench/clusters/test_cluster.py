"""Files of machines: the user's own, by bench.predict --measure, and what measurements add to a file."""

import json
import os
from dataclasses import replace
from functools import partial

import pytest
import yaml

from bench import predict
from bench.clusters import cluster
from bench.clusters.device_rates import measure_rates
from bench.prediction import group_cost
from bench.prediction.kernels import gemm_seconds
from bench.prediction.model_cost import predict as predict_step
from bench.prediction.model_cost import slowdown
from bench.prediction.step_report import calibration
from commengine import UsageError
from tplayers.formulas import StepLayout, TransformerShape, model_flops


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test has a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(*argv):
    """The cluster that the command of the error message writes."""
    *_, option, file = cluster.OWN_COMMAND.split()
    assert predict.main(["--measure", option, file, *argv]) == 0
    return cluster.load(cluster.OWN)


@pytest.mark.slow
def test_the_error_names_the_command_that_makes_the_file(capsys):
    with pytest.raises(
        UsageError, match=r"^--cluster this-machine: there is no this-machine.yaml in this folder; make"
    ):
        cluster.load(cluster.OWN)
    found = written()
    assert (
        "its links are not measured" in found.name and found.machine.inside == cluster.load("amd-epyc").machine.inside
    )
    assert found.machine.ranks_per_node == len(os.sched_getaffinity(0))
    assert 1e9 < found.device.peak_flops < 1e13 and 1e8 < found.device.memory_bandwidth < 1e13
    assert predict.main(["--cluster", cluster.OWN, "--model", "355m", "--gpus", "2"]) == 0
    assert "its links are not measured" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.slow
def test_measured_links(folder, capsys):
    """4 ranks send 2 x 3/4 of the bytes each: 96 of 64 MB, in 10 ms."""
    rows = [{"bytes": 8, "commengine": 4.5}, {"bytes": 64_000_000, "commengine": 10_000.0}]
    (folder / "overhead.json").write_text(json.dumps({"ranks": 4, "rows": rows}))
    found = written("--overhead", "overhead.json")
    assert "not measured" not in found.name
    assert (found.base, 1 / found.machine.inside.beta) == pytest.approx((4.5e-6, 9.6e9))


@pytest.mark.parametrize("content", ["[]", '{"ranks": 2, "rows": []}', '{"ranks": 1, "rows": [{"bytes": 8}]}', "{"])
def test_other_results_give_no_links(content, folder, capsys):
    (folder / "overhead.json").write_text(content)
    with pytest.raises(SystemExit) as ended:
        predict.main(["--measure", "--overhead", "overhead.json"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("python -m bench.predict: error: --overhead overhead.json")


class Device:
    """Seconds of a device with these rates, for whatever kernel is run."""

    def __init__(self, rate, start):
        self.rate, self.start = rate, start

    def __call__(self, run, rounds):
        if isinstance(run, partial):  # a product
            flops = 2 * run.args[0].shape[0] ** 3
            return self.start + flops / self.rate
        return 1e-3


@pytest.mark.parametrize(("rate", "start"), [(5e12, 3e-5), (1e11, 0.0)])
def test_two_products_tell_the_rate_and_the_start(rate, start):
    found = measure_rates(Device(rate, start))
    assert (found.products, found.product_start) == (pytest.approx(rate), pytest.approx(start, abs=1e-12))
    assert found.plain == pytest.approx(12 * (8 << 20) / 1e-3) and found.dispatch == pytest.approx(1e-6)


def test_a_machine_whose_small_products_are_faster_has_no_start():
    found = measure_rates(Device(1e11, -1e-6))
    assert found.product_start == 0 and found.products == pytest.approx(2 * 1024**3 / (2 * 1024**3 / 1e11 - 1e-6))


def model(path, **segments):
    """A model file of bench.study --only fit. segments: operation -> (ranks, alpha) of each."""
    rows = {
        name: [{"ranks": ranks, "from_bytes": 0, "alpha": alpha, "beta": 0} for ranks, alpha in pairs]
        for name, pairs in segments.items()
    }
    path.write_text(json.dumps({"format": 1, "collectives": rows}))


def own(folder, **more):
    """A file of a cluster: that of bench/clusters/dgx-a100.yaml, with more keys."""
    data = yaml.safe_load((cluster.FOLDER / "dgx-a100.yaml").read_text())
    (folder / "own.yaml").write_text(yaml.safe_dump(data | more))
    return cluster.load(str(folder / "own.yaml"))


def place(members, groups, file):
    return {"members_per_node": members, "groups_per_node": groups, "fitted": file}


def test_measured_groups_come_before_links_and_before_a_node_s_own_model(folder):
    model(folder / "eight.json", all_reduce=[(16, 1.0)])
    model(folder / "more.json", all_reduce=[(32, 2.0)], all_gather=[(32, 3.0)])
    found = own(folder, measured=[place(2, 4, "eight.json"), place(2, 4, "more.json"), place(1, 8, "more.json")])
    seconds = partial(group_cost.ring_seconds, found, size=1e6)
    assert seconds("all_reduce", ranks=16, members_per_node=2, groups_per_node=4) == 1
    assert seconds("all_reduce", ranks=32, members_per_node=2, groups_per_node=4) == 2
    assert seconds("all_reduce", ranks=64, members_per_node=2, groups_per_node=4) == pytest.approx(2 * 63 / 31)
    assert seconds("all_gather", ranks=32, members_per_node=1, groups_per_node=8) == 3
    links = replace(found, measured={})
    for operation, members in (("reduce_scatter", 2), ("all_reduce", 4)):  # what nobody measured
        other = group_cost.ring_seconds(links, operation, 1e6, 32, members, 4)
        assert seconds(operation, ranks=32, members_per_node=members, groups_per_node=4) == other < 0.1


def test_a_group_between_nodes_is_not_predicted_from_one_inside_a_node(folder):
    """Both have 8 members on a node, and are alone there."""
    model(folder / "inside.json", all_reduce=[(8, 1.0)])
    model(folder / "between.json", all_reduce=[(16, 5.0)])
    inside = own(folder, measured=[place(8, 1, "inside.json")])
    both = own(folder, measured=[place(8, 1, "inside.json"), place(8, 1, "between.json")])
    links = replace(inside, measured={})
    for ranks, found in ((8, 1), (16, group_cost.ring_seconds(links, "all_reduce", 1e6, 16, 8, 1))):
        assert group_cost.ring_seconds(inside, "all_reduce", 1e6, ranks, 8, 1) == found
    assert group_cost.ring_seconds(both, "all_reduce", 1e6, 8, 8, 1) == 1
    assert group_cost.ring_seconds(both, "all_reduce", 1e6, 64, 8, 1) == pytest.approx(5 * 63 / 15)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ([place(4, 4, "fit.json")], r"measured\[0\]: 4 groups of 4 members need more than 8 ranks"),
        (
            [place(1, 1, "fit.json"), place(1, 1, "fit.json")],
            r"all_reduce, 16 ranks: segments start at 0 bytes and at different sizes",
        ),
        ({"members_per_node": 1}, "measured={'members_per_node': 1}: should be a valid array"),
        ([place(0, 1, "fit.json")], r"measured\[0\].members_per_node=0: should be greater than or equal to 1"),
        ([place(1, 1, "fit.json") | {"ranks": 2}], r"unknown: measured\[0\].ranks"),
        ([place(1, 1, "none.json")], "none.json"),
    ],
)
def test_wrong_measured_groups_are_named(folder, measured, message):
    model(folder / "fit.json", all_reduce=[(16, 1.0)])
    with pytest.raises(UsageError, match=f"^--cluster .*{message}"):
        own(folder, measured=measured)


def test_a_step_of_a_shape_calibrates(folder):
    """A calibration with the FLOP/s that the model says without one changes nothing; with fewer, memory is slower."""
    shape = TransformerShape(4, 512, 8, 256, 4096)
    sizes = {
        "num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 256, "padded_vocab_size": 4096,
    }  # fmt: skip
    plain = own(folder)
    rate = predict_step(shape, StepLayout(micro_batch=2), plain).flops_per_device
    slower = []
    for factor in (1.0, 0.8):
        seconds = model_flops(shape, 2) / (factor * rate)
        row = {"model": sizes, "micro_batch_size": 2, "recompute": "none", "seconds": seconds}
        found = own(folder, calibration=row)
        assert predict_step(shape, StepLayout(micro_batch=2), found).flops_per_device == pytest.approx(factor * rate)
        slower.append(slowdown(found))
    assert slower[0] == pytest.approx(1) and slower[1] > 1.05
    assert "calibrated: " in calibration(found) and " M parameters, micro-batch 2" in calibration(found)
    del sizes["hidden_size"]
    with pytest.raises(UsageError, match=r"calibration.model.hidden_size is missing"):
        own(folder, calibration=row)


def test_measured_attention_and_the_start_of_a_product_count(folder):
    data = yaml.safe_load((cluster.FOLDER / "dgx-a100.yaml").read_text())["device"]
    plain = own(folder, device=data)
    found = own(folder, device=data | {"gemm_start_us": 7, "attention_efficiency": [0.3, 0.25]})
    shape, layout = TransformerShape(4, 512, 8, 256, 4096), StepLayout(attention_dropout=False)
    more = gemm_seconds(found.device, 64, 64, 64) - gemm_seconds(plain.device, 64, 64, 64)
    assert more == pytest.approx(7e-6)
    before, after = (predict_step(shape, layout, one).seconds for one in (plain, found))
    assert after["attention"] == pytest.approx(2 * before["attention"])
    assert after["gemm"] - before["gemm"] == pytest.approx(4 * 12 * 7e-6)  # 4 products a layer, and 8 backward
    with pytest.raises(UsageError, match=r"device.attention_efficiency\[1\] is missing"):
        own(folder, device=data | {"attention_efficiency": [0.3]})
