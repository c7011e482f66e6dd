"""Import, then export: the same tensors, the same configuration, the same bytes at every number of ranks."""

import filecmp
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from commengine import ProcessGrid, UsageError
from tests.support.weights.hugging_face import to_hugging_face
from tplayers import BERT, GPT, BERTConfig, GPTConfig, initialize
from trainers.data.tokenizer import Tokenizer
from trainers.weights.export import SmallFiles, export


@pytest.mark.some(7)
@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_out_is_what_came_in(world, alone, theirs, family, folder, command):
    """Tensors bit for bit; keys, configuration and tokens as they were; the bytes of one rank alone."""
    import transformers

    model = theirs(family)
    if world.rank == 0:
        model.save_pretrained(folder / "in")
        (folder / "in" / "tokenizer.json").write_bytes(Tokenizer.train_bpe(["abra", "cad"] * 9, 257).to_bytes())
    world.barrier()
    size = ("--tensor-model-parallel-size", world.size)
    command(world, "--from", "hf", folder / "in", "--save", folder / "run", *size)
    command(world, "--load", folder / "run", "--to", "hf", folder / "out", *size)
    if world.rank == 0:
        command(alone, "--load", folder / "run", "--to", "hf", folder / "alone")
        names, others = ({path.name for path in (folder / name).iterdir()} for name in ("out", "alone"))
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= names == others
        assert all(filecmp.cmp(folder / "out" / name, folder / "alone" / name, shallow=False) for name in names)
        assert filecmp.cmp(folder / "in" / "tokenizer.json", folder / "out" / "tokenizer.json", shallow=False)
        before, after = (load_file(folder / name / "model.safetensors") for name in ("in", "out"))
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        _, told = type(model).from_pretrained(folder / "out", output_loading_info=True)
        assert not any(told.values()), told
        first, second = (transformers.AutoConfig.from_pretrained(folder / name).to_dict() for name in ("in", "out"))
        first.pop("_name_or_path"), second.pop("_name_or_path")
        assert first == second
        keys = json.loads((folder / "out" / "config.json").read_text())
        assert keys["dtype"] == keys["torch_dtype"] == "float32"
        if "rope_parameters" in keys:
            assert keys["rope_theta"] == keys["rope_parameters"]["rope_theta"]
            assert (keys["rope_scaling"] is None) == (keys["rope_parameters"]["rope_type"] == "default")
    world.barrier()


@pytest.mark.mpi
@pytest.mark.every_size
def test_a_model_without_an_origin(world, folder):
    """Also in bfloat16, and for vocabularies of which a rank holds padding alone."""
    shape = BERTConfig(1, 16, 4, vocab_size=9, max_position_embeddings=8, make_vocab_size_divisible_by=16)
    with ProcessGrid(world, tensor=world.size) as grid:
        model = BERT(shape, grid.tensor, dtype=torch.bfloat16)
        torch.manual_seed(world.rank)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                whole = torch.randn(8, generator=torch.Generator().manual_seed(len(name)))
                parameter.copy_(whole[:1])
        export(model, grid, folder / "out", SmallFiles())
        export(model, grid, folder / "out", SmallFiles())  # in place of the first
        assert [path.name for path in folder.iterdir()] == ["out"]
    found = load_file(folder / "out" / "model.safetensors")
    assert found["bert.embeddings.word_embeddings.weight"].shape == (9, 16)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    with safe_open(folder / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    keys = json.loads((folder / "out" / "config.json").read_text())
    assert keys["architectures"] == ["MegatronBertForPreTraining"] and keys["torch_dtype"] == "bfloat16"
    assert found.keys() == set(to_hugging_face(_ours(shape), shape))
    world.barrier()


@pytest.mark.mpi
@pytest.mark.parametrize("known", [True, False], ids=["tokenizer", "no tokenizer"])
def test_a_new_model_ends_texts_where_its_tokenizer_does(world, folder, known):
    """And not at the token that transformers' class would take."""
    import transformers

    shape = GPTConfig(
        1, 16, 4, vocab_size=300, max_position_embeddings=8, make_vocab_size_divisible_by=16, normalization="RMSNorm",
        swiglu=True, position_embedding_type="rope", add_bias_linear=False,
    )  # fmt: skip
    tokenizer = Tokenizer.train_bpe(["abra", "cad"] * 9, 257)
    if world.rank == 0:
        (folder / "tokenizer.json").write_bytes(tokenizer.to_bytes())
    with ProcessGrid(world, tensor=world.size) as grid:
        model = GPT(shape, grid.tensor)
        initialize(model, 1)
        export(model, grid, folder / "out", SmallFiles(None, str(folder / "tokenizer.json") if known else None))
    end = tokenizer.eod if known else None
    for kind in (transformers.AutoConfig, transformers.GenerationConfig):
        found = kind.from_pretrained(folder / "out")
        assert (found.bos_token_id, found.eos_token_id) == (end, end)
    world.barrier()


def _ours(shape):
    """Global tensors of a model of this shape, on one rank."""
    from types import SimpleNamespace

    return dict(BERT(shape, SimpleNamespace(rank=0, size=1)).named_parameters())


@pytest.mark.mpi
def test_what_cannot_be_exported_is_refused_by_name(world, folder):
    with ProcessGrid(world, tensor=world.size) as grid:
        shape = BERTConfig(
            1, 16, 4, vocab_size=9, max_position_embeddings=8, make_vocab_size_divisible_by=16, gelu="tanh",
            head_gelu="erf",
        )  # fmt: skip
        model = BERT(shape, grid.tensor)
        with pytest.raises(UsageError, match="head_gelu='erf' must be that of the layers, gelu='tanh'"):
            export(model, grid, folder / "out", SmallFiles())
        assert not (folder / "out").exists()
        good = BERT(BERTConfig(1, 16, 4, 9, 8, make_vocab_size_divisible_by=16), grid.tensor)
        (folder / "file").touch()
        with pytest.raises(UsageError, match=r"file/.hf.commengine-tmp.*failed"):
            export(good, grid, folder / "file" / "hf", SmallFiles())
        world.barrier()
