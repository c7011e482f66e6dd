"""The command: the same texts on every layout of ranks, files of prompts, a conversation, and what it refuses."""

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support import mpirun
from tests.support.weights.hugging_face import to_hugging_face
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.data.tokenizer import Tokenizer
from trainers.settings.commands import GPTSettings
from trainers.tasks.kinds import task_of

pytestmark = pytest.mark.slow

LINES = ["the cat sat on the mat", "the owl hid in the old wood", "a dog"]
PROMPTS = ["the cat", "a", "the owl hid", "in the old wood, the dog"]
POSITIONS = 16  # of the fixture `tiny`
LONG = "the owl hid in the old wood " * 4

#: (ranks, arguments) of each run that writes texts; placeholder {dir}: the folder
DRAWN = ["--load", "{dir}/gpt", "--prompts", "{dir}/prompts.txt", "--max-new-tokens", "6", "--num-samples", "2",
         "--temperature", "1.5", "--json", "{dir}/drawn.json"]  # fmt: skip
GREEDY = ["--load", "{dir}/gpt", "--prompts", "{dir}/prompts.jsonl", "--max-new-tokens", "8", "--temperature", "0"]
WRITING = {
    "drawn": (1, DRAWN),
    "drawn, tensor 2": (2, [*DRAWN, "--tensor-model-parallel-size", "2"]),
    "drawn, data 2": (2, [*DRAWN, "--micro-batch-size", "1"]),
    "drawn, pipeline 2": (2, [*DRAWN, "--pipeline-model-parallel-size", "2"]),
    "greedy": (2, [*GREEDY, "--tensor-model-parallel-size", "2", "--json", "{dir}/greedy.json"]),
    "with prompts": (1, [*GREEDY, "--print-prompt"]),
    "in float64": (1, [*GREEDY, "--dtype", "float64"]),
    "one": (1, ["--load", "{dir}/gpt", "--prompt", "the cat", "--max-new-tokens", "8", "--temperature", "0"]),
    "stopped": (
        2,
        ["--load", "{dir}/gpt/iter_0000030", "--prompt", "the cat", "--temperature", "0", "--stop", "mat", "wood",
         "--json", "{dir}/stopped.json"],
    ),
    "slid": (
        2,
        ["--load", "{dir}/gpt", "--prompt", "a", "--max-new-tokens", "40", "--window-slide", "4",
         "--tensor-model-parallel-size", "2", "--temperature", "1000"],
    ),
}  # fmt: skip
#: it ends by /quit, because Open MPI's launcher does not tell the ranks that a pipe has ended
CONVERSATION = ["--load", "{dir}/gpt", "-i", "--temperature", "0", "--max-new-tokens", "4",
                "--tensor-model-parallel-size", "2"]  # fmt: skip
SAID = "the cat\n" * 3 + "/new\nthe cat\n/quit\n"

