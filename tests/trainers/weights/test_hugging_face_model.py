"""Models of transformers, loaded from their folders at every number of ranks, compute what transformers computes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from commengine import ProcessGrid, UsageError
from trainers.checkpoints import part_reader
from trainers.trained import load_trained

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

TOKENS = torch.randint(0, 57, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def grid(world):
    with ProcessGrid(world, tensor=world.size) as grid:
        yield grid


def logits(model, grid, vocabulary):
    """All ranks' columns, without padding."""
    found = model(TOKENS)
    found = (found[0] if isinstance(found, tuple) else found).contiguous()
    return torch.cat(grid.world.mpi.allgather(found), dim=-1)[..., :vocabulary]


def saved(model, folder, world, **settings):
    if world.rank == 0:
        model.save_pretrained(folder, **settings)
    world.barrier()


def test_every_family_from_shards(world, grid, theirs, family, folder):
    model = theirs(family)
    saved(model, folder, world, max_shard_size="20KB")
    assert world.size > 1 or len(list(folder.glob("*.safetensors"))) > 1
    trained = load_trained(f"hf:{folder}", grid)
    with torch.no_grad():
        found = model(TOKENS)
        wanted = found[0] if "prediction_logits" not in found else found.prediction_logits
        mine = logits(trained.model, grid, model.config.vocab_size)
    assert (mine - wanted).norm() < 1e-5 * wanted.norm()
    padding = load_rows(trained.model.embedding.weight, grid)[model.config.vocab_size :]
    assert len(padding) and not padding.any()
    world.barrier()


