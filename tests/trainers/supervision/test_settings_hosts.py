"""Which hosts are there, and which a run takes."""

import time

import pytest

from trainers.supervision.settings import living, taken

HOSTS = {"a": 2, "b": 2, "c": 4}


@pytest.mark.slow
def test_the_probe_says_which_hosts_are_there(tmp_path, monkeypatch):
    (tmp_path / "b is gone").touch()
    assert living(HOSTS, f"test ! -e '{tmp_path}/{{host}} is gone'") == ["a", "c"]
    assert living(HOSTS, "no-such-program {host}") == []
    monkeypatch.setattr("trainers.supervision.settings.PROBE_SECONDS", 0.5)
    began = time.monotonic()
    assert living(HOSTS, "sh -c 'test {host} = c || sleep 60'") == ["c"]
    assert time.monotonic() - began < 50  # a probe that hangs is ended


def test_the_first_hosts_with_room_are_taken():
    assert taken(HOSTS, 8) == HOSTS
    assert taken(HOSTS, 3) == {"a": 2, "b": 1}
    assert taken({"c": 4}, 2) == {"c": 2}
