"""Which hosts are there, and which a run takes."""

import time

from trainers.supervision.hosts import largest, living, taken
from trainers.supervision.settings import Host, Size

HOSTS = [Host("a", 2), Host("b", 2), Host("c", 4)]


def test_the_probe_says_which_hosts_are_there(tmp_path, monkeypatch):
    (tmp_path / "b is gone").touch()
    assert living(HOSTS, f"test ! -e '{tmp_path}/{{host}} is gone'") == [HOSTS[0], HOSTS[2]]
    assert living(HOSTS, "no-such-program {host}") == []
    monkeypatch.setattr("trainers.supervision.hosts.PROBE_SECONDS", 0.5)
    began = time.monotonic()
    assert living(HOSTS, "sh -c 'test {host} = c || sleep 60'") == [HOSTS[2]]
    assert time.monotonic() - began < 50  # a probe that hangs is ended


def test_the_first_size_that_fits_is_taken_on_the_first_hosts():
    sizes = [Size(8), Size(4), Size(2)]
    assert largest(sizes, HOSTS) == Size(8)
    assert largest(sizes, HOSTS[:2]) == Size(4)
    assert largest(sizes, HOSTS[:1]) == Size(2)
    assert largest(sizes, []) is None
    assert taken(HOSTS, 8) == HOSTS
    assert taken(HOSTS, 3) == [Host("a", 2), Host("b", 1)]
    assert taken(HOSTS[2:], 2) == [Host("c", 2)]
