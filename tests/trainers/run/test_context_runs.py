"""Whole runs with ``--context-parallel-size``: losses, evaluations and checkpoints are those of one rank."""

import json

import pytest
import torch

from tests.support.training.runs import measured, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZES = [
    "--seq-length", "32", "--eval-iters", "2", "--eval-interval", "2", "--train-iters", "4", "--save-interval", "2",
]  # fmt: skip
LLAMA = [
    "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--group-query-attention",
    "--num-query-groups", "2", "--disable-bias-linear", "--untie-embeddings-and-output-weights",
]  # fmt: skip
WAYS = ("a2a", "p2p", "all_gather")


@pytest.mark.parametrize("kind", ["gpt", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("llama", "bert"))])
def test_a_run_is_that_of_one_rank(pretrain, mock, rows, tmp_path, kind):
    command = "pretrain_bert" if kind == "bert" else "pretrain_gpt"
    words = [*mock, *SIZES, *(LLAMA if kind == "llama" else [])]
    sample = words.index("--sample-tokens")
    words[sample : sample + 2] = [] if kind == "bert" else ["--sample-tokens", "4"]

    def run(name, ranks, *more):
        return (ranks, [*words, "--save", str(tmp_path / name), *more])

    def shared(way):
        return ["--context-parallel-size", "2", "--cp-comm-type", way]

    runs = [run("one", 1), *(run(way, 2, *shared(way)) for way in WAYS)]
    outcomes = pretrain(*runs, command=command)
    assert [outcome.codes for outcome in outcomes] == [[0], *[[0, 0]] * 3], outcomes
    truth = measured(tmp_path / "one", rows)
    assert len(truth) > 8
    for way, outcome in zip(WAYS, outcomes[1:], strict=True):
        assert measured(tmp_path / way, rows) == pytest.approx(truth, rel=1e-5), way
        assert "tensor 1 x data 1 x context 2" in outcome.out[0]
        report = json.loads((tmp_path / way / "report.json").read_text())
        assert (report["context_parallel_size"], report["data_parallel_size"]) == (2, 1)
        for key in ("masked_accuracy", "sop_accuracy") if kind == "bert" else ():
            assert report[key] == json.loads((tmp_path / "one" / "report.json").read_text())[key]
        torch.testing.assert_close(weights(tmp_path / way, 4), weights(tmp_path / "one", 4), rtol=1e-3, atol=1e-5)
    # From a context group to one rank, to another method, and from one rank to a group.
    first = str(sorted((tmp_path / "p2p").glob("iter_*"))[0])
    alone = str(sorted((tmp_path / "one").glob("iter_*"))[0])
    resumed = pretrain(
        run("to-one", 1, "--load", first), run("to-other", 2, *shared("a2a"), "--load", first),
        run("from-one", 2, *shared("p2p"), "--load", alone), command=command,
    )  # fmt: skip
    assert [outcome.codes for outcome in resumed] == [[0], [0, 0], [0, 0]], resumed
    later = {key: value for key, value in truth.items() if key[0] > 2}
    for name in ("to-one", "to-other", "from-one"):
        assert measured(tmp_path / name, rows) == pytest.approx(later, rel=1e-5), name


@pytest.mark.parametrize("kind", [pytest.param("gpt", marks=pytest.mark.long), "bert"])
def test_a_deterministic_run_has_the_bits_and_the_text_of_one_rank(pretrain, mock, rows, tmp_path, kind):
    """Its evaluations and its text go through the same layers, in lengths that the parts do not divide."""
    command = "pretrain_bert" if kind == "bert" else "pretrain_gpt"
    words = [*mock, *SIZES, "--deterministic"]
    sample = words.index("--sample-tokens")
    words[sample : sample + 2] = [] if kind == "bert" else ["--sample-tokens", "4"]
    runs = [
        (1, [*words, "--deterministic-parts", "2", "--save", str(tmp_path / "one")]),
        (2, [*words, "--context-parallel-size", "2", "--save", str(tmp_path / "two")]),
    ]
    outcomes = pretrain(*runs, command=command)
    assert [outcome.codes for outcome in outcomes] == [[0], [0, 0]], outcomes
    digests = [
        [
            [row[name] for name in ("loss_digest", "norm_digest", "weights_digest")]
            for row in rows(tmp_path / name, "weights_digest")
        ]
        for name in ("one", "two")
    ]
    assert digests[0] == digests[1] and len(digests[0]) == 4
    one, two = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two"))
    assert one["sample"] == two["sample"] != ""
    assert one["validation_loss"] == pytest.approx(two["validation_loss"], rel=1e-12)


def test_bad_sizes_end_with_one_line(pretrain, mock):
    bad = ["--context-parallel-size", "2", "--seq-length", "33"]
    (outcome,) = pretrain((2, [*mock, *bad, "--train-iters", "1"]))
    assert outcome.codes == [2, 2]
    said = "".join(outcome.err)
    assert said.count("\n") == 1 and "--seq-length 33: must be a multiple of 2 with --context-parallel-size 2" in said