def load_rows(weight, grid):
    return torch.cat(grid.world.mpi.allgather(weight.detach()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_is_the_files_or_the_one_asked_for(world, grid, theirs, folder, dtype):
    model = theirs("Llama 3, two groups, tied")
    saved(model.to(dtype), folder, world)
    trained = load_trained(f"hf:{folder}", grid)
    assert {p.dtype for p in trained.model.parameters()} == {dtype}
    assert trained.settings.bf16 == (dtype == torch.bfloat16)
    double = load_trained(f"hf:{folder}", grid, dtype=torch.float64)
    for one, other in zip(trained.model.parameters(), double.model.parameters(), strict=True):
        assert other.dtype == torch.float64 and torch.equal(one.double(), other)
    world.barrier()


def test_pickled_files_and_names_of_old_releases(world, grid, theirs, folder):
    """Without the beginning "transformer." and with gamma and beta, as the first GPT-2 and BERT were published."""
    for family, old in (("GPT-2", {"transformer.": ""}), ("BERT", {"LayerNorm.weight": "LayerNorm.gamma",
                                                                  "LayerNorm.bias": "LayerNorm.beta"})):  # fmt: skip
        model = theirs(family)
        where = folder / family
        saved(model, where, world)
        if world.rank == 0:
            state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
            for now, before in old.items():
                state = {name.replace(now, before): tensor for name, tensor in state.items()}
            assert state.keys() != model.state_dict().keys()
            torch.save(state, where / "pytorch_model.bin", _use_new_zipfile_serialization=family == "GPT-2")
        world.barrier()
        new = load_trained(f"hf:{where}", grid)
        world.barrier()
        if world.rank == 0:
            (where / "model.safetensors").unlink()
        world.barrier()
        before = load_trained(f"hf:{where}", grid)
        pairs = zip(new.model.named_parameters(), before.model.named_parameters(), strict=True)
        assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


@pytest.mark.parametrize("family", ["Llama", "Qwen 2"])  # a head of keys for each query, and two with biases
def test_interleaved_rotary_weights_match_when_they_are_permuted_alone(world, grid, theirs, folder, family):
    model = theirs(family)
    with torch.no_grad():
        wanted = model(TOKENS).logits
        for name, parameter in model.named_parameters():
            if ".q_proj." in name or ".k_proj." in name:  # to Meta's order: number 2 j + c of a head is our c d / 2 + j
                d = 4
                heads = parameter.unflatten(0, (-1, d))
                order = [c * d // 2 + j for j in range(d // 2) for c in range(2)]
                parameter.copy_(heads[:, order].flatten(0, 1))
    saved(model, folder, world)
    for interleaved in (False, True):
        trained = load_trained(f"hf:{folder}", grid, asked={"rotary_interleaved": interleaved})
        with torch.no_grad():
            error = (logits(trained.model, grid, 57) - wanted).norm() / wanted.norm()
        assert error < 1e-5 if interleaved else error > 1e-2
    world.barrier()


SECOND = [
    ("SmolLM, one group", "lm_head.weight", "model.embed_tokens.weight"),
    ("GPT-2", "lm_head.weight", "transformer.wte.weight"),
    ("BERT", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("MegatronBert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "second", "first"), SECOND)
def test_a_second_name_of_a_tied_tensor_must_have_its_values(world, grid, theirs, folder, family, second, first):
    """Tensors that differ are not tied by transformers. One number of the last rank's slice does."""
    file = folder / "model.safetensors"
    for change in (0.0, 1.0):
        if world.rank == 0:
            theirs(family).save_pretrained(folder)
            tensors = load_file(file)
            tensors[second] = tensors[first].clone()
            tensors[second].view(-1)[-1] += change
            save_file(tensors, file, metadata={"format": "pt"})
        world.barrier()
        if change:
            with pytest.raises(UsageError, match=f"{second} differs from {first}, to which it is tied") as raised:
                load_trained(f"hf:{folder}", grid)
            assert str(raised.value).startswith(f"--load hf:{folder}: {file}: ") and "\n" not in str(raised.value)
        else:
            rows = load_rows(load_trained(f"hf:{folder}", grid).model.embedding.weight, grid)
            words = next(name for name in load_file(file) if name.endswith((".wte.weight", "word_embeddings.weight",
                                                                            "embed_tokens.weight")))  # fmt: skip
            assert torch.equal(rows[:57], load_file(file)[words])
        world.barrier()


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [("GPT-2", "wte.weight", "transformer.wte.weight"),
     ("BERT", "bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.weight")],
)  # fmt: skip
def test_two_names_of_one_tensor_are_refused(world, grid, theirs, folder, family, old, new):
    file = folder / "model.safetensors"
    if world.rank == 0:
        theirs(family).save_pretrained(folder)
        tensors = load_file(file)
        save_file(tensors | {old: tensors[new] + 1}, file, metadata={"format": "pt"})
    world.barrier()
    with pytest.raises(UsageError, match=r"model\.safetensors: .* are two names of one tensor") as raised:
        load_trained(f"hf:{folder}", grid)
    assert old in str(raised.value) and new in str(raised.value)
    world.barrier()


@pytest.mark.every_size
def test_a_rank_reads_its_slices_only(world, grid, theirs, folder, monkeypatch):
    read = []

    whole_read = part_reader.FileBytes.read

    def counted(self, target, start):
        read.append(len(target))
        whole_read(self, target, start)

    monkeypatch.setattr(part_reader.FileBytes, "read", counted)
    monkeypatch.setattr(part_reader, "SHORT_ROW", 1)  # shorter rows are read with their neighbours
    for family in ("Llama", "GPT-2"):
        saved(theirs(family), folder / family, world)
        read.clear()
        trained = load_trained(f"hf:{folder / family}", grid)
        held = sum(p.numel() for p in trained.model.parameters()) * 4
        assert 0 < sum(read) <= held
        whole = sum(p.numel() for p in theirs(family).parameters()) * 4
        assert sum(world.mpi.allgather(sum(read))) < whole * (1.2 if world.size > 1 else 1.001)  # norms are everybody's


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("shard", "model-00002-of-.*there is no such file"), ("shape", r"by config.json it must be \[48, 32\]"),
        ("cut", "its header says"), ("lacks", "lacks tensors"), ("extra", "the model has no place"),
        ("kind", "holds a GPT, and a BERT is needed"), ("folder", "there is no such folder"),
        ("config", "config.json: there is no such file"), ("integers", "not of real numbers"),
        ("8 bits", "model.safetensors: .* is of dtype F8_E4M3; valid: F64, F32"),
        ("8 bits pickled", "pytorch_model.bin: .* is of torch.float8_e4m3fn, not of real numbers of 16 to 64 bits"),
    ],
)  # fmt: skip
def test_bad_folders_are_one_error_on_all_ranks(world, grid, theirs, folder, changed, fault, said):
    model = theirs("Llama")
    if fault == "extra":
        model.model.extra = torch.nn.Linear(2, 2)
    if fault == "integers":
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.model.norm.weight.data = model.model.norm.weight.data.to(torch.int32)
    saved(model, folder, world, max_shard_size="20KB" if fault == "shard" else "1GB")
    if world.rank == 0:
        if fault == "shard":
            (shard,) = folder.glob("model-00002-of-*")
            shard.unlink()
        if fault == "shape":
            changed(folder / "config.json", intermediate_size=48)
        if fault == "lacks":
            changed(folder / "config.json", num_hidden_layers=3)
        if fault == "cut":
            file = folder / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-5])
        if fault.startswith("8 bits"):
            state = {name: values.to(torch.float8_e4m3fn) for name, values in model.state_dict().items()}
            save_file(state, folder / "model.safetensors")
            if fault == "8 bits pickled":
                (folder / "model.safetensors").unlink()
                torch.save(state | {"model.norm.weight": model.model.norm.weight}, folder / "pytorch_model.bin")
        if fault == "config":
            (folder / "config.json").unlink()
    world.barrier()
    where = folder / "not there" if fault == "folder" else folder
    with pytest.raises(UsageError, match=said) as raised:
        load_trained(f"hf:{where}", grid, kind="bert" if fault == "kind" else None)
    assert str(raised.value).startswith(f"--load hf:{folder}") and "\n" not in str(raised.value)
    assert len(set(world.mpi.allgather(str(raised.value)))) == 1


@pytest.mark.parametrize("family", ["Mixtral", "Qwen 2 MoE"])
def test_experts_in_one_tensor_are_read_as_those_apart(world, grid, theirs, folder, family):
    """A model of transformers 5 holds the experts of a layer in one tensor, and writes one for each expert."""
    model = theirs(family)
    saved(model, folder / "apart", world)
    saved(model, folder / "together", world)
    if world.rank == 0:
        stacked = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        assert any(tensor.dim() == 3 for tensor in stacked.values())
        save_file(stacked, folder / "together" / "model.safetensors")
    world.barrier()
    apart, together = (load_trained(f"hf:{folder / name}", grid).model for name in ("apart", "together"))
    for (name, one), other in zip(apart.named_parameters(), together.parameters(), strict=True):
        assert torch.equal(one, other), name
