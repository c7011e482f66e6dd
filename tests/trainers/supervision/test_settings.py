"""The options of supervise: what they mean, and which are refused."""

import pytest

from commengine import UsageError
from commengine.options.declared import parse
from trainers.supervision.settings import Size, SuperviseSettings


def test_sizes_and_hosts_are_read():
    settings = SuperviseSettings(ranks="4:2, 2:1", hosts="n1:2,n2,n3:1")
    settings.validate()
    assert settings.sizes() == [Size(4, 2), Size(2, 1)]
    assert settings.host_slots() == {"n1": 2, "n2": 1, "n3": 1}
    assert SuperviseSettings().sizes() == [] and SuperviseSettings().host_slots() == {}
    assert SuperviseSettings(ranks="4,2").sizes() == [Size(4), Size(2)]


def test_a_list_of_many_hosts_is_no_long_name(tmp_path):
    hosts = ",".join(f"cluster-node-{n:04}:8" for n in range(300))
    settings = parse(SuperviseSettings, ["--ranks", "2400", "--hosts", hosts], "supervise")
    settings.validate()
    assert len(settings.host_slots()) == 300
    (tmp_path / "hosts.yaml").write_text(f"ranks: 2400\nhosts: {hosts}\n")
    assert parse(SuperviseSettings, ["--config", str(tmp_path / "hosts.yaml")], "supervise") == settings
    with pytest.raises(UsageError, match="longer than any name"):
        parse(SuperviseSettings, ["--hosts", "x" * 300], "supervise")


@pytest.mark.parametrize(
    "given, says",
    [
        ({"ranks": "4,x"}, "--ranks 4,x: must be numbers such as 4,2"),
        ({"ranks": ""}, "--ranks"),
        ({"ranks": "0"}, "--ranks 0"),
        ({"ranks": "2,4"}, "--ranks 2,4: must fall"),
        ({"ranks": "2,2"}, "--ranks 2,2: must fall"),
        ({"ranks": "4:3"}, "tensor size 3 does not divide 4"),
        ({"ranks": "4:2,2"}, "all with a tensor size or none"),
        ({"hosts": "a:2"}, "--hosts a:2: needs --ranks"),
        ({"ranks": "4", "hosts": "a:2"}, "take 2 ranks"),
        ({"ranks": "2", "hosts": "a:0"}, "--hosts a:0: must be names with numbers"),
        ({"ranks": "2", "hosts": "a:2", "probe": "true"}, "must be a command with {host}"),
        ({"ranks": "2", "hosts": "a:2", "probe": "ssh {host} 'true"}, "must be a command with {host}"),
        ({"start_minutes": 1e300}, "--start-minutes 1e+300"),
        ({"restarts": -1}, "--restarts -1"),
        ({"repeats": 0}, "--repeats 0"),
        ({"back_off": float("inf")}, "--back-off inf"),
        ({"start_minutes": 0.0}, "--start-minutes 0.0"),
    ],
)
def test_wrong_ones_are_named(given, says):
    with pytest.raises(UsageError) as error:
        SuperviseSettings(**given).validate()
    assert says in str(error.value)
