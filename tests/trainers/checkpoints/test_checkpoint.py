"""Checkpoints: a resumed run is the run that was not stopped; a damaged or cut one is an error, never a hang."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import mpirun
from tests.support.training.runs import has_long_tests
from trainers.checkpoints import pointer

ROOT = Path(__file__).resolve().parents[3]
LAYOUTS = {"1x1": (1, 1), "2x1": (2, 2), "2x2": (4, 2)}  # TP x DP: ranks, TP
LONG = ("2x2",)  # those of them that only make test-long resumes
LAST = "iter_0000020"
TRAIN = ["--train-iters", "20", "--lr", "1e-2", "--lr-warmup-iters", "3", "--weight-decay", "0.1"]


@pytest.fixture(scope="module")
def base(mock):
    return [*mock, *TRAIN, "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]


# Dies while it writes its second checkpoint: rank 1 inside the optimizer's file, when the model's is whole.
CRASH = """
import os, signal
from trainers import pretrain_gpt
from trainers.checkpoints.disk import RangeWriter
from commengine import launch
plain = RangeWriter.write
written = 0
def write(self, start, data):
    global written
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
        written += self.path.parts[-2:] == ("iter_0000020.tmp", "optimizer.safetensors")
        if written == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    plain(self, start, data)
RangeWriter.write = write
launch.run(pretrain_gpt.main)
"""


@pytest.fixture(scope="module")
def layouts(request):
    """Those of LAYOUTS that are resumed."""
    return {name: layout for name, layout in LAYOUTS.items() if name not in LONG or has_long_tests(request)}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, pretrain, base, layouts):
    """Runs of 20 steps, runs that stop after 10, and one that died while it saved step 20."""
    root = tmp_path_factory.mktemp("checkpoints")
    commands = []
    for name, (n, tensor) in layouts.items():
        split = ["--tensor-model-parallel-size", str(tensor)]
        commands.append((n, [*base, *split, "--save", root / f"straight-{name}"]))
        commands.append((n, [*base, *split, "--save", root / f"halves-{name}", "--exit-interval", "10"]))
    later = ["--async-save", "--save-interval", "3", "--keep-last", "2", "--keep-every", "12"]
    commands.append((2, [*base, "--tensor-model-parallel-size", "2", "--save", root / "later", *later]))
    for (_, words), outcome in zip(commands, pretrain(*commands), strict=True):
        assert set(outcome.codes) == {75 if "--exit-interval" in words else 0}, outcome.err
    crash = [*base, "--tensor-model-parallel-size", "2", "--save-interval", "10", "--save", str(root / "crashed")]
    died = mpirun.run(2, "-c", CRASH, *crash, timeout=60)
    assert died.returncode != 0
    left = sorted(path.name for path in (root / "crashed").glob("*iter*"))
    assert left == ["iter_0000010", f"{LAST}.tmp"] and pointer.latest(root / "crashed").name == "iter_0000010"
    return root


@pytest.fixture(scope="module")
def ended(stopped, pretrain, base, layouts, tmp_path_factory):
    """The outcomes of other processes that went on with these folders, or were refused."""
    torn = stopped / "torn-1x1"
    shutil.copytree(stopped / "halves-1x1", torn)
    with (torn / "metrics.jsonl").open("a") as file:  # rows past the checkpoint, the last one cut
        file.write('{"iteration": 11, "lm_loss": 1.0}\n{"iteration": 12, "lm_lo')
    shutil.copytree(stopped / "halves-2x1", stopped / "other-tp")
    commands = {}
    for name, (n, tensor) in layouts.items():
        folder = stopped / f"halves-{name}"
        split = ["--tensor-model-parallel-size", str(tensor), "--exit-interval", "10"]  # 20 is a multiple, too
        commands[f"halves-{name}"] = (n, [*base, *split, "--load", folder, "--save", folder])
    for name, n in (("torn-1x1", 1), ("crashed", 2), ("other-tp", 1), ("new", 1)):
        split = ["--tensor-model-parallel-size", str(n), "--save-interval", "10"]
        commands[name] = (n, [*base, *split, "--load", stopped / name, "--save", stopped / name])
    root = tmp_path_factory.mktemp("damaged")
    for name, (damage, more, _) in DAMAGE.items():
        shutil.copytree(stopped / "straight-2x1", root / name)
        if damage is not None:
            damage(root / name)
        commands[name] = (2, [*base, "--tensor-model-parallel-size", "2", "--load", root / name, *more])
    return dict(zip(commands, pretrain(*commands.values()), strict=True))


@pytest.fixture
def resumed(ended):
    """Those that went on: all of them could."""
    found = {name: outcome for name, outcome in ended.items() if name not in DAMAGE}
    for outcome in found.values():
        assert set(outcome.codes) == {0}, outcome.err
    return found


def same_rows(rows, one, other):
    for key in ("lm_loss", "grad_norm", "learning_rate"):
        series = [[(row["iteration"], row[key]) for row in rows(folder)] for folder in (one, other)]
        assert series[0] == series[1] and len(series[0]) == 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name not in LONG else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_resuming_is_bit_for_bit(stopped, resumed, rows, name):
    straight, halves = stopped / f"straight-{name}", stopped / f"halves-{name}"
    assert f"starting from iteration 10 of {halves}" in resumed[f"halves-{name}"].err[0]
    same_rows(rows, straight, halves)
    assert pointer.latest(halves).name == LAST
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (straight / LAST / file).read_bytes() == (halves / LAST / file).read_bytes()
    losses = [row["lm_loss"] for row in rows(straight)]
    assert losses[-1] < losses[0] and len(set(losses)) == 20


@pytest.mark.slow
def test_rows_past_the_checkpoint_and_a_torn_one_are_dropped(stopped, resumed, rows):
    same_rows(rows, stopped / "straight-1x1", stopped / "torn-1x1")
    assert "lm_lo\n" not in (stopped / "torn-1x1" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_run_that_died_while_saving_resumes_from_the_checkpoint_before(stopped, resumed, rows):
    """Its half-written folder does not stand in the way."""
    folder = stopped / "crashed"
    assert f"starting from iteration 10 of {folder}" in resumed["crashed"].err[0]
    same_rows(rows, stopped / "straight-2x1", folder)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (stopped / "straight-2x1" / LAST / file).read_bytes() == (folder / LAST / file).read_bytes()
    assert sorted(path.name for path in folder.glob("iter*")) == ["iter_0000010", LAST]


@pytest.mark.slow
def test_a_death_while_saving_leaves_the_checkpoint_before_complete(stopped):
    ten = stopped / "crashed" / "iter_0000010"
    expected = stopped / "halves-2x1" / "iter_0000010"
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (ten / file).read_bytes() == (expected / file).read_bytes()
    assert json.loads((ten / "state.json").read_text())["iteration"] == 10


@pytest.mark.slow
def test_saving_in_the_background_changes_nothing_and_older_checkpoints_go(stopped, rows):
    folder = stopped / "later"
    same_rows(rows, stopped / "straight-2x1", folder)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (stopped / "straight-2x1" / LAST / file).read_bytes() == (folder / LAST / file).read_bytes()
    assert sorted(path.name for path in folder.glob("iter*")) == ["iter_0000012", "iter_0000018", LAST]


@pytest.mark.slow
def test_another_tensor_size_goes_on_with_the_same_run(stopped, resumed, rows):
    assert f"starting from iteration 10 of {stopped / 'other-tp'}" in resumed["other-tp"].err[0]
    one, other = (
        torch.tensor([row["lm_loss"] for row in rows(stopped / folder)], dtype=torch.float64)
        for folder in ("straight-1x1", "other-tp")
    )
    assert len(other) == 20
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for file in ("model.safetensors", "optimizer.safetensors"):
        expected, found = (load_file(stopped / folder / LAST / file) for folder in ("straight-1x1", "other-tp"))
        assert expected.keys() == found.keys()
        for name, whole in expected.items():
            torch.testing.assert_close(found[name], whole, rtol=0, atol=1e-4, msg=name)


@pytest.mark.slow
def test_a_folder_without_a_checkpoint_starts_a_new_run(stopped, resumed, rows):
    assert "a new run: no checkpoint in" in resumed["new"].err[0]
    same_rows(rows, stopped / "straight-1x1", stopped / "new")


@pytest.mark.slow
def test_the_files_say_what_they_are_and_nothing_is_pickled(stopped):
    folder = stopped / "straight-2x1"
    assert sorted(path.name for path in (folder / LAST).iterdir()) == [
        "checksums",
        "hf",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    state = json.loads((folder / LAST / "state.json").read_text())
    assert state["iteration"] == 20 and state["settings"]["hidden_size"] == 32
    weights, moments = (load_file(folder / LAST / f"{name}.safetensors") for name in ("model", "optimizer"))
    assert {name: list(whole.shape) for name, whole in weights.items()} == {
        name: described["shape"] for name, described in state["parameters"].items()
    }
    assert moments.keys() == {f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in weights}
    assert all(moments[f"exp_avg_sq.{name}"].shape == whole.shape for name, whole in weights.items())
    assert weights["embedding.weight"].shape == (128, 32)  # global, padded
    assert all(bool((moments[f"exp_avg_sq.{name}"] >= 0).all()) for name in weights)


@pytest.mark.slow
def test_no_source_of_the_trainers_pickles():
    """One reads files that others pickled, with ``weights_only=True`` written in the call."""
    safe = set()
    for path in sorted((ROOT / "trainers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "dill", "cloudpickle", "shelve", "joblib"} & set(names), path
            if isinstance(node, ast.Call) and path.name == "tensor_files.py":
                safe |= {node.func for word in node.keywords if ast.unparse(word) == "weights_only=True"}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in ("save", "load") or node in safe, path
    assert len(safe) == 1


def shorten(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def overwrite(path: Path, start: bytes) -> None:
    path.write_bytes(start + path.read_bytes()[len(start) :])


def exchange_names(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"final_norm.bias"', b'"final_norm.bIAS"'))


UNCHECKED = ["--no-verify-checkpoints"]
DAMAGE = {  # what is done to the checkpoint, more options, what the one line must say
    "pointer": (lambda f: (f / "latest").write_text("iter_0000099\n"), [], ["--load", "iter_0000099"]),
    "empty pointer": (lambda f: (f / "latest").write_text(""), [], ["--load", "latest is damaged", LAST]),
    "no state": (lambda f: (f / LAST / "state.json").unlink(), [], ["--load", LAST, "not a complete checkpoint"]),
    "cut state": (lambda f: shorten(f / LAST / "state.json", 100), [], ["--load", "state.json", "damaged"]),
    "empty state": (lambda f: (f / LAST / "state.json").write_text("{}"), [], ["--load", "state.json"]),
    "cut model": (lambda f: shorten(f / LAST / "model.safetensors", 9000), [], ["--load", "model.safetensors"]),
    "cut header": (lambda f: shorten(f / LAST / "model.safetensors", 11), [], ["--load", "model.safetensors"]),
    "empty model": (lambda f: shorten(f / LAST / "model.safetensors", 0), [], ["--load", "model.safetensors"]),
    "garbage": (lambda f: overwrite(f / LAST / "optimizer.safetensors", b"\xff" * 64), [], ["optimizer.safetensors"]),
    "no optimizer": (lambda f: (f / LAST / "optimizer.safetensors").unlink(), [], ["--load", "optimizer.safetensors"]),
    "other names": (
        lambda f: exchange_names(f / LAST / "model.safetensors"), UNCHECKED, ["lacks final_norm.bias;", "bIAS"],
    ),
    "layers": (None, ["--num-layers", "3"], ["--num-layers 3", "saved with 2"]),
    "hidden": (None, ["--hidden-size", "64"], ["--hidden-size 64", "saved with 32"]),
    "heads": (None, ["--num-attention-heads", "2"], ["--num-attention-heads 2", "saved with 4"]),
    "ffn": (None, ["--ffn-hidden-size", "64"], ["--ffn-hidden-size 64", "saved with"]),
    "vocabulary": (None, ["--vocab-size", "90"], ["--vocab-size 90", "saved with 100"]),
    "padding": (None, ["--make-vocab-size-divisible-by", "256"], ["--make-vocab-size-divisible-by 256", "with 128"]),
    "positions": (None, ["--max-position-embeddings", "32"], ["--max-position-embeddings 32", "saved with 16"]),
    "sequence": (None, ["--seq-length", "8"], ["--seq-length", "saved with 16"]),
    "experts": (
        None, ["--num-experts", "4", "--disable-bias-linear"], ["--num-experts 4: the checkpoint", "saved without it"]
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
def test_what_cannot_be_loaded_is_one_error_on_all_ranks(ended, name):
    outcome = ended[name]
    assert outcome.codes == [2, 2]
    assert outcome.err[1] == ""
    assert outcome.err[0].count("error:") == 1 and "Traceback" not in outcome.err[0]
    (line,) = [line for line in outcome.err[0].splitlines() if line.startswith("error: ")]
    for words in DAMAGE[name][2]:
        assert words in line


# Inside one job -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(world, tmp_path):
    """Rank 0's temporary folder, on all ranks."""
    return Path(world.mpi.bcast(str(tmp_path)))


