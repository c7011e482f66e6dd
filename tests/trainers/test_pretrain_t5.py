"""pretrain_t5: one run at every layout and after a restart, its model in transformers and back, and its refusals."""

import json

import numpy as np
import pytest
import torch

from tests.support.training.runs import Runs, measured
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.data.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

STEPS = 12
TINY = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--kv-channels", "4", "--seq-length",
    "32", "--decoder-seq-length", "16", "--make-vocab-size-divisible-by", "64", "--micro-batch-size", "1",
    "--global-batch-size", "4", "--train-iters", str(STEPS), "--log-interval", "1", "--eval-iters", "2", "--lr", "1e-2",
    "--mock-data", "--vocab-size", "120", "--vocab-extra-ids", "20", "--sample-tokens", "4",
]  # fmt: skip
ZERO = ["--use-distributed-optimizer", "--sequence-parallel", "--tensor-model-parallel-size", "2"]
SAME = ["--deterministic"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pretrain):
    """The folder of each run by its name."""
    root = tmp_path_factory.mktemp("t5")
    commands = {
        "1": (1, TINY), "TP 2": (2, [*TINY, "--tensor-model-parallel-size", 2]), "DP 2": (2, TINY),
        "PP 2": (2, [*TINY, "--pipeline-model-parallel-size", 2]),
        "PP 2, interleaved": (
            2, [*TINY, "--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 1]
        ),
        "ZeRO-1": (4, [*TINY, *ZERO]), "TP 2, PP 2": (4, [*TINY, *ZERO, "--pipeline-model-parallel-size", 2]),
        "bf16": (2, [*TINY, *ZERO, "--bf16", "--recompute-granularity", "full"]),
        "fp16": (2, [*TINY, "--fp16", "--use-distributed-optimizer"]),
        "1, same bits": (1, [*TINY, *SAME]), "TP 2, same bits": (2, [*TINY, *SAME, *ZERO]),
        "DP 2, same bits": (2, [*TINY, *SAME, "--recompute-granularity", "full"]),
        "resumed": (2, [*TINY, "--tensor-model-parallel-size", 2, "--exit-interval", 5]),
        "resumed again": (2, [*TINY, "--pipeline-model-parallel-size", 2, "--load", root / "resumed"]),
        "1.1": (
            2, [*TINY, "--gated-gelu", "--untie-embeddings-and-output-weights", "--disable-decoder-output-scale",
                "--save-hf"],
        ),
    }  # fmt: skip
    folders = {name: root / name.removesuffix(" again") for name in commands}
    return Runs(commands, folders, pretrain, command="pretrain_t5")


@pytest.mark.parametrize(
    "layout", ["PP 2", *(
        pytest.param(one, marks=pytest.mark.long)
        for one in ("TP 2", "resumed again", "DP 2", "PP 2, interleaved", "ZeRO-1", "TP 2, PP 2")
    )],
)  # fmt: skip
def test_losses_are_those_of_one_rank(runs, rows, layout):
    expected, found = (measured(runs[name], rows) for name in ("1", layout))
    assert set(found) >= set(expected)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=2e-4), key
    first, last = expected[1, "lm_loss"], expected[STEPS, "lm_loss"]
    assert last < first - 0.3


@pytest.mark.parametrize("layout", ["TP 2, same bits", pytest.param("DP 2, same bits", marks=pytest.mark.long)])
def test_same_bits(runs, rows, layout):
    assert measured(runs[layout], rows) == measured(runs["1, same bits"], rows)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_learns(runs, rows, dtype):
    expected, found = (measured(runs[name], rows)[STEPS, "validation_loss"] for name in ("1", dtype))
    assert found == pytest.approx(expected, rel=0.03)


