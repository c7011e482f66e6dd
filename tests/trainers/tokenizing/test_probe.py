"""Files with which the library tokenizers panics, aborts or never ends are one error, and this process lives on."""

import json
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from tests.support import mpirun
from trainers.data.tokenizer import Tokenizer
from trainers.tokenizing import probe


def written(path, model, **parts):
    content = json.loads(tokenizers.Tokenizer(model).to_str()) | parts
    path.write_text(json.dumps(content))
    return path


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BAD = {
    "no charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "no end": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 200}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_a_file_that_would_end_the_process_is_refused_by_its_name(tmp_path, monkeypatch, name):
    monkeypatch.setattr(probe, "SECONDS", 1)
    monkeypatch.setattr(probe, "BYTES", 1 << 30)
    path = written(tmp_path / "tokenizer.json", models.BPE({"a": 0}, []), **BAD[name])
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json") as caught:
        Tokenizer.from_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [models.WordPiece({"a": 0}), models.Unigram([("a", -1.0)], None)])
def test_a_word_that_the_vocabulary_lacks_is_an_error_of_the_text(tmp_path, model):
    found = Tokenizer.from_file(written(tmp_path / "tokenizer.json", model))
    assert found.encode("a") == [0]
    for encode in (
        found.encode,
        lambda text: found.encode_batch([text]),
        lambda text: found.encode_with_offsets([text]),
    ):
        with pytest.raises(ValueError, match="the tokenizer cannot encode the text"):
            encode("\u6f22")


def test_a_usable_file_passes(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    path = tmp_path / "tokenizer.json"
    path.write_text(backend.to_str())
    probe.require_usable(path)


def test_a_file_that_no_memory_holds_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)  # without a block on the disk
    with pytest.raises(ValueError, match=r"tokenizer\.json: has 1,099,511,627,776 bytes"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


@pytest.mark.mpi(min_size=2)
def test_a_file_is_tried_once_and_by_rank_0_alone(mpi_world, tmp_path, monkeypatch):
    """Whatever its name is: a copy of it is not tried again, and a changed one is."""
    from commengine import Communicator

    started, run = [], subprocess.run
    monkeypatch.setattr(probe, "_usable", set())
    monkeypatch.setattr(probe.subprocess, "run", lambda *args, **named: (started.append(args), run(*args, **named))[1])
    written(tmp_path / "tokenizer.json", models.BPE({"a": 0}, []))
    with Communicator(mpi_world, device="cpu") as world:
        probe.share(world, tmp_path / "tokenizer.json")
        written(tmp_path / "another.json", models.BPE({"a": 0}, []))
        for name in ("tokenizer.json", "another.json", "tokenizer.json"):
            assert Tokenizer.from_file(tmp_path / name).vocab_size == 1
        assert len(started) == (world.rank == 0)
        Tokenizer.from_file(written(tmp_path / "tokenizer.json", models.BPE({"a": 0, "b": 1}, [])))
        assert len(started) == 1 + (world.rank == 0)


#: sends a signal while the process that tries a file runs: to the group, or to that process alone, the first time
SIGNALLED = """
import os, pathlib, signal, sys, threading
from trainers.tokenizing import probe
probe._PROGRAM = "import time; time.sleep(0.8)"
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("heard"))
def send():
    if sys.argv[1] == "group":
        os.killpg(0, signal.SIGTERM)
    else:
        children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
threading.Timer(0.4, send).start()
probe.require_usable(pathlib.Path(sys.argv[2]))
print(*heard)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("whom", "heard"), [("group", "heard"), pytest.param("process", "", marks=pytest.mark.long)])
def test_a_signal_says_nothing_about_the_file(tmp_path, whom, heard):
    """This process hears it, as it does elsewhere, and the file is not blamed."""
    (tmp_path / "tokenizer.json").touch()
    command = [sys.executable, "-c", SIGNALLED, whom, str(tmp_path / "tokenizer.json")]
    done = mpirun.command(command, 60, fresh=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, heard, "")