#: arguments on two ranks, and what the one line of the error must say, as patterns
ONE = ["--prompt", "a"]
REFUSED = {
    "no prompt": (["--load", "{dir}/gpt"], "--prompt, --prompts, --interactive: want exactly one"),
    "two prompts": (["--load", "{dir}/gpt", *ONE, "-i"], "--prompt, --prompts, --interactive: want exactly one"),
    "no run": ([*ONE], "--load DIR: needed"),
    "no folder": (["--load", "{dir}/none", *ONE], "--load .*none: no such folder"),
    "no checkpoint": (["--load", "{dir}/nothing", *ONE], "--load .*nothing: holds no checkpoint"),
    "a BERT": (["--load", "{dir}/bert", *ONE], "--load .*bert.*: holds a BERT, and a GPT or a T5 is needed; give"),
    "no tokenizer": (["--load", "{dir}/ids", *ONE], "the run has no tokenizer.*--tokenizer-model FILE"),
    "an empty file": (["--load", "{dir}/gpt", "--prompts", "{dir}/empty.txt"], "empty.txt: holds no prompt"),
    "more stages than layers": (
        ["--load", "{dir}/one-layer", *ONE, "--pipeline-model-parallel-size", "2"],
        "--pipeline-model-parallel-size 2: must be at most 1, the layers of the model",
    ),
    "no file": (["--load", "{dir}/gpt", "--prompts", "{dir}/none.txt"], "none.txt: there is no such file"),
    "a row without its field": (
        ["--load", "{dir}/gpt", "--prompts", "{dir}/fields.jsonl"], "fields.jsonl: line 2: no key 'prompt'",
    ),
    "a prompt longer than the model": (
        ["--load", "{dir}/gpt", "--prompts", "{dir}/long.txt"],
        f"long.txt: line 2: has [0-9]+ tokens; the model knows {POSITIONS} positions",
    ),
    "temperature": (["--load", "{dir}/gpt", *ONE, "--temperature", "-1"], "--temperature -1.0: must be 0, or from"),
    "top-k": (["--load", "{dir}/gpt", *ONE, "--top-k", "-1"], "--top-k -1: must not be negative"),
    "top-p": (["--load", "{dir}/gpt", *ONE, "--top-p", "0"], "--top-p 0.0: must be above 0, and at most 1"),
    "penalty": (["--load", "{dir}/gpt", *ONE, "--repetition-penalty", "0"], "--repetition-penalty 0.0: must be at"),
    "slide": (["--load", "{dir}/gpt", *ONE, "--window-slide", "17"], "--window-slide 17: must be at most the model's"),
    "json": (["--load", "{dir}/gpt", *ONE, "--json", "{dir}/none/x"], "--json .*: there is no folder"),
    "a conversation of two": (["--load", "{dir}/gpt", "-i"], "--tensor-model-parallel-size 1: must be all 2 ranks"),
    "tensor size": (["--load", "{dir}/gpt", *ONE, "--tensor-model-parallel-size", "3"], "does not divide the 2 ranks"),
    "memory": (
        ["--load", "{dir}/gpt", *ONE, "--micro-batch-size", "1000000000"],
        "--micro-batch-size 1000000000, --num-samples 1: the keys and values .* GB a rank",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    tokenizer = Tokenizer.train_bpe(LINES, 290)
    (folder / "tokenizer.json").write_bytes(tokenizer.to_bytes())
    with IndexedDatasetWriter(folder / "tokens", np.uint16) as writer:
        for number in range(60):
            writer.add_document(np.array([*tokenizer.encode(LINES[number % 3]), tokenizer.eod]))
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (folder / "fields.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (folder / "long.txt").write_text(f"a\n{LONG}\n")
    (folder / "empty.txt").write_text("")
    (folder / "nothing").mkdir()
    return folder


@pytest.fixture(scope="module")
def outcomes(folder, pretrain, tiny, mock):
    """How every run of this file ends, by name; all of them, and what they load, in one job."""
    data = ["--data-path", folder / "tokens", "--tokenizer-model", folder / "tokenizer.json"]
    learns = ["--train-iters", "30", "--lr", "1e-2", "--min-lr", "1e-2", "--sample-tokens", "5"]
    at = mock.index("--sample-tokens")
    of_bert = [*mock[:at], *mock[at + 2 :], "--train-iters", "1"]
    ids = ["--train-iters", "1", "--tensor-model-parallel-size", "2"]
    runs = {
        "gpt": (2, [*tiny, *data, *learns, "--save", folder / "gpt"]),
        "ids": (2, [*mock, *ids, "--save", folder / "ids"]),
        "one-layer": (1, [*mock, "--num-layers", "1", "--train-iters", "1", "--save", folder / "one-layer"]),
        "bert": (1, [*of_bert, "--save", folder / "bert"]),
        **WRITING,
        **{name: (2, words) for name, (words, _) in REFUSED.items()},
        "conversation": (2, CONVERSATION, [], SAID),
    }
    commands = [*["pretrain_gpt"] * 3, "pretrain_bert", *["generate"] * (len(runs) - 4)]
    words = [(n, [str(word).format(dir=folder) for word in given], *more) for n, given, *more in runs.values()]
    return dict(zip(runs, pretrain(*words, command=commands), strict=True))


def texts(outcome):
    """What rank 0 wrote; the other ranks write nothing."""
    assert set(outcome.codes) == {0} and not any(outcome.out[1:])
    return outcome.out[0]


@pytest.mark.parametrize("name", [name for name in WRITING if name.startswith("drawn, ")])
def test_every_layout_writes_the_same_texts(outcomes, name):
    assert texts(outcomes[name]) == texts(outcomes["drawn"])


@pytest.mark.long
def test_four_ranks_write_the_same_texts(outcomes, folder, pretrain):
    """Tensor 2 x data 2. A job of four ranks costs twice one of two."""
    words = [word.format(dir=folder) for word in (*DRAWN, "--tensor-model-parallel-size", "2")]
    (found,) = pretrain((4, words), command="generate")
    assert texts(found) == texts(outcomes["drawn"])


def test_json_has_what_was_written(outcomes, folder):
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    written = json.loads((folder / "drawn.json").read_text())["texts"]
    assert texts(outcomes["drawn"]) == "\n".join(text["text"] + "\n" for text in written)
    assert [(text["prompt"], text["sample"]) for text in written] == [(p, n) for p in PROMPTS for n in (0, 1)]
    assert len({text["text"] for text in written}) > len(PROMPTS)
    for text in written:
        assert 0 < len(text["tokens"]) <= 6 and text["ended_by"] in ("end_of_text", "length")
        kept = [token for token in text["tokens"] if token != tokenizer.eod]
        assert tokenizer.decode(kept) == text["text"] and (len(kept) < len(text["tokens"])) == (
            text["ended_by"] == "end_of_text"
        )


def test_greedy_texts_are_those_of_transformers(outcomes, folder):
    transformers = pytest.importorskip("transformers", reason="the independent peer is transformers' GPT-2")
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    (state,) = folder.glob("gpt/*/state.json")
    kept = {key: value for key, value in json.loads(state.read_text())["settings"].items() if key in ("vocab_size",)}
    shape = task_of(GPTSettings(
        num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=POSITIONS, make_vocab_size_divisible_by=128,
        mock_data=True, **kept,
    )).model()  # fmt: skip
    peer = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=shape.vocab_size, n_positions=POSITIONS, n_embd=32, n_layer=2, n_head=4,
            activation_function="gelu_new", bos_token_id=tokenizer.eod, eos_token_id=tokenizer.eod,
        )
    ).eval()  # fmt: skip
    weights = to_hugging_face(load_file(state.parent / "model.safetensors"), shape)
    assert not peer.load_state_dict(weights, strict=False).unexpected_keys
    written = json.loads((folder / "greedy.json").read_text())["texts"]
    for text, prompt in zip(written, PROMPTS, strict=True):
        tokens = torch.tensor([tokenizer.encode(prompt)])
        expected = peer.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eod)
        assert text["tokens"] == expected[0, tokens.shape[1] :].tolist()
    assert len({text["text"] for text in written}) > 1
    assert texts(outcomes["greedy"]) == texts(outcomes["in float64"]) == "\n".join(f"{t['text']}\n" for t in written)
    assert texts(outcomes["with prompts"]) == "\n".join(f"{t['prompt']}{t['text']}\n" for t in written)
    assert texts(outcomes["one"]) == f"{written[0]['text']}\n"