def made(world, tensor, *, seed=1):
    from commengine import ProcessGrid
    from tplayers import GPT, GPTConfig, initialize
    from trainers.training.optimizer import Optimizer
    from trainers.training.reduction import GradientBuckets

    grid = ProcessGrid(world, tensor=tensor)
    model = GPT(GPTConfig(2, 32, 4, 100, 16, make_vocab_size_divisible_by=128), grid.tensor)
    initialize(model, seed)
    gradients = GradientBuckets(model, grid.data, overlap=False, bucket_size=10_000)
    return grid, model, Optimizer(gradients, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)


def stepped(model, optimizer):
    """One AdamW step on gradients that are a function of the global parameter's name alone."""
    from tplayers import placements

    for number, (name, placement) in enumerate(placements(model).items()):
        whole = torch.randn(placement.shape, generator=torch.Generator().manual_seed(number))
        model.get_parameter(name).grad = placement.part(whole).contiguous()
    optimizer.step(1e-3)


SETTINGS = {"num_layers": 2}


def progress(iteration):
    from trainers.checkpoints.checkpoint import Progress

    return Progress(iteration, iteration)


@pytest.mark.mpi
@pytest.mark.every_size
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_files_hold_the_assembled_parameters_and_moments(world, alone, folder, tensor):
    from trainers.checkpoints.checkpoint_writer import CheckpointWriter

    if world.size % tensor:
        pytest.skip(f"{world.size} ranks do not form groups of {tensor}")
    grid, model, optimizer = made(world, tensor)
    stepped(model, optimizer)
    CheckpointWriter(folder, progress(1), model, optimizer, SETTINGS, grid).finish()
    whole_grid, whole, whole_optimizer = made(alone, 1)
    stepped(whole, whole_optimizer)
    files = [load_file(folder / "iter_0000001" / f"{name}.safetensors") for name in ("model", "optimizer")]
    assert files[0].keys() == dict(whole.named_parameters()).keys()
    for name, p in whole.named_parameters():
        torch.testing.assert_close(files[0][name], p.detach(), rtol=0, atol=0, msg=name)
    expected = dict(whole_optimizer.tensors())
    assert files[1].keys() == expected.keys()
    for name, state in expected.items():
        torch.testing.assert_close(files[1][name], state, rtol=0, atol=0, msg=name)
    world.barrier()
    whole_grid.close()
    grid.close()


