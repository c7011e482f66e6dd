"""The contest of generation: the contestants have the same weights and texts, and communicate as the formula says."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from bench.contest import __main__ as command
from bench.contest import generation
from bench.contest.generation import CONTEST
from bench.contest.parts.base import Case
from bench.programs import generated_text
from bench.programs.generation_task import GenerationTask, checksum

SMALL = GenerationTask(2, 32, 4, 60, 64, batch=2, prompt_tokens=5, new_tokens=12)
LLAMA = replace(SMALL, family="llama")


def test_a_checksum_knows_the_tokens_and_their_order():
    texts = [[1, 2], [3]]
    assert checksum(texts) == checksum([[1, 2, 3]]) != checksum([[1, 3], [2]])
    assert len({checksum([[0] * n]) for n in range(10)}) == 10
    assert all(0 <= checksum([[n] * 50]) < 1 for n in range(100))


def test_options_make_the_tasks():
    found = list(CONTEST.tasks(command.read("generation", ["--batch", "1", "4", "--new-tokens", "9", "--lengths", "8",
                                                           "2000"])))  # fmt: skip
    assert [(one.task.batch, one.tokens) for one in found] == [(1, 9), (4, 36)]
    assert {(one.task.new_tokens, one.task.max_position_embeddings) for one in found} == {(9, 2000)}
    assert next(CONTEST.tasks(command.read("generation", []))).task == GenerationTask()
    with pytest.raises(ValueError, match="must be an executable Python, and goes with --family llama"):
        command.read("generation", ["--vllm", sys.executable])


def test_collectives_that_are_not_those_of_the_formula_are_an_error(tmp_path):
    told = [["all_reduce", 2 * 32 * 4, 5], ["all_gather", 2 * 16 * 2, 1]]
    for count, wrong in ((5, 0), (4, 1)):
        told[0][2] = count
        (tmp_path / generation.TRACE).write_text(json.dumps(told))
        case = Case({"batch": 2}, {"ours": [1.0]}, numbers={"largest_loss_difference": 0.0})
        CONTEST.conclude(case, SMALL, str(tmp_path))
        assert len(case.errors) == wrong
    assert case.errors == [
        "a token's collectives are 4 all_reduce of 256 bytes, 1 all_gather of 64 bytes; 1,088 bytes in all, and those "
        "of the formula 5 all_reduce of 256 bytes, 1 all_gather of 64 bytes; 1,344 bytes in all"
    ]
    notes = CONTEST.notes(command.read("generation", []), [case, Case({}, {"ours": [1.0]})])
    assert notes[-1].endswith("batch 2: 5 all_reduce of 256 bytes, 1 all_gather of 64 bytes; 1,344 bytes in all")


def test_the_formula_has_each_size_once():
    assert generation.by_formula(SMALL) == {("all_reduce", 2 * 32 * 4): 5, ("all_gather", 2 * 16 * 2): 1}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("task", [SMALL, LLAMA], ids=lambda task: task.family)
def test_our_contestant_writes_the_texts_of_the_peer(mpi_world, tmp_path, task):
    """Whole texts, and one token after the prompts: the first of the text."""
    pytest.importorskip("transformers", reason="the independent peer is transformers' model")
    from bench.peers.generated_text import build, write_model
    from commengine import Communicator, ProcessGrid
    from trainers.trained import load_trained

    task = replace(task, weights=mpi_world.bcast(str(tmp_path)))
    if mpi_world.rank == 0:
        write_model(task, task.weights)
    mpi_world.Barrier()
    prompts = torch.tensor(task.prompts())
    with torch.no_grad():
        real = torch.ones_like(prompts)
        theirs = build(task).generate(prompts, attention_mask=real, max_new_tokens=12, do_sample=False, pad_token_id=0)
    texts = theirs[:, task.prompt_tokens :].tolist()
    with Communicator(mpi_world) as world:
        model = load_trained(f"hf:{task.weights}", ProcessGrid(world, tensor=world.size)).model
        assert generated_text.whole_text(task, model)() == checksum(texts)
        step = generated_text.one_token(task, model)
        assert [step(), step()] == [checksum([[text[0] for text in texts]])] * 2
        traced = generated_text.communication(task, model)
    if mpi_world.size == 2:
        formula = sorted((*key, count) for key, count in generation.by_formula(task).items())
        assert [tuple(row) for row in json.loads(json.dumps(traced))] == formula


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_real_contest_writes_equal_texts(tmp_path, capsys, family):
    sizes = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--vocab-size", "60"]
    counts = ["--family", family, "--rounds", "2", "--batch", "1", "3", "--new-tokens", "8", "--prompt-tokens", "4"]
    files = ["--output", str(tmp_path / "generation.md"), "--json", str(tmp_path / "generation.json")]
    status = command.main(["generation", *sizes, *counts, *files])
    result = json.loads((tmp_path / "generation.json").read_text())
    errors = [error for case in result["cases"] for error in case["errors"]]
    assert not [error for error in errors if "core" not in error], errors  # a busy machine may disturb a contestant
    assert status in (0, 1) and len(result["cases"]) == 3
    assert "| 3 | transformers | " in (tmp_path / "generation.md").read_text() and capsys.readouterr()
