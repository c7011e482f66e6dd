"""bench.generation: the contestants have the same weights and texts, and the table has what was measured."""

import json

import pytest
import torch

from bench.contests import generated_text
from bench.contests.comparison import measured
from bench.contests.driver import Contestant, Spread, rounds, started
from bench.contests.generation_task import GenerationTask, checksum
from bench.generation import __main__ as generation
from tests.support import mpirun

SMALL = GenerationTask(2, 32, 4, 60, 64, batch=2, prompt_tokens=5, new_tokens=12)


def test_a_checksum_knows_the_tokens_and_their_order():
    texts = [[1, 2], [3]]
    assert checksum(texts) == checksum([[1, 2, 3]]) != checksum([[1, 3], [2]])
    assert len({checksum([[0] * n]) for n in range(10)}) == 10
    assert all(0 <= checksum([[n] * 50]) < 1 for n in range(100))


def test_the_models_are_those_that_transformers_draws():
    transformers = pytest.importorskip("transformers", reason="the independent peer is transformers' GPT-2")
    shape = transformers.GPT2Config(vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    theirs = dict(transformers.GPT2LMHeadModel(shape).named_parameters())
    ours = SMALL.weights()
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: tensor.shape for n, tensor in theirs.items()}
    assert ours["transformer.wte.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items() if tensor.dim() == 1)


def test_options_and_their_faults():
    arguments, task = generation.read(["--batch", "1", "4", "--new-tokens", "9", "--lengths", "8", "2000"])
    assert arguments.batch == [1, 4] and task.new_tokens == 9 and task.max_position_embeddings == 2000
    assert generation.read([])[1] == GenerationTask()
    for words, message in (
        (["--num-attention-heads", "5"], "--num-attention-heads 5: must be even and divide --hidden-size 768"),
        (["--lengths", "1", "9"], "--lengths 1: must be at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            generation.read(words)


def test_the_table_has_what_was_measured():
    programs = [
        Contestant(name, 1, ["-m", "tests.jobs.contestant", "good", "0.002"],
                   {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(mpirun.ROOT)})
        for name in ("ours", "transformers")
    ]  # fmt: skip
    with started(programs) as running:
        result = measured(running, rounds(running, 2, 2), "ours", 128)
    rows = [
        {"operation": "all_reduce", "bytes": 3072, "count": 25, "by_formula": 25},
        {"operation": "all_gather", "bytes": 32, "count": 1, "by_formula": 1},
    ]
    text = {"task": vars(GenerationTask()), "collectives": rows, **result}
    spread = vars(Spread(0.010, 0.009, 0.011))
    more = {"lengths": [16, 256], "seconds": {"16": spread, "256": spread}, "ratio": vars(Spread(1.2, 1.1, 1.3)),
            "errors": []}  # fmt: skip
    surroundings = {"command": "", "date": "", "load_average_before": 0.0, "hardware": "", "versions": {}}
    table = generation.markdown(surroundings | {"texts": [text, text], "one_token": more}, 2)
    assert table.count("## Batch 1") == 2 and table.count("| bytes of all | | 76,832 | 76,832 |") == 2
    assert "| 256 | 10.0 [9.0 to 11.0] |" in table and "The ratio is 1.20 [1.10 to 1.30]; at most 2" in table


def test_the_formula_has_each_size_once():
    found = {(one.operation, one.size): one.count for one in generation.by_formula(SMALL)}
    assert found == {("all_reduce", 2 * 32 * 4): 5, ("all_gather", 2 * 16 * 2): 1}


@pytest.mark.mpi
def test_our_contestant_writes_the_texts_of_the_peer(mpi_world):
    """Whole texts, and one token after the prompts: the first of the text."""
    pytest.importorskip("transformers", reason="the independent peer is transformers' GPT-2")
    from bench.peers.generated_text import build
    from commengine import Communicator

    prompts = torch.tensor(SMALL.prompts())
    with torch.no_grad():
        theirs = build(SMALL).generate(prompts, max_new_tokens=12, do_sample=False, pad_token_id=0)
    texts = theirs[:, SMALL.prompt_tokens :].tolist()
    with Communicator(mpi_world) as world:
        model = SMALL.model(world)
        assert generated_text.whole_text(SMALL, model)() == checksum(texts)
        step = generated_text.one_token(SMALL, model)
        assert [step(), step()] == [checksum([[text[0] for text in texts]])] * 2
        traced = generated_text.communication(SMALL, model)
    if mpi_world.size == 2:
        formula = sorted((one.operation, one.size, one.count) for one in generation.by_formula(SMALL))
        assert [tuple(row) for row in json.loads(json.dumps(traced))] == formula


@pytest.mark.long
@pytest.mark.slow
def test_a_real_contest_writes_equal_texts(tmp_path, capsys):
    sizes = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--vocab-size", "60"]
    counts = ["--rounds", "2", "--batch", "1", "3", "--new-tokens", "8", "--prompt-tokens", "4"]
    files = ["--output", str(tmp_path / "generation.md"), "--json", str(tmp_path / "generation.json")]
    status = generation.main([*sizes, *counts, *files])
    result = json.loads((tmp_path / "generation.json").read_text())
    errors = [error for text in result["texts"] for error in text["errors"]]
    assert not [error for error in errors if "core" not in error], errors  # a busy machine may disturb a contestant
    assert status in (0, 1) and len(result["texts"]) == 2
    assert "Batch 3" in (tmp_path / "generation.md").read_text() and capsys.readouterr()