def test_a_text_ends_before_a_stop_string(outcomes, folder):
    found = texts(outcomes["stopped"])
    whole = texts(outcomes["one"])
    assert re.match(r".*(mat|wood)", whole, re.DOTALL), "the model has not learnt its three lines"
    assert found == re.split("mat|wood", whole)[0] + "\n"
    (written,) = json.loads((folder / "stopped.json").read_text())["texts"]
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    assert written["ended_by"] == "stop" and re.search("(mat|wood)", tokenizer.decode(written["tokens"]))


def test_a_window_that_slides_says_so(outcomes):
    assert (
        "got longer than the 16 positions of the model: its first tokens were forgotten, 4" in outcomes["slid"].err[0]
    )
    assert texts(outcomes["slid"]).strip()
    assert not any("got longer" in line for line in outcomes["one"].err)


def test_the_report_of_a_run_has_a_sample(outcomes, folder):
    report = json.loads((folder / "gpt" / "report.json").read_text())
    assert set(outcomes["gpt"].codes) == {0} and report["sample"] and report["sample_prompt"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_line_on_rank_zero(outcomes, name):
    outcome, pattern = outcomes[name], REFUSED[name][1]
    assert all(code not in (0, None) for code in outcome.codes) and not any(outcome.out)
    assert re.search(pattern, outcome.err[0]), outcome.err[0]
    assert outcome.err[0].count("\n") == 1 and not outcome.err[1], outcome.err


def test_a_conversation_remembers_until_it_is_told_not_to(outcomes):
    """After three lines the model's positions are full; after /new the first line gets its first answer again."""
    found = outcomes["conversation"]
    answers = texts(found).splitlines()
    assert len(answers) == 4 and answers[0] == answers[3] == outcomes["one"].out[0][: len(answers[0])] != ""
    assert "/quit" in found.err[0] and found.err[0].count("tokens of the conversation are forgotten") == 1
    assert not found.err[1]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_interrupt_at_the_prompt(outcomes, folder, ranks):
    """Without a launcher on one rank. The program ends with its own status, and MPI says nothing."""
    options = [word.format(dir=folder) for word in CONVERSATION]
    options[options.index("--tensor-model-parallel-size") + 1] = str(ranks)
    launcher = [mpirun.mpiexec(), "-n", str(ranks)] if ranks > 1 else []
    running = subprocess.Popen(
        [*launcher, sys.executable, "-m", "trainers.generate", *options], stdin=subprocess.PIPE, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=mpirun.environment(), cwd=mpirun.ROOT,
    )  # fmt: skip
    try:
        said = running.stderr.readline()
        assert said.startswith("Each line is continued by the model."), said
        time.sleep(mpirun.longer(1.0))  # the ranks then wait for the line
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    # The launcher says on standard output that it hands Ctrl-C on.
    said = "".join(line for line in (out + err).splitlines(keepends=True) if not line.startswith("[mpiexec@"))
    assert (running.returncode, said) == (130, "\n")


@pytest.mark.long
def test_a_conversation_through_mpiexec(outcomes, folder):
    """The launcher hands standard input to rank 0 alone."""
    options = [word.format(dir=folder) for word in CONVERSATION]
    words = [mpirun.mpiexec(), "-n", "2", sys.executable, "-m", "trainers.generate", *options]
    done = subprocess.run(
        words, input=SAID, text=True, env=mpirun.environment(), cwd=mpirun.ROOT, capture_output=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == texts(outcomes["conversation"])
