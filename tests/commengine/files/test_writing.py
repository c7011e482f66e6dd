"""Files that cannot be written are refused before anything else is done."""

import os

import pytest

from commengine.files.writing import check_writable


def test_what_cannot_be_written_is_named_with_its_option(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_writable(output=tmp_path / "a.md", json=None, plot=str(tmp_path / "a.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    for options, message in (
        ({"plot": tmp_path / "a.md"}, "--plot .*a.md: the name ends in .png, .svg or .pdf"),
        ({"output": tmp_path}, "--output .*: is a folder"),
        ({"time_line": tmp_path / "b" / "c"}, "--time-line .*: there is no folder"),
        ({"json": tmp_path / ("x" * 300)}, "--json .*: File name too long"),
        ({"json": tmp_path / "pipe"}, "--json .*: is no regular file"),
    ):
        with pytest.raises(ValueError, match=message):
            check_writable(**options)


def test_two_options_with_one_file_and_a_file_that_is_read_are_named(tmp_path):
    """One of the two texts would be lost, also by another name of the file; a device may be named twice."""
    (tmp_path / "link.md").symlink_to(tmp_path / "a.md")
    (tmp_path / "in.json").write_text("{}")
    check_writable(output=tmp_path / "a.md", json="/dev/null", csv="/dev/null", read=[tmp_path / "in.json", None])
    for options, message in (
        ({"csv": tmp_path / "a.md"}, "--csv .*a.md: is the file of --output, too"),
        ({"json": tmp_path / "link.md"}, "--json .*link.md: is the file of --output, too"),
        ({"json": str(tmp_path / "." / "in.json")}, "--json .*in.json: is a file that this command reads"),
    ):
        with pytest.raises(ValueError, match=message):
            check_writable(output=str(tmp_path / "a.md"), read=[tmp_path / "in.json"], **options)
