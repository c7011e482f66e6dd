"""What the settings of a transformer are held against before a run starts."""

import types

import pytest

from trainers.tasks.fitting import machine_memory


@pytest.mark.parametrize("gpu", [1, 1 << 60])
def test_the_memory_is_that_of_the_device_or_of_the_larger_one_where_the_ranks_choose(gpu, monkeypatch):
    """A model that fits the host is not refused because of a small GPU that the run will not use."""
    host = machine_memory("cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: types.SimpleNamespace(total_memory=gpu))
    assert machine_memory("cpu") == host and machine_memory("cuda") == gpu
    assert machine_memory(None) == max(gpu, host)
