"""The command: its numbers at every layout of ranks against transformers in float64, its files, and what it refuses."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.weights.hugging_face import to_hugging_face
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.data.tokenizer import Tokenizer
from trainers.scoring import texts
from trainers.settings.commands import GPTSettings
from trainers.tasks.kinds import task_of

pytestmark = pytest.mark.slow

FIXTURE = Path(__file__).with_name("articles.raw")
LENGTH = 32
MODEL = [
    "--num-layers", "1", "--hidden-size", "48", "--num-attention-heads", "12", "--seq-length", LENGTH,
    "--make-vocab-size-divisible-by", "12", "--micro-batch-size", "4", "--global-batch-size", "8",
    "--lr", "1e-2",
]  # fmt: skip
LAYOUTS = {"1": (1, 1), "T2": (2, 2), "D3": (3, 1), "T2xD2": (4, 2)}
LAST_WORDS = ["The mole was begun\nin 1871 and completed in 1884", "a clock at the root of the mole"]
#: arguments of evaluations that are refused ({} is the folder of files), and what the one line must say
REFUSED = {
    "a BERT": ("--load {}/bert --task perplexity --data {}/text", "{}/bert/iter_0000001: holds a BERT, and a GPT is"),
    "no run": ("--load {}/none --task perplexity --data {}/text", "--load {}/none: no such folder"),
    "no tokenizer": ("--load {}/mock --task perplexity --data {}/text", "--load: the run has no tokenizer"),
    "another tokenizer": (
        "--load {}/run --task perplexity --data {}/text --tokenizer-model {}/text",
        "--tokenizer-model: {}/text: not a tokenizer.json",
    ),
    "an empty file": ("--load {}/run --task wikitext --data {}/empty", "--data {}/empty: has no text"),
    "an empty file of examples": ("--load {}/run --task lambada --data {}/empty", "--data {}/empty: has no text"),
    "one token": ("--load {}/run --task perplexity --data {}/one", "--data {}/one: has no text of at least two tokens"),
    "a row without its field": (
        "--load {}/run --task jsonl --data {}/rows.jsonl",
        "--data {}/rows.jsonl: line 2: no key 'text'; the keys are 'words'",
    ),
    "an example without its field": (
        "--load {}/run --task lambada --data {}/rows.jsonl",
        "--data {}/rows.jsonl: line 2: no key 'text'; the keys are 'words'",
    ),
    "a long last word": (
        "--load {}/run --task lambada --data {}/long",
        "--data {}/long: line 1: its last word has 41 tokens, and the model reads 32",
    ),
    "windows longer than the model": (
        "--load {}/run --task wikitext --data {}/text --seq-length 64", "--seq-length 64: the model knows 32 positions",
    ),
    "a stride beyond the window": (
        "--load {}/run --task wikitext --data {}/text --stride 64", "--stride 64: must not exceed the 32 tokens",
    ),
    "no task": ("--load {}/run", "--task: needed; valid: wikitext, lambada"),
    "nothing to verify": (
        "--load {}/run --task wikitext --data {}/text --verify-data", "--verify-data: needs --task held-out",
    ),
    "another task": ("--load {}/run --task squad", "held-out, or lm-eval:NAME,NAME,..."),
    "TP does not divide the heads": (
        "--load {}/run --task perplexity --data {}/text --tensor-model-parallel-size 4",
        "--tensor-model-parallel-size 4: does not divide the 2 ranks; [1, 2]",
    ),
    "data that were replaced": (
        "--load {}/replaced --task held-out", "--task held-out: {}/other holds other data (identity ",
    ),
    "a tokenizer that was replaced": (
        "--load {}/replaced --task perplexity --data {}/text",
        "--tokenizer-model: {}/other-tokenizer.json: has another vocabulary than the tokenizer of that name with",
    ),
    "no such tokenizer for held-out text": (
        "--load {}/run --task held-out --tokenizer-model {}/gone.json", "--tokenizer-model: {}/gone.json: no such file",
    ),
    "held-out text of mock data": ("--load {}/mock --task held-out", "--task held-out: the run was trained on --mock"),
    "a file that cannot be written": (
        "--load {}/run --task perplexity --data {}/text --json {}/none/a", "--json {}/none/a: there is no folder",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train_bpe([FIXTURE.read_text(encoding="utf-8")], 300)


def write_data(prefix, text, tokenizer):
    """A data set of the lines of a text, and its tokenizer."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for line in [line for line in text.splitlines() if line.strip()] * 6:
            writer.add_document(np.array([*tokenizer.encode(line), tokenizer.eod]))
    Path(f"{prefix}-tokenizer.json").write_bytes(tokenizer.to_bytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    """The files that the commands read: a data set with its tokenizer, texts, examples, and what is none."""
    root = tmp_path_factory.mktemp("evaluation")
    text = FIXTURE.read_text(encoding="utf-8")
    for name in ("tokens", "other"):
        write_data(root / name, text, tokenizer)
    (root / "gone.json").write_bytes(tokenizer.to_bytes())
    (root / "text").write_text(text, encoding="utf-8")
    (root / "short").write_text("\n".join(LAST_WORDS) * 3)
    (root / "lines.jsonl").write_text(
        "".join(json.dumps({"text": row}) + "\n" for row in ["The mole", "", *LAST_WORDS])
    )
    (root / "last.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in [*LAST_WORDS, text.strip()]))
    (root / "empty").write_text("\n \n")
    (root / "one").write_text("a")
    (root / "long").write_text("the mole " + "é" * 20 + "\n")
    (root / "rows.jsonl").write_text('{"text": "a b"}\n{"words": "a b"}\n')
    return root


@pytest.fixture(scope="module")
def outcomes(pretrain, folder):
    """By name, how each command ended: trainings in one job, then evaluations of what they left in another.

    Between them the data and the tokenizer of the run ``replaced`` get another content, and those of ``bare`` are gone.
    """
    steps = ["--split", "9,1", "--train-iters", "3", "--eval-iters", "2"]
    data, other = (["--data-path", folder / name, *steps] for name in ("tokens", "other"))
    mock = ["--mock-data", "--vocab-size", "60", "--eval-iters", "0", "--train-iters", "1"]
    zeros = ["--init-method-std", "0", "--lr", "0", "--min-lr", "0"]
    two = ["--tensor-model-parallel-size", "2"]
    gpt, commands = "pretrain_gpt", {}
    commands["run"] = (gpt, 2, [*MODEL, *data, *two, "--save", folder / "run"])
    commands["zeros"] = (gpt, 2, [*MODEL, *data, *zeros, "--save", folder / "zeros"])
    commands["mock"] = (gpt, 1, [*MODEL, *mock, "--save", folder / "mock"])
    commands["bert"] = ("pretrain_bert", 1, [*MODEL, *mock, "--save", folder / "bert"])
    commands["replaced"] = (gpt, 2, [*MODEL, *other, "--save", folder / "replaced"])
    commands["bare"] = (gpt, 2, [*MODEL, *data, "--tokenizer-model", folder / "gone.json", "--save", folder / "bare"])
    done = run(pretrain, commands)
    (folder / "gone.json").unlink()
    reversed_text = FIXTURE.read_text(encoding="utf-8")[::-1]
    write_data(folder / "other", reversed_text, Tokenizer.train_bpe([reversed_text], 300))

    commands = {}

    def evaluation(name, ranks, *words_of):
        commands[name] = ("evaluate", ranks, ["--dtype", "float64", *words_of, "--json", folder / f"{name}.json"])

    load = ["--load", folder / "run", "--task"]
    for name, (ranks, tensor) in LAYOUTS.items():
        layout = ["--tensor-model-parallel-size", tensor, "--micro-batch-size", "3"]
        evaluation(f"wikitext-{name}", ranks, *load, "wikitext", "--data", folder / "text", *layout)
        last = ["--data", folder / "last.jsonl", "--predictions", folder / "predictions.jsonl"]
        evaluation(f"lambada-{name}", ranks, *load, "lambada", *last, *layout)
    short = ["--data", folder / "short", "--seq-length", "16", "--stride", "5"]
    evaluation("perplexity", 2, *load, "perplexity", *short, *two)
    evaluation("fp32", 2, *load, "perplexity", *short, "--dtype", "float32")
    evaluation("jsonl", 2, *load, "jsonl", "--data", folder / "lines.jsonl")
    evaluation("held-out", 2, *load, "held-out", "--plot", folder / "loss.png", "--verify-data")
    evaluation("bare-held-out", 2, "--load", folder / "bare", "--task", "held-out")
    named = ["--tokenizer-model", folder / "other-tokenizer.json"]
    evaluation("another-tokenizer", 2, *load, "perplexity", *short, *named)
    again = ["--load", folder / "replaced", "--save", folder / "again", "--train-iters", "4"]
    commands["again"] = (gpt, 2, [*MODEL, *other, *again])
    blank = ["--load", folder / "zeros", "--ckpt-step", "3", "--task", "wikitext", "--data", folder / "text"]
    evaluation("blank", 2, *blank, *two, "--dtype", "float32")
    for name, (line, _) in REFUSED.items():
        commands[name] = ("evaluate", 2, line.replace("{}", str(folder)).split())
    return done | run(pretrain, commands)


def run(pretrain, commands):
    """How each of the commands ended, by its name."""
    done = pretrain(*(row[1:] for row in commands.values()), command=[command for command, _, _ in commands.values()])
    return dict(zip(commands, done, strict=True))


@pytest.fixture(scope="module")
def theirs(outcomes, folder, tokenizer):
    """The run's model as transformers' GPT-2 in float64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = task_of(GPTSettings(
        num_layers=1, hidden_size=48, num_attention_heads=12, seq_length=LENGTH, vocab_size=tokenizer.vocab_size,
        make_vocab_size_divisible_by=12,
    )).model()  # fmt: skip
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=config.vocab_size, n_positions=LENGTH, n_embd=48, n_layer=1, n_head=12)
    )
    ours = load_file(folder / "run" / "iter_0000003" / "model.safetensors")
    model.load_state_dict(to_hugging_face(ours, config), strict=False)
    return model.double().eval()


def log_probabilities(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.tensor(tokens)[None]).logits[0].log_softmax(-1)


def nll(theirs, tokens, length=LENGTH, stride=LENGTH):
    """By the definition: each target by the first window that reaches it."""
    total, windows = 0.0, {}
    for target in range(1, len(tokens)):
        k = max(-(-(target - length) // stride), 0)
        if k not in windows:
            windows[k] = log_probabilities(theirs, tokens[k * stride : k * stride + length])
        total -= float(windows[k][target - 1 - k * stride, tokens[target]])
    return total


def found(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_every_command_ended_as_it_should(outcomes):
    for name, one in outcomes.items():
        assert set(one.codes) == ({2} if name in REFUSED else {0}), (name, one.err)


def test_wikitext_on_every_layout_is_transformers(outcomes, folder, theirs, tokenizer):
    text = FIXTURE.read_text(encoding="utf-8")
    tokens = tokenizer.encode(texts.detokenized_wikitext(text))
    expected = nll(theirs, tokens)
    for name in LAYOUTS:
        one = found(folder, f"wikitext-{name}")
        assert one["nll"] == pytest.approx(expected, rel=1e-9)
        assert (one["targets"], one["words"], one["stride"]) == (len(tokens) - 1, 456, 32)
        assert one["token_perplexity"] == pytest.approx(math.exp(expected / (len(tokens) - 1)), rel=1e-9)
        assert one["word_perplexity"] == pytest.approx(math.exp(expected / 456), rel=1e-9)
        assert one["lm_eval_word_perplexity"] == pytest.approx(math.exp(expected / 434), rel=1e-9)
    for tensor in (("1", "D3"), ("T2", "T2xD2")):  # the same bits at any number of replicas
        assert len({found(folder, f"wikitext-{name}")["nll"] for name in tensor}) == 1
    assert "word perplexity (paper)" in outcomes["wikitext-T2"].out[0] and not outcomes["wikitext-T2"].out[1]


def test_perplexity_of_a_file_as_it_is(outcomes, folder, theirs, tokenizer):
    tokens = tokenizer.encode("\n".join(LAST_WORDS) * 3)
    expected = nll(theirs, tokens, 16, 5)
    one, fp32 = found(folder, "perplexity"), found(folder, "fp32")
    assert one["nll"] == pytest.approx(expected, rel=1e-9) and one["targets"] == len(tokens) - 1
    assert (one["seq_length"], one["stride"], one["dtype"]) == (16, 5, "float64")
    assert fp32["dtype"] == "float32" and fp32["nll"] == pytest.approx(expected, rel=1e-5) and fp32["nll"] != one["nll"]


def test_a_model_without_an_opinion(outcomes, folder, tokenizer):
    one = found(folder, "blank")
    assert one["word_perplexity"] == pytest.approx(tokenizer.vocab_size ** (one["targets"] / 456), rel=1e-9)


def test_texts_of_their_own_and_the_held_out_documents(outcomes, folder, theirs, tokenizer):
    rows = [tokenizer.encode(row) for row in ["The mole", "", *LAST_WORDS]]
    one = found(folder, "jsonl")
    assert one["nll"] == pytest.approx(sum(nll(theirs, row) for row in rows), rel=1e-9)
    assert one["texts"] == 4 and one["targets"] == sum(max(len(row) - 1, 0) for row in rows)
    lines = [line for line in FIXTURE.read_text(encoding="utf-8").splitlines() if line.strip()] * 6
    held_out = lines[round(len(lines) * 0.9) :]
    stream = [token for line in held_out for token in [*tokenizer.encode(line), tokenizer.eod]]
    one = found(folder, "held-out")
    assert one["nll"] == pytest.approx(nll(theirs, stream), rel=1e-9) and one["targets"] == len(stream) - 1
    assert one["words"] == sum(map(texts.paper_words, held_out))
    assert (folder / "loss.png").read_bytes()[1:4] == b"PNG"
    assert re.search(r"^--verify-data: [\d,]+ bytes verified", outcomes["held-out"].err[0], re.MULTILINE)


def test_the_held_out_documents_without_the_tokenizer_have_no_words(outcomes, folder):
    one, whole = found(folder, "bare-held-out"), found(folder, "held-out")
    assert one["targets"] == whole["targets"] and one["token_perplexity"] > 1
    assert (one["words"], one["word_perplexity"], one["lm_eval_word_perplexity"]) == (None, None, None)
    said = f"no word perplexities: --tokenizer-model: {folder}/gone.json: no such file"
    assert said in outcomes["bare-held-out"].err[0] and "no word" not in outcomes["held-out"].err[0]


def test_another_tokenizer_that_was_asked_for_is_said(outcomes, folder):
    path, err = folder / "other-tokenizer.json", outcomes["another-tokenizer"].err
    said = f"--tokenizer-model {path}: has another vocabulary than the tokenizer with which the run was trained"
    assert said in err[0] and not err[1]
    assert "another vocabulary" not in outcomes["perplexity"].err[0]
    assert found(folder, "another-tokenizer")["targets"] != found(folder, "perplexity")["targets"]


def test_a_run_that_goes_on_with_replaced_data_says_so(outcomes, folder):
    said = outcomes["again"].err[0]
    assert "another tokenizer from sample 24 on" in said
    assert f"other data from sample 24 on: {folder / 'other'} 1 (not the data of that name" in said


def test_last_words_on_every_layout(outcomes, folder, theirs, tokenizer):
    text = FIXTURE.read_text(encoding="utf-8").strip()
    predictions = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    for row, passage in zip(predictions, [*LAST_WORDS, text], strict=True):
        context, word = passage[: passage.rindex(passage.split()[-1])].strip(), " " + passage.split()[-1]
        target, whole = tokenizer.encode(word), tokenizer.encode(passage)[-LENGTH - 1 :]
        tokens = [*tokenizer.encode(context), *target][-LENGTH - 1 :]
        predicted = log_probabilities(theirs, tokens[:-1]).argmax(-1).tolist()[-len(target) :]
        assert row["target"] == target and row["predicted"] == predicted and row["target_text"] == word
        assert row["strict"] == (predicted == target)
        last = int(log_probabilities(theirs, whole[:-1])[-1].argmax())
        assert (row["last_predicted"], row["last_token"]) == (last, last == whole[-1])
    for name in LAYOUTS:
        one = found(folder, f"lambada-{name}")
        assert one["examples"] == 3 and one["cut"] == 1
        assert one["strict_accuracy"] == sum(row["strict"] for row in predictions) / 3
        assert one["last_token_accuracy"] == sum(row["last_token"] for row in predictions) / 3


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_clear_error(outcomes, folder, name):
    one = outcomes[name]
    (line,) = one.err[0].splitlines()
    assert line.startswith("error: ") and REFUSED[name][1].replace("{}", str(folder)) in line
    assert one.codes == [2, 2] and one.out == ["", ""] and not one.err[1]