def test_a_run_in_transformers(runs, pretrain, tmp_path):
    """What --save-hf writes has the losses of the run, and a run that starts from it has them, too."""
    transformers = pytest.importorskip("transformers", reason="the independent peer is transformers' T5")
    folder = runs["1.1"]
    peer = transformers.T5ForConditionalGeneration.from_pretrained(folder / "iter_0000012" / "hf")
    assert peer.lm_head.weight.data_ptr() != peer.shared.weight.data_ptr()
    assert not peer.config.scale_decoder_outputs
    from mpi4py import MPI

    from commengine import Communicator, ProcessGrid
    from tplayers import generate
    from trainers.trained import load_trained

    with Communicator(MPI.COMM_SELF) as world, ProcessGrid(world) as grid:
        for place in (str(folder), f"hf:{folder}/iter_0000012/hf"):
            trained = load_trained(place, grid, kind="t5")
            tokens, shifted = torch.arange(1, 20)[None], torch.arange(0, 9)[None]
            with torch.no_grad():
                mine = trained.model(tokens, shifted)[..., :120]
                theirs = peer(input_ids=tokens, decoder_input_ids=shifted).logits
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
            (found,) = generate(trained.model, tokens, 6)
            expected = peer.generate(tokens, max_new_tokens=6, min_new_tokens=6, do_sample=False, eos_token_id=None)
            assert found == expected[0, 1:].tolist()
    words = [*TINY[6:10], *TINY[12:20], "--mock-data", "--vocab-extra-ids", "20", "--sample-tokens", "0"]
    loaded = ["--load", f"hf:{folder}/iter_0000012/hf", "--train-iters", "1", "--lr", "1e-12", "--eval-iters", "2"]
    (again,) = pretrain((1, [*words, *loaded, "--save", tmp_path / "again"]), command="pretrain_t5")
    assert set(again.codes) == {0}, again.err
    before, after = (json.loads((one / "report.json").read_text()) for one in (folder, tmp_path / "again"))
    for name in ("validation_loss", "validation_token_accuracy"):
        assert after[name] == pytest.approx(before[name], rel=1e-4), name


def test_text_with_a_tokenizer(pretrain, tmp_path):
    """Sentinels come after its vocabulary, and samples end in its end of text."""
    text = "".join(f"{number} times {number} is {number * number}. " for number in range(800))
    tokenizer = Tokenizer.train_bpe([text], 300)
    with IndexedDatasetWriter(tmp_path / "text", np.uint16) as writer:
        for part in range(20):
            writer.add_document(np.array([*tokenizer.encode(text[1000 * part : 1000 * (part + 1)]), tokenizer.eod]))
    (tmp_path / "text-tokenizer.json").write_bytes(tokenizer.to_bytes())
    words = [*TINY[: TINY.index("--mock-data")], "--data-path", tmp_path / "text", "--train-iters", 2]
    ones = ["--mean-noise-span-length", 1]
    runs = {"right": ["--vocab-extra-ids", 10, "--save-hf"], "few": ["--vocab-extra-ids", 1, *ones]}
    found = pretrain(
        *((1, [*words, *more, "--save", tmp_path / name]) for name, more in runs.items()), command="pretrain_t5"
    )
    assert found[0].codes == [0], found[0].err
    state = json.loads((tmp_path / "right" / "iter_0000002" / "state.json").read_text())
    assert state["settings"]["vocab_size"] == tokenizer.vocab_size + 10
    shown = json.loads((tmp_path / "right" / "report.json").read_text())["sample_prompt"]
    assert shown.endswith("<|endoftext|>") and "times" in shown and "<extra_id_0>" in shown
    assert found[1].codes == [2] and "the vocabulary 1 sentinels; valid: a larger" in found[1].err[0]
    _require_texts(tmp_path, pretrain)


