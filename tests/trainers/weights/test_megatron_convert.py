"""Megatron-LM's files become runs: transformers' models, written as Megatron-LM does, come back bit by bit."""

import itertools

import pytest
import torch

from commengine import ProcessGrid, UsageError
from tests.support.weights.hugging_face import from_hugging_face
from tests.support.weights.megatron_files import contents, write_megatron
from tplayers import BERTConfig, GPTConfig, placements
from trainers.trained import load_trained

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

VOCAB, PADDED = 57, 64
SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "vocab_size": VOCAB, "max_position_embeddings": 16,
    "make_vocab_size_divisible_by": 1,
}  # fmt: skip
CONFIGS = {"GPT-2": GPTConfig(**SIZES), "MegatronBert": BERTConfig(**SIZES, ffn_hidden_size=24)}
#: of Megatron-LM's settings: those of a BERT with one form of GELU, which transformers has, too
ONE_GELU = {
    "bias_gelu_fusion": False, "vocab_size": VOCAB, "attn_mask_type": None, "make_vocab_size_divisible_by": 32
}  # fmt: skip


@pytest.fixture
def written(world, folder, theirs):
    """``written(name, version, ranks)``: a folder of Megatron-LM with the weights of transformers' model."""

    def written(name, version=3, ranks=2, **changes):
        place = folder / f"{name}-{version}-{ranks}-{len(changes)}"
        if world.rank == 0 and not place.exists():
            weights = {key: tensor.detach() for key, tensor in theirs(name).named_parameters()}
            settings = (ONE_GELU if name == "MegatronBert" else ONE_GELU | {"bias_gelu_fusion": True}) | changes
            ours = from_hugging_face(weights, CONFIGS[name])
            write_megatron(place, contents(ours, 8, version=version, ranks=ranks, padded=PADDED, **settings))
        world.barrier()
        return place

    return written


@pytest.mark.sizes(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_all_versions_at_all_sizes_are_the_model_of_transformers(world, alone, theirs, written, name):
    wanted = from_hugging_face(dict(theirs(name).named_parameters()), CONFIGS[name])
    with ProcessGrid(world, tensor=world.size) as grid:
        for version, ranks in itertools.product(range(4), (1, 2)):
            trained = load_trained(f"megatron:{written(name, version, ranks)}", grid)
            placed = placements(trained.model)
            for key, parameter in trained.model.named_parameters():
                whole, shape = wanted[key], placed[key].shape
                whole = torch.cat([whole, torch.zeros(shape[0] - len(whole), *shape[1:])])
                assert torch.equal(parameter, placed[key].part(whole)), (version, ranks, key)
    if name == "GPT-2":
        with ProcessGrid(alone, tensor=1) as grid:
            tokens = torch.arange(2 * 16).view(2, 16) % VOCAB
            logits = load_trained(f"megatron:{written(name)}", grid).model(tokens)[..., :VOCAB]
        torch.testing.assert_close(logits, theirs(name)(tokens).logits.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_from_megatron_to_hugging_face(world, theirs, written, folder, command, name):
    size = ("--tensor-model-parallel-size", world.size)
    command(world, "--from", "megatron", written(name), "--save", folder / "run", *size)
    command(world, "--load", folder / "run", "--to", "hf", folder / "out", *size)
    peer = theirs(name)
    back, told = type(peer).from_pretrained(folder / "out", output_loading_info=True)
    assert not any(told.values())
    for key, values in peer.state_dict().items():
        assert torch.equal(back.state_dict()[key], values), key
    world.barrier()


def test_what_does_not_work_is_one_error_on_all_ranks(world, written, folder, command):
    """Also a BERT with two forms of GELU, Megatron-LM's default: a run can have it, and transformers cannot."""
    two = written("MegatronBert", bias_gelu_fusion=True)
    command(world, "--from", "megatron", two, "--save", folder / "run")
    with pytest.raises((UsageError, ValueError), match="head_gelu"):
        command(world, "--load", folder / "run", "--to", "hf", folder / "out")
    file = two / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    if world.rank == 0:
        file.write_bytes(file.read_bytes()[:-100])
    world.barrier()
    with pytest.raises(UsageError, match=r"mp_rank_01/model_optim_rng\.pt: damaged, cut, or no file of torch\.save"):
        command(world, "--from", "megatron", two, "--save", folder / "other")
    unknown = written("GPT-2", vocab_size=None)
    with pytest.raises(UsageError, match="has 64 tokens with the padding: give the number without it"):
        command(world, "--from", "megatron", unknown, "--save", folder / "other")
    command(world, "--from", "megatron", unknown, "--save", folder / "other", "--vocab-size", VOCAB)
