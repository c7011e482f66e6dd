"""Values of options, and files that cannot be written."""

import pytest

from bench.command.files import check_writable, publish
from bench.command.values import size_of


@pytest.mark.parametrize("text", ["", "-1", "12Q", "1.2.3M", "M", "1e6"])
def test_a_size_that_is_none_is_named_with_its_option(text):
    with pytest.raises(ValueError, match=r"^--max-bytes: .* is not a size; valid: "):
        size_of("--max-bytes", text)


def test_files_are_checked_before_and_written_after(tmp_path, capsys):
    files = {name: str(tmp_path / f"a.{name}") for name in ("md", "json", "png")}
    check_writable(output=files["md"], json=files["json"], csv=None, plot=files["png"])
    assert not list(tmp_path.iterdir())
    publish("text\n", {"a": 1}, output=files["md"], json_file=files["json"])
    assert capsys.readouterr().out == (tmp_path / "a.md").read_text() == "text\n"
    assert (tmp_path / "a.json").read_text() == '{\n "a": 1\n}'
