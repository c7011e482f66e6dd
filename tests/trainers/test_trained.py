"""What a run has trained, loaded at other sizes than it was saved at, and every reason for which it cannot be."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commengine import ProcessGrid, UsageError
from tests.support.checkpoints import rewrite_state
from tplayers import BERT, GPT, placements
from trainers.checkpoints import run_state
from trainers.data.tokenizer import Tokenizer
from trainers.settings.commands import BERTSettings
from trainers.tasks.bert import BERTTask
from trainers.trained import load_trained

OLD = Path(__file__).parent / "checkpoints" / "written_by_21090a0"
WORDS = ["abra", "cad", "abra", "sesame"]
#: what splits over 1 to 4 ranks
SIZES = {"hidden_size": 48, "num_attention_heads": 12, "seq_length": 24, "make_vocab_size_divisible_by": 384,
         "global_batch_size": 24}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory, mpi_world) -> Path:
    """One folder for all ranks."""
    return Path(mpi_world.bcast(str(tmp_path_factory.mktemp("runs"))))


@pytest.fixture(scope="module")
def tokenizer(shared, mpi_world) -> Path:
    path = shared / "tokenizer.json"
    if mpi_world.rank == 0:
        path.write_bytes(Tokenizer.train_bpe(WORDS, 260).to_bytes())
    mpi_world.Barrier()
    return path


@pytest.fixture
def grids(world):
    """``grids(tensor)``: a grid of all ranks, closed when the test ends."""
    made = []

    def grid(tensor):
        made.append(ProcessGrid(world, tensor=tensor))
        return made[-1]

    yield grid
    for one in made:
        one.close()


@pytest.fixture
def saved(world, trainer, shared, tokenizer):
    """``saved(name, steps=2, **settings)``: the folder of a run of a few steps."""

    def save(name, steps=2, **settings):
        folder = shared / name
        one = trainer(world, **({"save": str(folder), **SIZES} | settings))
        for _ in range(steps):
            one.step()
        run_state.CheckpointSaver(one).start(background=False)
        return folder

    return save


def renamed(state, head):
    """A checkpoint of an older version, which does not say its kind, with a parameter of a head of this name."""
    del state["kind"]
    state["parameters"][f"{head}.weight"] = state["parameters"].popitem()[1]


LLAMA = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "group_query_attention": True,
    "kv_channels": 12, "disable_bias_linear": True, "add_qkv_bias": True, "untie_embeddings_and_output_weights": True,
    "norm_epsilon": 1e-6,
}  # fmt: skip


def sizes(world):
    return [1, world.size] if world.size > 1 else [1]


@pytest.mark.sizes(1, 2)
@pytest.mark.slow
@pytest.mark.mpi
def test_the_weights_are_those_of_the_file_at_every_size(world, saved, grids, tokenizer):
    """Whatever wrote it: tensor-parallel, bf16 under a sharded optimizer, with shards of the sequence."""
    runs = {
        "split": {"tensor_model_parallel_size": world.size, "sequence_parallel": True},
        "llama": LLAMA | {"tensor_model_parallel_size": world.size},
        "bf16": {"bf16": True, "use_distributed_optimizer": True, "tokenizer_model": str(tokenizer), "vocab_size": 300},
    }
    for name, settings in runs.items():
        folder = saved(name, **settings)
        whole = load_file(folder / "iter_0000002" / "model.safetensors")
        for tensor in sizes(world):
            one = load_trained(folder, grids(tensor))
            assert isinstance(one.model, GPT) and not one.model.training and one.model.comm.size == tensor
            assert (one.kind, one.iteration, one.checkpoint.name) == ("gpt", 2, "iter_0000002")
            assert one.settings.tensor_model_parallel_size == tensor and not one.model.config.sequence_parallel
            assert (one.model.config.norm_epsilon == 1e-6) == (name == "llama")
            placed = placements(one.model)
            assert placed.keys() == whole.keys()
            for key, parameter in one.model.named_parameters():
                assert parameter.dtype == (torch.bfloat16 if name == "bf16" else torch.float32)
                assert torch.equal(parameter, placed[key].part(whole[key])) and not parameter.requires_grad
        exact = load_trained(folder, grids(1), dtype=torch.float64)
        assert all(parameter.dtype == torch.float64 for parameter in exact.model.parameters())
        assert torch.isfinite(exact.model(torch.arange(8)[None])).all()
    assert one.tokenizer.encode("sesame") == Tokenizer.from_file(tokenizer).encode("sesame")


@pytest.mark.mpi
def test_a_bert_an_older_version_and_an_iteration(world, saved, grids, shared):
    config = BERTSettings(
        num_layers=1, hidden_size=48, num_attention_heads=12, seq_length=16, vocab_size=100, mock_data=True,
        make_vocab_size_divisible_by=384, eval_iters=0, micro_batch_size=2, save=str(shared / "bert"),
        norm_placement="post", bert_no_binary_head=True,
    )  # fmt: skip
    task = BERTTask(config)
    one = task.new_trainer(world, task.open_corpus())
    run_state.CheckpointSaver(one).start(background=False)
    one.close()
    bert = load_trained(shared / "bert", grids(sizes(world)[-1]))
    assert isinstance(bert.model, BERT) and bert.kind == "bert" and bert.model.config.norm_placement == "post"
    old = load_trained(OLD / "fp32", grids(1), kind="gpt")
    assert old.settings.vocab_size == 32 and old.settings.hidden_size == 16
    folder = saved("long", steps=1)
    assert load_trained(folder / "iter_0000001", grids(1)).iteration == 1
    assert load_trained(folder, grids(1), iteration=1).iteration == 1


@pytest.mark.mpi
def test_what_cannot_be_loaded_is_one_error_on_all_ranks(world, saved, grids, shared, tokenizer):
    folder, grid = saved("refused"), grids(1)
    before = sorted(path.name for path in folder.rglob("*"))

    def refused(where, *parts, on=grid, **named):
        with pytest.raises(UsageError) as raised:
            load_trained(where, on, **named)
        assert all(part in str(raised.value) for part in ("--load", *parts)), str(raised.value)
        assert len(set(world.mpi.allgather(str(raised.value)))) == 1

    refused(shared / "none", "none: no such folder", "--save folder of a run")
    refused(shared, "holds no checkpoint", "iter_*")
    refused(folder, "holds no checkpoint of iteration 7", "iter_0000002", iteration=7)
    refused(folder, "holds a GPT", "a BERT is needed", "pretrain_bert", kind="bert")

    def changed(name, change, *parts, listed=True):
        copy = shared / name
        if world.rank == 0:
            shutil.copytree(folder, copy)
            state = json.loads((copy / "iter_0000002" / "state.json").read_text())
            change(state)
            rewrite_state(copy / "iter_0000002", state, listed=listed)
        world.mpi.Barrier()
        refused(copy, *parts)

    changed("user", lambda state: state.update(settings={"optimizer": {}, "extra": {}}), "vocab_size is missing")
    changed("words", lambda state: state["settings"].update(hidden_size="wide"), "settings.hidden_size", "integer")
    changed(
        "large", lambda state: state["settings"].update(hidden_size=2**40), "settings", "--hidden-size 1099511627776"
    )
    for head, what in (("head", "no GPT, BERT or T5"), ("classifier", "a model of trainers.finetune")):
        changed(head, lambda state, head=head: renamed(state, head), what, head, "trainers.pretrain_gpt")
    changed("width", lambda state: state["settings"].update(hidden_size=96), "model.safetensors: ", "the model's is")

    if world.rank == 0:
        file = folder / "iter_0000002" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-8] + b"\0" * 8)
    world.mpi.Barrier()
    refused(folder, "model.safetensors", "--no-verify-checkpoints")
    one = load_trained(folder, grid, verify=False)
    with pytest.raises(UsageError, match=r"no tokenizer.*--tokenizer-model FILE"):
        one.tokenizer  # noqa: B018
    for path, words in (("nowhere.json", "nowhere.json: no such file"), (tokenizer, "has 260 tokens.*only 100")):
        with pytest.raises(UsageError, match=f"--tokenizer-model.*{words}"):
            load_trained(folder, grid, verify=False, tokenizer=path).tokenizer  # noqa: B018
    assert sorted(path.name for path in folder.rglob("*")) == before


@pytest.mark.mpi(min_size=2)
def test_a_size_that_does_not_split_the_model_is_refused(world, saved, grids):
    folder = saved("narrow", steps=0, ffn_hidden_size=47)
    with pytest.raises(UsageError, match=r"--tensor-model-parallel-size.*\b1\b"):
        load_trained(folder, grids(world.size))
