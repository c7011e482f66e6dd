"""MNLI's and QQP's files: the columns by their names, no quoting, and what a damaged row does."""

from pathlib import Path

import pytest

from commengine.files.reading import InputFileError
from tests.support.data import DATA, needs
from tests.support.finetuning import toy_tasks
from trainers.data.samples import IGNORED
from trainers.finetuning.formats import MNLI, QQP, read_pairs
from trainers.run.metrics import left_out_text

HEADER = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
GOOD = '7\t1\t2\tWhy "not ?\tWhy\u2028not?\t1'


def written(folder: Path, *rows: str) -> Path:
    path = folder / "train.tsv"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_rows_of_qqp(tmp_path):
    """A quote is a character, a line separator within a text is one, too, and the file may end its lines as Windows."""
    rows, left_out = read_pairs(
        written(tmp_path, HEADER, GOOD, "", GOOD.replace("\t1", "\t0") + "\r"), QQP, labelled=True
    )
    assert rows[0] == ("7", 'Why "not ?', "Why\u2028not?", 1)
    assert [row.label for row in rows] == [1, 0] and left_out == []


def test_files_without_labels_have_other_columns(tmp_path):
    path = written(tmp_path, "id\tquestion1\tquestion2", "0\tWho?\tWhy?")
    assert read_pairs(path, QQP, labelled=False)[0] == [("0", "Who?", "Why?", IGNORED)]
    with pytest.raises(InputFileError, match=r"train.tsv: its first line has no column is_duplicate"):
        read_pairs(path, QQP, labelled=True)


def test_columns_that_are_there_are_shown_as_they_are(tmp_path):
    with pytest.raises(InputFileError, match=r"no column sentence1, sentence2, gold_label; it has index, promptID$"):
        read_pairs(written(tmp_path, "index\tpromptID", "0\t1"), MNLI, labelled=True)


def test_the_toy_files(tmp_path):
    toy_tasks.mnli(tmp_path / "mnli")
    rows, _ = read_pairs(tmp_path / "mnli" / "dev_matched.tsv", MNLI, labelled=True)
    assert len(rows) == 51 and {row.label for row in rows} == {0, 1, 2}
    assert all(row.second.split()[0] == ["no", "yes", "maybe"][row.label] for row in rows)
    rows, _ = read_pairs(tmp_path / "mnli" / "test_matched.tsv", MNLI, labelled=False)
    assert [row.identity for row in rows] == [str(n) for n in range(7)]


DAMAGED = {
    "too few columns": ("8\t1\t2\tWhy?", "line 3: has 4 columns, the first line has 6"),
    "no text": ("8\t1\t2\t \tWhy?\t1", "line 3: question1 is empty"),
    "an unknown label": ("8\t1\t2\tWho?\tWhy?\t2", "line 3: is_duplicate is '2'; valid: 0, 1"),
    "no label": ("8\t1\t2\tWho?\tWhy?\t", "line 3: is_duplicate is ''; valid: 0, 1"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_row_is_named_or_left_out(tmp_path, name):
    row, message = DAMAGED[name]
    path = written(tmp_path, HEADER, GOOD, row, GOOD)
    with pytest.raises(InputFileError, match=message) as error:
        read_pairs(path, QQP, labelled=True)
    assert "--skip-damaged-rows" in str(error.value)
    rows, left_out = read_pairs(path, QQP, labelled=True, skip=True)
    assert len(rows) == 2 and left_out == [3]
    assert left_out_text(path, left_out) == f"{path}: 1 damaged rows are left out (lines 3)"


@pytest.mark.parametrize("rows", [[""], [HEADER], [HEADER, "", ""]], ids=["empty", "header", "blank lines"])
def test_a_file_without_rows_is_refused(tmp_path, rows):
    message = "is empty; its first line must name the columns" if rows == [""] else "holds no rows but its header"
    with pytest.raises(InputFileError, match=message):
        read_pairs(written(tmp_path, *rows), QQP, labelled=True, skip=True)


def test_a_file_of_damaged_rows_alone_is_refused(tmp_path):
    with pytest.raises(InputFileError, match="all of its 2 rows are damaged"):
        read_pairs(written(tmp_path, HEADER, "1", "2"), QQP, labelled=True, skip=True)


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    path = written(tmp_path, f"{HEADER}\tQuestion1", f"{GOOD}\tWho?")
    with pytest.raises(InputFileError, match="its first line has the column question1 more than once"):
        read_pairs(path, QQP, labelled=True)


@needs("task-samples")
def test_rows_of_the_real_files():
    rows, _ = read_pairs(DATA / "task-samples/MNLI_dev_matched_51rows_reformatted.tsv", MNLI, labelled=True)
    assert len(rows) == 51 and rows[0].second == "Everyone really likes the newest benefits"
    assert [row.label for row in rows[:3]] == [2, 0, 1]
    for name, labelled in (("train", True), ("dev", True), ("test", False)):
        rows, left_out = read_pairs(DATA / f"task-samples/QQP_{name}.tsv", QQP, labelled=labelled)
        assert len(rows) == 9 and not left_out
