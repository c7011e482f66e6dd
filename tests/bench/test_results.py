"""bench/results: each page has its machine and a command that still runs, or did at a commit that the page names.

The rows of a long table stand in CSV files beside the page.
"""

import csv
import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from commengine.options import declared
from tests.support.each import each
from tests.support.mpirun import ROOT
from tests.support.running import budget
from trainers.tasks.commands import PRETRAIN_GPT

RESULTS = ROOT / "bench" / "results"
PAGES = sorted(RESULTS.glob("*.md"))
HEADING = ("command", "date", "hardware", "versions")
#: pages whose command is no single ``python -m``
OTHER_COMMANDS = {"gpu-h200.md", "moe.md"}
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"`(?:(?:mpirun|mpiexec|srun)[^`]*? )?python -m ([^`]+)`")
WRITTEN = re.compile(r"(--(?:output|json|plot|timeline|save)) \S*/")
COMMIT = re.compile(r"\b(?=[a-f]*\d)[\da-f]{8}\b")


def name(page: Path) -> str:
    return page.name


def commands(page: Path) -> list[list[str]]:
    """The words after ``python -m`` of all commands of a page; of files that they write, the names alone."""
    found = PYTHON.findall(FENCED.sub("", page.read_text()))
    return [shlex.split(WRITTEN.sub(r"\1 ", " ".join(words.split()))) for words in found]


def commits(page: Path) -> list[str]:
    """The commits that a page names, in lines with the word."""
    lines = re.split(r"\n(?![ ])", page.read_text())
    return [found for line in lines if "commit" in line.lower() for found in COMMIT.findall(line)]


def require_taken(words: list[str]) -> None:
    """Raise an error if no module of today takes the words."""
    module, *words = words
    package = (ROOT / module.replace(".", "/")).is_dir()
    at = importlib.import_module(f"{module}.__main__" if package else module)
    if module == "trainers.preprocess_data":
        declared.parse(at.PreprocessSettings, words, module)
        return
    if words[:1] == ["--only"] and hasattr(at, "PARTS"):
        at, words = at.PARTS[words[1]], words[2:]
    if module in ("bench.contest", "bench.conformance"):
        parser, words = at.parser(words[0]), words[1:]
    else:
        parser = at.parser()
    _, rest = parser.parse_known_args(words)
    if module == "bench.step":
        PRETRAIN_GPT.parse(rest)  # the settings of the model
    else:
        assert rest == [], f"{module} has no {rest}"


def taken(words: list[str]) -> bool:
    try:
        require_taken(words)
    except (Exception, SystemExit):
        return False
    return True


def git(*words: str) -> bool:
    """Whether git succeeds; also in a checkout that another user owns."""
    return subprocess.run(["git", "-c", "safe.directory=*", *words], cwd=ROOT, capture_output=True).returncode == 0


def was_at(commit: str, words: list[str]) -> bool:
    """Whether a commit has the program of a command."""
    module = words[0].replace(".", "/")
    if module == "bench/contest" and len(words) > 1:
        module = f"bench/contest/{words[1]}"
    return any(git("cat-file", "-e", f"{commit}:{path}") for path in (f"{module}.py", f"{module}/__main__.py"))


@each("page", PAGES, name)
def test_a_page_has_its_machine_and_its_command(page):
    text = page.read_text()
    assert [word for word in HEADING if not re.search(rf"^- {word}: \S", text, re.MULTILINE)] == []
    assert page.name in OTHER_COMMANDS or commands(page)


@each("page", [page for page in PAGES if commands(page)], name)
def test_commands_run_today_or_at_a_commit_that_the_page_names(page):
    wrong = [words for words in commands(page) if not taken(words)]
    assert wrong == [] or commits(page), f"{page.name} names no commit, and today nothing takes {wrong}"


@each("page", [page for page in PAGES if commits(page)], name)
def test_commits_of_a_page_are_in_the_repository_and_have_its_program(page):
    if not git("rev-parse", "HEAD") or (ROOT / ".git" / "shallow").exists():
        pytest.skip("this is no clone with its history")
    named = commits(page)
    assert [commit for commit in named if not git("cat-file", "-e", f"{commit}^{{commit}}")] == []
    today, gone = [], []
    for words in commands(page):
        (today if taken(words) else gone).append(words)
    there = [words for words in commands(page) if any(was_at(commit, words) for commit in named)]
    renamed = any(words in there for words in today)  # the page says what the program was called there
    assert renamed or [words for words in gone if words not in there] == []


@pytest.mark.parametrize(
    "words",
    [
        "bench.all_reduce --operation all_gather",
        "bench.collectives --no-such-option",
        "bench.collectives --only bridge",
        "bench.contest rivals --causes causes.json",
        "bench.step --no-such-option 2",
        "tests.support.lab.slow_links --no-such-option",
    ],
)
def test_a_command_that_is_gone_is_noticed(words):
    assert not taken(words.split())


def linked(page: Path) -> list[str]:
    return re.findall(r"\]\(([^()/]+\.csv)\)", page.read_text())


def test_each_csv_is_named_on_one_page_and_each_named_one_exists():
    named = [file for page in PAGES for file in set(linked(page))]
    assert sorted(named) == sorted(path.name for path in RESULTS.glob("*.csv"))
    assert all(file.startswith(page.stem) for page in PAGES for file in linked(page))


@each("file", sorted(RESULTS.glob("*.csv")), name)
def test_a_csv_has_named_columns_and_whole_rows(file):
    with file.open(newline="") as lines:
        header, *rows = csv.reader(lines, strict=True)
    assert len(set(header)) == len(header) > 1
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", column) for column in header), "such as median_us"
    assert rows and all(len(row) == len(header) and any(row) for row in rows)
    assert len(set(map(tuple, rows))) == len(rows), "a row stands twice"


def test_the_pages_are_short():
    words = budget.words_of("bench/results")
    assert words <= budget.WORDS["bench/results"], "the rows of a long table go into a CSV file beside the page"
