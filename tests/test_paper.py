"""docs/paper.md: every item of the paper has its place, and what is counted or predicted is up to date."""

import math
import re
from dataclasses import replace

import pytest

from bench.clusters.cluster import load
from bench.prediction import paper
from bench.prediction.model_cost import predict
from tests.support.mpirun import ROOT
from tplayers import formulas
from tplayers.formulas import StepLayout
from trainers.presets import FINETUNING, PRESETS

PAGE = (ROOT / "docs" / "paper.md").read_text()
DGX_2H = load("dgx-2h")
GPT = ("gpt-355m", "gpt-2.5b", "gpt-8.3b")
ITERATIONS = 300_000  # of all GPTs in Figure 6


def rows(heading):
    """The cells of all rows of tables under the heading that begins so, without backticks."""
    (section,) = re.findall(rf"^#+ {re.escape(heading)}.*?\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]


def petaflops(value):
    """Three significant digits, but none after the third decimal."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def row(heading, *first):
    (found,) = [cells for cells in rows(heading) if cells[: len(first)] == list(first)]
    return found


def test_every_equation_figure_and_table_has_a_place():
    headings = "\n".join(line for line in PAGE.splitlines() if line.startswith("#"))
    for kind, plural, count in (("Equation", "Equations", 4), ("Figure", "Figures", 8), ("Table", "Tables", 8)):
        named = set(re.findall(rf"{kind} (\d)", headings))
        for first, word, last in re.findall(rf"{plural} (\d) (and|to) (\d)", headings):
            named |= set(map(str, range(int(first), int(last) + 1))) if word == "to" else {first, last}
        assert named == {str(n) for n in range(1, count + 1)}, kind
    assert "Code 1" in PAGE


def test_scaling_figures_are_those_that_the_command_computes():
    found = {(one.section, one.gpus, one.case): one for one in paper.figures(DGX_2H)}
    of_size = {"1.2b": "1.2B", "2.5b": "2.5B", "4.2b": "4.2B", "8.3b": "8.3B"}
    for data in (1, 64):
        for model, tensor in paper.FIGURE_5:
            gpus = data * tensor
            cells = row("Figures 1 and 5", of_size[model], str(gpus))
            step = paper.run(DGX_2H, model, tensor, data=data)
            assert cells[5] == petaflops(step.flops_per_device * gpus / 1e15)
            if gpus == 1:
                assert cells[2:4] == ["100", "100"]
                continue
            section = "figure5-mp" if data == 1 else "figure5-mp-dp"
            one = found[section, gpus, f"{of_size[model]}, {gpus} GPUs"]
            assert cells[2:5] == [
                f"{one.published:.0f}", f"{one.predicted:.1f}", petaflops(one.published / 100 * 39e-3 * gpus)
            ]  # fmt: skip
    for heads in (16, 24, 32):
        one = found["table7", 8, f"{heads} heads of {3072 // heads}"]
        assert row("Table 7", str(heads))[1:] == [str(3072 // heads), f"{one.published:.0f}", f"{one.predicted:.1f}"]
    for gpus in (2, 4, 8):
        one = found["table8", gpus, f"{gpus} GPUs"]
        assert row("Table 8", str(gpus))[1:] == [f"{one.published:.2f}", f"{one.predicted:.2f}"]


def test_days_are_those_that_the_command_computes():
    for name, (model, heads, tensor, days) in zip(GPT, paper.EPOCHS, strict=True):
        seconds = paper.run(DGX_2H, model, tensor, data=64, heads=heads).total
        cells = row("Table 2", name)
        assert cells[4] == str(64 * tensor) and cells[6] == f"{days:.2f}"
        assert cells[7] == f"{seconds * paper.EPOCH_ITERATIONS / 86400:.2f}"
        run = row("Figure 6", model.upper())[2]
        assert run == f"needs {64 * tensor} GPUs for {seconds * ITERATIONS / 86400:.1f} days (predicted)"


@pytest.mark.parametrize(
    "name, gpus, micro_batch", [("bert-336m", 128, 8), ("bert-1.3b", 256, 4), ("bert-3.9b", 512, 8)]
)
def test_steps_of_berts_are_those_that_the_command_computes(name, gpus, micro_batch):
    preset = PRESETS[name]
    layout = StepLayout(tensor=preset.tensor, data=gpus // preset.tensor, micro_batch=micro_batch, recompute="full")
    assert layout.batch == 1024
    cells = row("Table 4", name)
    assert cells[4] == str(gpus) and cells[5] == preset.published
    assert cells[7] == f"{predict(preset.shape(), replace(layout, position_mask=True), DGX_2H).total:.3f}"


def test_sizes_and_counts_are_those_of_the_presets():
    for heading, names in (
        ("Table 1", ("gpt-1.2b", "gpt-2.5b", "gpt-4.2b", "gpt-8.3b-32-heads")), ("Table 2", GPT),
        ("Table 4", ("bert-336m", "bert-1.3b", "bert-3.9b")),
    ):  # fmt: skip
        for name in names:
            preset, cells = PRESETS[name], row(heading, name)
            assert {str(size) for size in (preset.layers, preset.hidden, preset.heads)} == set(cells[1:4])
            assert f"{preset.parameters:,}" in cells[4:7]
            if heading == "Table 1":
                assert cells[6:] == [str(preset.paper_tensor), str(preset.smallest_tensor(32))]
    guess = replace(PRESETS["bert-336m"], layers=36, hidden=1280, heads=20)
    assert f"{guess.parameters:,}" in PAGE


def test_table_6_is_that_of_the_presets():
    names = {"mnli": "MNLI", "qqp": "QQP", "squad-1.1": "SQuAD 1.1", "squad-2.0": "SQuAD 2.0", "race": "RACE"}
    assert set(names) == set(FINETUNING)
    for task, recipe in FINETUNING.items():
        pairs = zip(recipe.batch, recipe.rate, strict=True)
        cells = [f"{batch}, {rate:.0e}".replace("e-0", "e-") for batch, rate in pairs]
        assert row("Tables 5 and 6", names[task], cells[0])[1:] == [*cells, str(recipe.epochs)]


def test_counted_numbers_of_the_text():
    tokens = paper.EPOCH_ITERATIONS * 512 * 1024
    assert f"{tokens / 1e9:.1f} billion tokens of {174e9 / tokens:.2f} bytes" in PAGE
    assert f"512 x 39 TFLOP/s are {100 * 15.1e15 / 512 / 39e12:.1f}%; 74% are {0.74 * 512 * 39e-3:.1f} PFLOP/s" in PAGE
    assert f"9.27 is {math.log(9.27):.3f} nats" in PAGE
    b, s, v = 2, 256, 8192
    assert f"sends {4 * 3 * b * s:,} bytes in place of {4 * b * s * v:,}" in PAGE
    shape = PRESETS["gpt-8.3b-32-heads"].shape()
    assert sum(one.count for one in formulas.tensor_parallel_collectives(shape, 8, 8, recompute="full")) == 6 * 72 + 2
