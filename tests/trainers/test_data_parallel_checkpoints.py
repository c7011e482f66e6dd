"""DataParallel's sharded optimizers and checkpoints: the same numbers sharded or not, and on any number of ranks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from commengine import ProcessGrid, UsageError
from tplayers import MLP, initialize
from trainers.data_parallel import DataParallel
from trainers.training.sharded_optimizer import SEPARATE, ShardedOptimizer

pytestmark = pytest.mark.mpi

BATCH = 12  # samples of all ranks


@pytest.fixture
def shared_path(world, tmp_path):
    """Rank 0's temporary folder, on all ranks."""
    return Path(world.mpi.bcast(str(tmp_path)))


class Net(nn.Module):
    """Parameters of several sizes, one of them tied, and buffers, one of which is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Parameter(torch.randn(9, 6))
        self.norm = nn.BatchNorm1d(6)
        self.hidden = nn.Linear(6, 6)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.double()

    def forward(self, tokens):
        x = self.norm(self.table[tokens])
        return torch.tanh(self.hidden(x) + self.frozen) @ self.table.T


def groups(net):
    return [
        {"params": [net.table, net.hidden.weight], "weight_decay": 0.1},
        {"params": [*net.norm.parameters(), net.hidden.bias]},
    ]


def run(net, replicas, optimizer, steps):
    """Train on the same global batches at every number of ranks. Batch norm is in evaluation mode: it sees no batch."""
    data, net = replicas.grid.data, net.eval()
    for step in steps:
        drawn = torch.Generator().manual_seed(step)
        tokens, labels = torch.randint(9, (2, BATCH), generator=drawn)
        mine = slice(data.rank * BATCH // data.size, (data.rank + 1) * BATCH // data.size)
        optimizer.zero_grad()
        weight = replicas.sample_weight(mine.stop - mine.start)
        (nn.functional.cross_entropy(net(tokens[mine]), labels[mine], reduction="sum") * weight).backward()
        replicas.clip(1.0)
        optimizer.step()


def made(kind, net, replicas, sharded, **options):
    return replicas.sharded(kind, groups(net), **options) if sharded else kind(groups(net), **options)


OPTIONS = {"AdamW": {"lr": 0.01, "betas": (0.8, 0.9)}, "SGD": {"lr": 0.1, "momentum": 0.9}, "Adafactor": {"lr": 0.01}}


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("AdamW", "SGD") else pytest.param(kind, marks=pytest.mark.long)
        for kind in sorted(SEPARATE - {"Muon"})
    ],
)
def test_a_sharded_optimizer_gives_the_bits_of_the_whole_one(world, kind):
    found = []
    for sharded in (False, True):
        net = Net()
        with DataParallel(net, world) as replicas:
            optimizer = made(getattr(torch.optim, kind), net, replicas, sharded, **OPTIONS.get(kind, {"lr": 0.01}))
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for step in range(3):
                run(net, replicas, optimizer, [step])
                schedule.step()
            held = sum(len(state) > 0 for state in optimizer.state.values())
            assert held == (len(list(_owned(optimizer, world.rank))) if sharded else 5)
        found.append([parameter.detach().clone() for parameter in net.parameters()])
    for whole, split in zip(*found, strict=True):
        assert split.equal(whole)
    assert not found[0][0].equal(Net().table)


def _owned(optimizer, rank):
    return (parameter for parameter, owner in optimizer.owner.items() if owner == rank)


def _converted(net):
    net.to(memory_format=torch.channels_last)


def _copied(net):
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("change", [_converted, _copied])
@pytest.mark.parametrize("everywhere", [True, False])
def test_parameters_that_get_other_memory_stay_equal_and_are_trained(world, change, everywhere):
    """After the construction, on all ranks or on the last one alone: the buffers that are sent are the old memory."""
    x = torch.randn(world.size, 2, 5, 5, generator=torch.Generator().manual_seed(3))
    found = []
    for sharded in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 3))
        with DataParallel(net, world) as replicas:
            optimizer = (
                replicas.sharded(torch.optim.Adam, lr=0.1) if sharded else torch.optim.Adam(net.parameters(), 0.1)
            )
            for step in range(4):
                if sharded and step % 2 and (everywhere or world.rank == world.size - 1):
                    change(net)
                optimizer.zero_grad()
                net(x[world.rank : world.rank + 1]).square().sum().backward()
                optimizer.step()
        found.append([parameter.detach().clone() for parameter in net.parameters()])
    for whole, split in zip(*found, strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-5)
        first = split.contiguous()
        world.broadcast(first)
        assert first.equal(split)


@pytest.mark.mpi(min_size=2)
def test_a_parameter_that_gets_another_dtype_is_an_error_of_the_step(world):
    net = nn.Linear(3, 2)
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, world, lr=0.1)
    net.double()
    with pytest.raises(RuntimeError, match=r"is float64 \[2, 3\] on cpu now, and was float32"):
        optimizer.step()


@pytest.mark.every_size
@pytest.mark.mpi(min_size=2)
def test_the_state_is_spread_evenly(world):
    parameters = [nn.Parameter(torch.zeros(size)) for size in (100, 90, 60, 50, 40, 30, 20, 10)]
    optimizer = ShardedOptimizer(parameters, torch.optim.SGD, world, lr=0.1)
    loads = [sum(p.numel() for p in _owned(optimizer, rank)) for rank in range(world.size)]
    assert sum(loads) == 400 and max(loads) <= 1.15 * 400 / world.size
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == world.size  # one buffer for each owner


def test_optimizers_that_mix_parameters_are_refused_by_name_and_others_need_a_word(world):
    class Mine(torch.optim.SGD):
        """Treats parameters separately, which nobody can know."""

    net = Net()
    with DataParallel(net, world) as replicas:
        with pytest.raises(ValueError, match=r"LBFGS is not known to treat parameters separately.*AdamW"):
            replicas.sharded(torch.optim.LBFGS)
        with pytest.raises(ValueError, match=r"Mine .*separate=True"):
            replicas.sharded(Mine, lr=0.1)
        optimizer = replicas.sharded(Mine, lr=0.1, separate=True)
        with pytest.raises(RuntimeError, match=r"DataParallel\.save"):
            optimizer.state_dict()
        with pytest.raises(RuntimeError, match=r"DataParallel\.load"):
            optimizer.load_state_dict({})
        with pytest.raises(RuntimeError, match="make a new one"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        whole = torch.optim.LBFGS(net.parameters())
        whole.state[net.table] = {"old_dirs": []}
        with pytest.raises(UsageError, match=r"LBFGS keeps 'old_dirs' of table as list"):
            replicas.save("nowhere-to-be-made", whole, 1)
        assert not Path("nowhere-to-be-made").exists()
        with pytest.raises(UsageError, match="extra cannot be saved as JSON"):
            replicas.save("nowhere-to-be-made", optimizer, 1, {"when": object()})


@pytest.mark.parametrize(
    ("kind", "sharded"),
    [
        ("AdamW", False),
        pytest.param("AdamW", True, marks=pytest.mark.every_size),
        ("SGD", True),
        ("Adafactor", False),
    ],
)
def test_a_run_goes_on_at_another_number_of_ranks(world, alone, shared_path, kind, sharded):
    """Saved on all ranks, resumed on each rank alone with the optimizer the other way, and the reverse."""
    choice = getattr(torch.optim, kind)
    expected = Net()
    with DataParallel(expected, alone) as replicas:
        run(expected, replicas, choice(groups(expected), **OPTIONS[kind]), range(6))
    net = Net()
    with DataParallel(net, world) as replicas:
        optimizer = made(choice, net, replicas, sharded, **OPTIONS[kind])
        run(net, replicas, optimizer, range(2))
        net.train()
        net(torch.arange(9))  # running statistics
        replicas.save(shared_path / "first", optimizer, 2, {"seen": [1, 2], "name": "x"}, keep=1)
        statistics = net.norm.running_mean.clone()
    net = Net()
    net.scratch += 1
    with DataParallel(net, alone) as replicas:
        optimizer = made(choice, net, replicas, not sharded, lr=123.0)
        assert replicas.load(shared_path / "first", optimizer) == (2, {"seen": [1, 2], "name": "x"})
        assert optimizer.param_groups[0]["lr"] == OPTIONS[kind]["lr"]
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        assert net.norm.running_mean.equal(statistics) and net.norm.num_batches_tracked == 1
        assert net.scratch.tolist() == [2, 2]
        net.norm.reset_running_stats()
        run(net, replicas, optimizer, range(2, 4))
        if world.rank == 0:
            replicas.save(shared_path / "second", optimizer, 4)
    world.barrier()
    net = Net()
    with DataParallel(net, world) as replicas:
        optimizer = made(choice, net, replicas, sharded, lr=123.0)
        assert replicas.load(shared_path / "second", optimizer) == (4, {})
        run(net, replicas, optimizer, range(4, 6))
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_the_files_are_a_state_dict_and_only_the_newest_stay(world, shared_path):
    net = Net()
    with DataParallel(net, world) as replicas:
        optimizer = replicas.sharded(torch.optim.AdamW, lr=0.01)
        assert replicas.load(shared_path / "none", optimizer) is None
        for step in (1, 2, 3):
            run(net, replicas, optimizer, [step])
            replicas.save(shared_path / "run", optimizer, step, keep=2)
        world.barrier()
        assert sorted(path.name for path in (shared_path / "run").glob("iter_*")) == ["iter_0000002", "iter_0000003"]
        other = Net()
        other.load_state_dict(load_file(shared_path / "run" / "iter_0000003" / "model.safetensors"))
        assert other.table.equal(net.table)
        assert replicas.load(shared_path / "run" / "iter_0000002", optimizer)[0] == 2
        assert not other.table.equal(net.table)


def test_another_module_or_optimizer_and_damaged_files_are_refused_on_every_rank(world, shared_path):
    net, folder = Net(), shared_path / "run"
    with DataParallel(net, world) as replicas:
        optimizer = replicas.sharded(torch.optim.AdamW, lr=0.01)
        run(net, replicas, optimizer, [0])
        replicas.save(folder, optimizer, 1)
        for wrong, said in (
            (torch.optim.SGD(net.parameters(), lr=0.1), "AdamW, the optimizer is SGD"),
            (torch.optim.AdamW(groups(net), lr=0.1), "other groups"),
            (torch.optim.AdamW([nn.Parameter(torch.zeros(3))]), r"a parameter \[3\] that the module has not"),
        ):
            with pytest.raises(UsageError, match=said):
                replicas.load(folder, wrong)
        bad = torch.optim.SGD(net.parameters(), lr=0.1)
        bad.param_groups[0]["odd"] = object()
        with pytest.raises(UsageError, match="option odd is a object: it cannot be saved"):
            replicas.save(folder, bad, 2)
    with DataParallel(nn.Linear(2, 2), world) as replicas, pytest.raises(UsageError, match=r"model\.safetensors"):
        replicas.load(folder)
    world.barrier()
    if world.rank == 0:
        path = folder / "iter_0000001" / "optimizer.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    world.barrier()
    with DataParallel(net, world) as replicas, pytest.raises(UsageError, match=r"optimizer\.safetensors"):
        replicas.load(folder, optimizer)


def test_complex_parameters_are_trained_and_saved_if_the_format_has_their_dtype(world, shared_path):
    """Spectral weights: the gradient, the norm and the file; 16 bytes a number have no place in the format."""

    class Spectral(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, dtype=dtype, generator=torch.Generator().manual_seed(1)))

        def forward(self, x):
            return (self.weight * x - 1).abs().square().mean()

    x = torch.randn(world.size, 5, dtype=torch.complex128, generator=torch.Generator().manual_seed(2))
    for dtype in (torch.complex64, torch.complex128):
        net, whole = Spectral(dtype), Spectral(dtype)
        whole(x.to(dtype)).backward()
        with DataParallel(net, world) as replicas:
            optimizer = replicas.sharded(torch.optim.AdamW, lr=0.1)
            net(x[world.rank].to(dtype)).backward()
            torch.testing.assert_close(net.weight.grad, whole.weight.grad)
            assert replicas.clip(0.0) == pytest.approx(whole.weight.grad.norm().item(), rel=1e-5)
            optimizer.step()
            if dtype == torch.complex128:
                with pytest.raises(UsageError, match=r"weight is of torch\.complex128"):
                    replicas.save(shared_path / "wide", optimizer, 1)
                assert not (shared_path / "wide").exists()
                continue
            replicas.save(shared_path / "run", optimizer, 1)
            saved = net.weight.detach().clone()
            optimizer.step()
            assert replicas.load(shared_path / "run", optimizer)[0] == 1
            assert net.weight.equal(saved)
            assert load_file(shared_path / "run" / "iter_0000001" / "model.safetensors")["weight"].equal(saved)


@pytest.mark.parametrize("sharded", [False, True])
def test_numbers_in_an_optimizers_state_keep_their_types(world, shared_path, sharded):
    class Counting(torch.optim.SGD):
        """Has Python numbers in its state, which it uses as such."""

        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["steps"] = [1, 2, 3][state.get("steps", 0)]
                    state.update(large=2**60 + 1, rate=0.1, warm=True)

    net = nn.Linear(2, 2)
    with DataParallel(net, world) as replicas:
        make = replicas.sharded if sharded else (lambda kind, separate, **options: kind(net.parameters(), **options))
        optimizer = make(Counting, separate=True, lr=0.1)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        replicas.save(shared_path / "run", optimizer, 1)
        optimizer.step()
        assert replicas.load(shared_path / "run", optimizer)[0] == 1
        optimizer.step()
        for state in optimizer.state.values():
            kept = {name: state[name] for name in ("steps", "large", "rate", "warm")}
            assert kept == {"steps": 2, "large": 2**60 + 1, "rate": 0.1, "warm": True}
            assert [type(value) for value in kept.values()] == [int, int, float, bool]


def test_a_module_with_extra_state_is_refused_by_name(world):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    net = nn.Sequential(Extra(2, 2))
    with DataParallel(net, world) as replicas, pytest.raises(UsageError, match="0 has get_extra_state"):
        replicas.save("nowhere-to-be-made", torch.optim.SGD(net.parameters(), lr=0.1), 1)


@pytest.mark.every_size
def test_shards_of_a_tensor_group_are_saved_whole(world, alone, shared_path):
    """Saved at one tensor size, loaded at others: the same module and moments."""

    class Mixed(nn.Module):
        def __init__(self, comm):
            super().__init__()
            torch.manual_seed(4)
            self.enter = nn.Linear(4, 8)
            self.mlp = MLP(8, 16, comm)
            initialize(self, 3)

        def forward(self, x):
            return self.mlp(self.enter(x)).square().mean()

    sizes = [size for size in (1, 2, 4) if world.size % size == 0]
    x = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(2))
    for number, (before, after) in enumerate(zip(sizes, sizes[::-1], strict=True)):
        with ProcessGrid(world, before) as grid:
            net = Mixed(grid.tensor)
            with DataParallel(net, grid) as replicas:
                optimizer = replicas.sharded(torch.optim.AdamW, lr=0.1)
                net(x).backward()
                optimizer.step()
                replicas.save(shared_path / str(number), optimizer, 1)
                expected = net(x).item()
        with ProcessGrid(world, after) as grid:
            net = Mixed(grid.tensor)
            with DataParallel(net, grid) as replicas:
                optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
                assert replicas.load(shared_path / str(number), optimizer)[0] == 1
                assert net(x).item() == pytest.approx(expected, rel=1e-5)
                assert optimizer.state[net.mlp.up.weight]["exp_avg"].shape == net.mlp.up.weight.shape
                replicas.save(shared_path / f"{number}-again", optimizer, 1)
        world.barrier()
        files = [
            load_file(shared_path / name / "iter_0000001" / "optimizer.safetensors")
            for name in (str(number), f"{number}-again")
        ]
        assert files[0].keys() == files[1].keys() and all(files[0][key].equal(files[1][key]) for key in files[0])
        state = json.loads((shared_path / str(number) / "iter_0000001" / "state.json").read_text())
        assert state["settings"]["optimizer"]["kind"] == "AdamW"