def _require_texts(folder, pretrain):
    """`trainers.generate` of the run writes what transformers' T5 does after the same text with the same sentinels."""
    transformers = pytest.importorskip("transformers", reason="the independent peer is transformers' T5")
    exported = folder / "right" / "iter_0000002" / "hf"
    prompts = ["12 times <extra_id_0> is 144. 13 <extra_id_1> 13", "7"]
    (folder / "prompts.txt").write_text("\n".join(prompts))
    words = ["--prompts", folder / "prompts.txt", "--temperature", 0, "--max-new-tokens", 6, "--dtype", "float64"]
    refused = {
        "-i": "--interactive: needs a GPT, as a T5 does not",
        "--prompt a --pipeline-model-parallel-size 2": "--pipeline-model-parallel-size 2: a T5 writes text in",
    }
    outcomes = pretrain(
        (2, ["--load", folder / "right", *words, "--tensor-model-parallel-size", 2, "--json", folder / "texts.json"]),
        (2, ["--load", f"hf:{exported}", *words, "--micro-batch-size", 1]),
        *((2, ["--load", folder / "right", "--tensor-model-parallel-size", 1 + ("-i" in one), *one.split()])
          for one in refused),
        command="generate",
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    peer = transformers.T5ForConditionalGeneration.from_pretrained(exported).double()
    written = json.loads((folder / "texts.json").read_text())["texts"]
    for prompt, text in zip(prompts, written, strict=True):
        ids = [*tokenizer(prompt)["input_ids"], tokenizer.eos_token_id]
        assert ("<extra_id_0>" in prompt) == (tokenizer.convert_tokens_to_ids("<extra_id_0>") in ids)
        expected = peer.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, 1:].tolist()
        assert text["tokens"] == expected
        assert text["text"] == tokenizer.decode([one for one in expected if one != tokenizer.eos_token_id])
    for outcome in outcomes[:2]:
        assert set(outcome.codes) == {0}, outcome.err
        assert outcome.out[0] == "\n".join(f"{text['text']}\n" for text in written)
    for outcome, said in zip(outcomes[2:], refused.values(), strict=True):
        assert set(outcome.codes) == {2} and said in outcome.err[0] and outcome.err[1] == "", outcome.err


REFUSED = {
    "--context-parallel-size 2": "--context-parallel-size 2: a T5 has none; leave it out",
    "--num-experts 4": "--num-experts",
    "--dry-run": "--dry-run: there are no formulas of a T5 yet",
    "--deterministic --pipeline-model-parallel-size 2": "--pipeline-model-parallel-size 2: excludes --deterministic",
    "--sequence-parallel --tensor-model-parallel-size 2 --decoder-seq-length 15": "--decoder-seq-length 15: must be a",
    "--vocab-size 20": "--vocab-size 20: has no token besides its --vocab-extra-ids 20 sentinels",
    "--max-position-embeddings 64": "--max-position-embeddings 64: a T5 has none",
    "--decoder-seq-length 2": "too short for two tokens of text, a sentinel and the end",
    "--vocab-extra-ids 1 --mean-noise-span-length 1": "the vocabulary 1 sentinels; valid: a larger --vocab-extra-ids",
    "--relative-attention-num-buckets 9": "--relative-attention-num-buckets 9: must be even",
    "--relative-attention-max-distance 16": "must be above half of --relative-attention-num-buckets 32",
}


def test_refusals(pretrain, tmp_path):
    commands = [(2, [*TINY, *words.split(), "--save", tmp_path / "run"]) for words in REFUSED]
    for outcome, said in zip(pretrain(*commands, command="pretrain_t5"), REFUSED.values(), strict=True):
        assert set(outcome.codes) == {2} and said in outcome.err[0] and outcome.err[1] == "", outcome.err
    assert not (tmp_path / "run").exists()


def test_accuracy_and_exact_match():
    """Against the tokens that greedy decoding writes."""
    from mpi4py import MPI

    from commengine import Communicator
    from tplayers import T5, T5Config, generate, initialize
    from trainers.tasks.t5 import RightSpans, SpanMicrobatch

    config = T5Config(1, 16, 2, 12, kv_channels=8, hidden_dropout=0.0, attention_dropout=0.0)
    with Communicator(MPI.COMM_SELF) as comm:
        model = T5(config, comm)
        initialize(model, 1)
        model.eval()
        tokens = torch.randint(2, 12, (6, 5), generator=torch.Generator().manual_seed(1))
        labels = torch.tensor(generate(model, tokens, 4))  # what it writes is right, but for what follows
        labels[1, 3] = (labels[1, 3] + 1) % 12
        labels[4, 0] = (labels[4, 0] + 1) % 12
        labels[2:4, 3] = -100
        shifted = torch.nn.functional.pad(labels[:, :-1], (1, 0)).clamp(min=0)
        batch = SpanMicrobatch(tokens, None, shifted, labels, tuple(range(6)), 12)
        with torch.no_grad():
            right, whole = RightSpans()(model, batch, None)
    assert right.sum(1).tolist()[:4] == [4, 3, 3, 3] and right[4, 0] == 0 and right[5].sum() == 4
    assert whole.sum(1).tolist() == [4, 0, 3, 3, 0, 4]
