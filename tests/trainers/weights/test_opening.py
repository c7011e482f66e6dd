"""Opening other people's models: how often, what must agree with the flags, and numbers that are none."""

from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from commengine import ProcessGrid, UsageError
from tests.support.weights.hugging_face import from_hugging_face
from tests.support.weights.megatron_files import contents, write_megatron
from tplayers import GPTConfig
from trainers.data.corpus import open_corpus
from trainers.settings.commands import GPTSettings
from trainers.settings.rules import require_valid
from trainers.tasks.commands import PRETRAIN_GPT
from trainers.tasks.kinds import task_of
from trainers.trained import load_trained
from trainers.weights import opening
from trainers.weights.hugging_face_model import HuggingFaceModel

TINY = ["--mock-data", "--micro-batch-size", "1", "--eval-iters", "0", "--sample-tokens", "0"]


@pytest.mark.mpi
def test_a_run_opens_the_files_once_for_its_settings_and_once_for_its_weights(world, theirs, folder, monkeypatch):
    if world.rank == 0:
        theirs("GPT-2").save_pretrained(folder)
    world.barrier()
    opened, closed = [], []
    read = HuggingFaceModel.open

    def counted(path, **asked):
        other = read(path, **asked)
        opened.append(path)
        monkeypatch.setattr(other, "close", lambda close=other.close: (closed.append(path), close()))
        return other

    monkeypatch.setattr(HuggingFaceModel, "open", counted)
    config = PRETRAIN_GPT.parse(["--load", f"hf:{folder}", *TINY])
    require_valid(config, world.size)
    config = task_of(config).completed(world.size)
    assert len(opened) == 1
    task_of(config).new_trainer(world, open_corpus(config)).close()
    assert len(opened) == len(closed) == 2
    other = task_of(GPTSettings(**asdict(config) | {"num_layers": 3})).completed(world.size)
    with pytest.raises(UsageError, match=r"--num-layers 3: the model of --load hf:.* has 2"):
        task_of(other).new_trainer(world, open_corpus(other))
    with pytest.raises(UsageError, match="--num-layers 3"):
        task_of(GPTSettings(**asdict(other) | {"dry_run": True})).completed(world.size)
    assert len(opened) == len(closed) == 4
    world.barrier()


def test_heads_that_the_files_do_not_say_may_be_the_default(tmp_path, theirs):
    """Files of 2019 have no settings; GPT-2 has 12 heads, as many as a run without flags."""
    shape = GPTConfig(1, 24, 12, 50, 16, make_vocab_size_divisible_by=1)
    generator = torch.Generator().manual_seed(1)
    model = {"vocab_size": 50, "n_positions": 16, "n_embd": 24, "n_layer": 1, "n_head": 12}
    transformers = pytest.importorskip("transformers")
    state = transformers.GPT2LMHeadModel(transformers.GPT2Config(**model)).state_dict()
    ours = {name: torch.randn(one.shape, generator=generator) for name, one in from_hugging_face(state, shape).items()}
    found = contents(ours, 12, version=0, ranks=1, padded=64)
    for one in found:
        one.pop("args", None)
    write_megatron(tmp_path, found)
    words = ["--load", f"megatron:{tmp_path}", *TINY, "--vocab-size", "50"]
    with pytest.raises(UsageError, match="--num-attention-heads"):
        PRETRAIN_GPT.parse(words)
    config = PRETRAIN_GPT.parse([*words, "--num-attention-heads", "12"])
    assert (config.num_layers, config.hidden_size, config.num_attention_heads) == (1, 24, 12)


@pytest.mark.mpi
def test_values_that_are_not_finite_are_told_once_and_taken_as_they_are(world, theirs, folder, command, capfd):
    if world.rank == 0:
        model = theirs("GPT-2")
        model.save_pretrained(folder / "good")
        with torch.no_grad():
            model.transformer.wte.weight[3, 5] = torch.nan
            model.transformer.h[1].attn.c_attn.weight[2, 8:64:8] = torch.inf  # columns of every rank
            model.transformer.ln_f.bias[7] = -torch.inf  # which every rank holds
        model.save_pretrained(folder / "in")
    world.barrier()
    said = (
        f"warning: hf:{folder / 'in'}: values that are NaN or infinite, which are taken as they are, in "
        "transformer.wte.weight, transformer.h.1.attn.c_attn.weight, transformer.ln_f.bias\n"
    )
    capfd.readouterr()
    size = ("--tensor-model-parallel-size", world.size)
    command(world, "--from", "hf", folder / "in", "--save", folder / "run", *size)
    assert capfd.readouterr().err == (said if world.rank == 0 else "")
    with ProcessGrid(world) as grid:  # a replica on each rank
        load_trained(f"hf:{folder / 'in'}", grid)
        assert capfd.readouterr().err == (said if world.rank == 0 else "")
        load_trained(f"hf:{folder / 'good'}", grid)
        assert capfd.readouterr().err == ""
    command(world, "--load", folder / "run", "--to", "hf", folder / "out", *size)
    before, after = (load_file(folder / name / "model.safetensors") for name in ("in", "out"))
    assert all(torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before)
    config = PRETRAIN_GPT.parse(["--load", f"hf:{folder / 'in'}", *TINY, "--bf16"])
    capfd.readouterr()
    task_of(config).new_trainer(world, open_corpus(config)).close()
    assert (said in capfd.readouterr().err) == (world.rank == 0)
    world.barrier()


def test_a_sum_that_is_too_large_is_no_fault():
    values = torch.full((100,), 6e4, dtype=torch.float16)
    assert not values.sum().isfinite() and opening._finite(values)
    values[[2, 5]] = torch.tensor([torch.nan, -torch.inf], dtype=torch.float16)
    assert not opening._finite(values)
    assert not opening._finite(torch.tensor([torch.inf, -torch.inf, 1.0]))
    assert opening._finite(torch.tensor([]))
