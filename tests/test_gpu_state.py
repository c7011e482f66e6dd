"""The table of docs/gpus.md, "What has run on a GPU", against bench/results/gpu-h200.md; no other page speaks of it."""

import re
from pathlib import Path

import pytest

from bench.gpu_study.losses import COMPARISONS
from tests.support import documents
from tests.support.each import each
from tests.support.mpirun import ROOT

GPUS = ROOT / "docs" / "gpus.md"
RESULTS = (ROOT / "bench" / "results" / "gpu-h200.md").read_text(encoding="utf-8")
HEAD = ["feature", "ran on one H200", "tested on the CPU with", "never on a GPU"]
RESULT = re.compile(r"\]\(\.\./bench/results/([\w-]+\.md)(?:#([\w-]+))?\)")

#: what only the table may say: that something has not run on a GPU
DENIED = re.compile(
    r"not on a GPU|on a GPU,? not|not (?:yet )?(?:been )?(?:run|tried|tested) on (?:a |any |one )?GPUs?\b|no GPU yet"
    r"|^\|.*\bGPUs?\b.*\bnot run\b.*$",
    re.MULTILINE,
)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table(text: str) -> list[list[str]]:
    """The rows of the table, without its head."""
    section = text.partition("## What has run on a GPU\n")[2].partition("\n## ")[0]
    head, rule, *rows = (cells(line) for line in section.splitlines() if line.startswith("|"))
    assert head == HEAD and set("".join(rule)) <= {"-"}
    return rows


def passed(results: str) -> set[str]:
    """The names of stages and rows of gpu-h200.md that passed: of `live`, of `right` and of `fast`."""
    found = set()
    for line in results.splitlines():
        row = cells(line) if line.startswith("| ") else []
        stage = re.search(r"\(`(\w+)`\)$", row[0]) if row else None
        if stage is not None and not re.search(r"FAILED|TIMED OUT|[1-9]\d* failed|wrong", row[-1]):
            found.add(stage[1])
        if row and row[-1] == "agrees":
            found.add(row[0])
        if len(row) > 2:
            found |= {cell for cell in row[:3] if re.fullmatch(r"[a-z][a-z ]+|[\d.]+[MB]", cell)}
    return found


def unfounded(text: str, results: str) -> list[str]:
    """The names in the cells "ran" that the results do not have, or that did not pass there."""
    passes = passed(results)
    return [name for row in table(text) for name in re.findall(r"`([^`]+)`", row[1]) if name not in passes]


def test_what_ran_stands_in_the_results_and_passed() -> None:
    text = GPUS.read_text(encoding="utf-8")
    assert len(table(text)) > 20
    assert unfounded(text, RESULTS) == []


def test_each_row_says_something_of_a_gpu_and_links_are_to_headings() -> None:
    for feature, ran, cpu, never in table(GPUS.read_text(encoding="utf-8")):
        assert ran or never, feature
        assert cpu or ran, feature
        assert not ran or "`" in ran or RESULT.search(ran), f"{feature}: no evidence"
        assert ran or never == "all of it" or never in ("training", "it refuses devices"), feature
    for name, heading in RESULT.findall(GPUS.read_text(encoding="utf-8")):
        assert not heading or heading in documents.anchors(ROOT / "bench" / "results" / name)


def test_every_run_and_stage_of_the_results_is_in_the_table() -> None:
    """A run that gpu-h200.md gains must not be missing here."""
    text = GPUS.read_text(encoding="utf-8")
    named = {name for row in table(text) for name in re.findall(r"`([^`]+)`", row[1])}
    reference = {"cuda"}  # the run on one rank, with which the others agree
    stages = set(re.findall(r"\(`(\w+)`\) \|", RESULTS))
    runs = {one.run for one in COMPARISONS} & passed(RESULTS)
    assert stages | runs > reference
    assert (stages | runs) - named - reference == set()


@pytest.mark.parametrize(
    "old, new",
    [
        ("| pp2_nccl | pp2_staged | 20 | 5.2724 | 0 | 0.0002 | agrees |", "| pp2_nccl | pp2_staged | 20 | 9 | no |"),
        ("| 8 passed |", "| 7 passed, 1 failed |"),
        ("(`gpu_tests_2`)", ""),
        ("| 355M | 8 | eager |", "| x | 8 | eager |"),
    ],
)  # fmt: skip
def test_what_failed_or_is_missing_is_found(old: str, new: str) -> None:
    results = RESULTS.replace(old, new)
    assert results != RESULTS
    if old.startswith("| 355M"):
        results = results.replace("| 355M |", "| x |")
    assert unfounded(GPUS.read_text(encoding="utf-8"), results) != []


@each("page", [page for page in documents.PAGES if page != GPUS], documents.name)
def test_no_other_page_says_what_has_not_run_on_a_gpu(page: Path) -> None:
    text = re.sub(r"(?<!\|)\n(?!\|)", " ", documents.prose(page))  # a sentence or a row is one line
    found = [one[0] for one in DENIED.finditer(text)]
    assert found == [], "link to gpus.md#what-has-run-on-a-gpu in its place"


@pytest.mark.parametrize(
    "sentence",
    [
        "context groups; not on a GPU yet",
        "mixtures, with expert groups; on a GPU not in training",
        "that has not run on a GPU yet",
        "it has never run here, and not been tried on any GPU",
        "| the same on GPUs | not run yet |",
    ],
)
def test_such_a_sentence_is_found(sentence: str) -> None:
    assert DENIED.search(sentence)