@pytest.mark.mpi
@pytest.mark.every_size
def test_a_round_trip_between_all_tensor_sizes(world, folder):
    from trainers.checkpoints import checkpoint
    from trainers.checkpoints.checkpoint_writer import CheckpointWriter

    sizes = [n for n in (1, 2, 4) if world.size % n == 0]
    for saved in sizes:
        grid, model, optimizer = made(world, saved)
        stepped(model, optimizer)
        CheckpointWriter(folder / str(saved), progress(3), model, optimizer, SETTINGS, grid).finish()
        for loaded in sizes:
            other_grid, other, other_optimizer = made(world, loaded, seed=99)
            checkpoint.load(folder / str(saved) / "iter_0000003", progress(3), other, other_optimizer, other_grid)
            expected_grid, expected, expected_optimizer = made(world, loaded)
            stepped(expected, expected_optimizer)
            for (name, p), q in zip(other.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(p, q), name
            truth = dict(expected_optimizer.tensors())
            for name, state in other_optimizer.tensors():
                assert torch.equal(state, truth[name]), name
            assert other_optimizer.updates == 3
            other_grid.close()
            expected_grid.close()
        grid.close()


@pytest.mark.mpi
def test_saving_again_replaces_the_checkpoint(world, folder):
    """A second run into the same folder: the files are the new ones, and nothing else is left behind."""
    from trainers.checkpoints.checkpoint_writer import CheckpointWriter

    grid, model, optimizer = made(world, 1)
    stepped(model, optimizer)
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.final_norm.bias.fill_(value)
        CheckpointWriter(folder, progress(5), model, optimizer, SETTINGS, grid).finish()
        found = pointer.latest(folder)
        assert found == folder / "iter_0000005"
        assert bool((load_file(found / "model.safetensors")["final_norm.bias"] == value).all())
        assert sorted(path.name for path in folder.iterdir()) == ["iter_0000005", "latest"]
        world.barrier()
    CheckpointWriter(folder, progress(6), model, optimizer, SETTINGS, grid).finish()
    assert pointer.latest(folder) == folder / "iter_0000006"
    assert (folder / "iter_0000005" / "state.json").is_file()  # the older one stays
    world.barrier()
    grid.close()
