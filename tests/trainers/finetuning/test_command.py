"""finetune: what it learns of each task, at every layout, after a restart; predictions, seeds, ensembles, refusals."""

import json
import re
import shutil
import statistics

import pytest
import torch
from safetensors.torch import load_file

from tests.support.finetuning import toy_tasks
from tests.support.training.runs import has_long_tests
from trainers.checkpoints import pointer

pytestmark = pytest.mark.slow

#: a batch of 8 with which each toy is learnt in some dozens of steps
TOY = [
    "--micro-batch-size", 4, "--global-batch-size", 8, "--lr", "2e-3", "--seq-length", 32, "--max-query-length", 8,
    "--doc-stride", 8, "--hidden-dropout", 0, "--attention-dropout", 0, "--log-interval", 1,
]  # fmt: skip
TENSOR = ["--tensor-model-parallel-size", 2]
WHOLE = ["--micro-batch-size", 8]  # a batch at once, on one rank
#: of each toy: ranks, and flags besides TOY
TOYS = {
    "mnli": (1, ["--task", "mnli", "--epochs", 3, *WHOLE]),
    "qqp": (2, ["--task", "qqp", "--epochs", 1, "--bf16", "--use-distributed-optimizer"]),
    "race": (2, ["--task", "race", "--epochs", 1, *TENSOR, "--sequence-parallel", "--recompute-granularity", "full"]),
    "squad": (2, ["--task", "squad", "--epochs", 2]),
    "squad2": (1, ["--task", "squad", "--epochs", 2, *WHOLE, "--fp16", "--initial-loss-scale", 1024]),
}
#: with dropout, and few steps
DROPPED = ["--task", "mnli", "--hidden-dropout", 0.2, "--attention-dropout", 0.2, "--train-iters", 5, "--eval-iters", 0]
LAYOUTS = {"1-1": (1, []), "2-1": (2, TENSOR), "1-2": (2, [])}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    found = tmp_path_factory.mktemp("finetune")
    toy_tasks.vocabulary(found / "vocab.txt")
    (found / "data").mkdir()
    for name, make in toy_tasks.MAKERS.items():
        make(found / "data" / name)
    toy_tasks.squad(found / "data" / "squad2", "2.0")
    return found


def predicting(root, name, run, *more):
    """The arguments of predictions for the dev data of a toy."""
    return ["--load", run, "--data", root / "data" / name, "--predict", "dev", "--micro-batch-size", 4, *more]


def predicted(root, ranks):
    """The folder of the predictions on so many data ranks."""
    return root / f"predicted {ranks}"


#: the commands of tests that only make test-long runs
LONG = (
    "no pooler", "new pooler", "qqp", "squad", "squad2", "from transformers", "predict squad2", "predict race middle",
    "without a folder", "seeds", "seeds again", "ensemble",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(root, pretrain, tiny, request):
    """How each command ended, by its name. A run is in the folder of its name in ``root``."""
    vocab = ["--tokenizer-model", root / "vocab.txt"]

    def start(name, *more):
        return ["--load", root / "bert", "--data", root / "data" / name, *vocab, *TOY, *more]

    def predict(name, *more):
        return predicting(root, name, *more)

    gpt = [*tiny, "--mock-data", "--vocab-size", 100, "--train-iters", 1]
    commands = {
        # First a run of both ranks, which then import at once what torch imports for the first optimizer (a second).
        "gpt": (2, [*gpt, "--save", root / "gpt"], "pretrain_gpt"),
        "bert": (1, toy_tasks.pretraining(root / "vocab.txt", root / "bert"), "pretrain_bert"),
    }
    bare = toy_tasks.pretraining(root / "vocab.txt", root / "no pooler")
    commands["no pooler"] = (1, [*bare, "--bert-no-binary-head", "--norm-placement", "post"], "pretrain_bert")
    begun = [root / "no pooler" if word == root / "bert" else word for word in start("qqp", "--task", "qqp")]
    commands["new pooler"] = (2, [*begun, *TENSOR, "--train-iters", 2, "--eval-iters", 0, "--save", root / "pooled"])
    for name, (ranks, flags) in TOYS.items():
        commands[name] = (ranks, start(name, *flags, "--save", root / name))
    stopped = start("race", *TOYS["race"][1], "--save", root / "stopped")
    commands["stopped"] = (2, [*stopped, "--exit-interval", 10])
    again = [root / "stopped" if word == root / "bert" else word for word in stopped]
    commands["resumed"] = (2, again)
    for name, (ranks, flags) in LAYOUTS.items():
        commands[name] = (ranks, start("mnli", *DROPPED, *flags, "--micro-batch-size", 2, "--save", root / name))
    folder = f"hf:{root / 'bert' / 'iter_0000001' / 'hf'}"
    words = start("mnli", *DROPPED, "--micro-batch-size", 2, "--save", root / "from transformers")
    words = [folder if word == root / "bert" else word for word in words]
    commands["from transformers"] = (1, words)
    commands["early"] = (1, start("mnli", "--task", "mnli", "--train-iters", 5, "--save", root / "early"))
    for ranks in (1, 2):
        commands[f"predict {ranks}"] = (ranks, predict("mnli", root / "early", "--output", predicted(root, ranks)))
    commands["predict squad2"] = (2, predict("squad2", root / "squad2", *TENSOR))
    moved = shutil.copy(root / "vocab.txt", root / "moved.txt")
    commands["predict race test"] = (
        2,
        [*predict("race", root / "race"), "--predict", "test", "--tokenizer-model", moved],
    )
    part = toy_tasks.race(root / "data" / "race middle", 4)
    for split in ("train", "dev", "test"):
        shutil.rmtree(part / split / "high")
    words = ["--race-level", "middle", "--output", root / "race middle"]
    commands["predict race middle"] = (1, predict("race middle", root / "race", *words))
    commands["without a folder"] = (1, start("mnli", "--task", "mnli", "--train-iters", 2))
    seeds = ["--task", "squad", "--train-iters", 12, "--eval-interval", 6, "--seeds", 3, "--save", root / "seeds"]
    new = ["--pretrained-checkpoint" if word == "--load" else word for word in start("squad", *seeds)]
    commands["seeds"] = (2, [*new, "--load", root / "seeds", "--predict", "dev"])
    commands["seeds again"] = commands["seeds"]
    members = sorted(root / "seeds" / f"seed_{1234 + n}" for n in range(3))
    together = ["--ensemble", *members, "--data", root / "data" / "squad", "--predict", "dev"]
    commands["ensemble"] = (2, [*together, "--output", root / "together", *TENSOR])
    for name, (given, _) in REFUSED.items():
        commands[f"refused: {name}"] = (2, [word.format(root=root) for word in given])
    left = [*MNLI, "--load", "{root}/bert", *VOCAB, "--save", "{root}/stopped seeds", "--seeds", "2", *SHORT]
    left = [word.format(root=root) for word in left]
    commands["stopped seeds"] = (1, left, "finetune", [["step", 3, 0, "TERM"]])
    left = [word.replace("stopped seeds", "left seeds") for word in left]
    commands["left seeds"] = (1, left, "finetune", [["step", 1, 0, "TERM"]])
    damaged(root)
    if not has_long_tests(request):
        missing = {f"refused: {name}" for name, (given, _) in REFUSED.items() if "{root}/squad2" in given}
        commands = {name: command for name, command in commands.items() if name not in {*LONG, *missing}}
    listed = [(ranks, words, *more[1:]) for ranks, words, *more in commands.values()]
    kinds = [more[0] if more else "finetune" for _, _, *more in commands.values()]
    found = dict(zip(commands, pretrain(*listed, command=kinds), strict=True))
    for name, outcome in found.items():
        if not name.startswith("refused: ") and name not in ("stopped seeds", "left seeds"):
            assert set(outcome.codes) == {75 if name == "stopped" else 0}, (name, outcome.err)
    return found


def report(root, name):
    return json.loads((root / name / "report.json").read_text())


# What it learns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name if name not in LONG else pytest.param(name, marks=pytest.mark.long) for name in TOYS]
)
def test_a_toy_of_each_task_is_learnt(outcomes, root, rows, name):
    found = report(root, name)
    measure, whole = ("f1", 100) if "squad" in name else ("accuracy", 1)
    assert found[f"kept_{measure}"] >= 0.95 * whole
    evaluations = rows(root / name, f"validation_{measure}")
    assert evaluations and evaluations[-1][f"validation_{measure}"] == found[measure]
    kept = max(evaluations, key=lambda row: (row[f"validation_{measure}"], -row["iteration"]))
    assert (found[f"kept_{measure}"], found["kept_iteration"]) == (kept[f"validation_{measure}"], kept["iteration"])
    best, _ = (root / name / "best").read_text().splitlines()
    assert best == f"iter_{kept['iteration']:07d}" and (root / name / best / "model.safetensors").is_file()
    first = rows(root / name, "label_loss")[0]["label_loss"]
    assert found["validation_loss"] < first / 2
    assert f"kept {measure}" in (root / name / "report.txt").read_text()


@pytest.mark.long
def test_measures_of_parts(outcomes, root, rows):
    (mnli, *_), (race, *_) = (rows(root / name, "validation_accuracy") for name in ("mnli", "race"))
    assert {"validation_accuracy/matched", "validation_loss/mismatched"} <= set(mnli)
    assert {"validation_accuracy/middle", "validation_accuracy/high"} <= set(race)
    (squad, *_) = rows(root / "squad2", "validation_f1")
    assert {"validation_threshold", "validation_best_exact", "validation_no_answer_f1"} <= set(squad)


def test_the_encoder_begins_with_the_pretrained_values(outcomes, root):
    """After one step of rate 0 (warm-up) nothing but the head is new, at any precision."""
    before, after = (load_file(next((root / name).glob("iter_*")) / "model.safetensors") for name in ("bert", "1-1"))
    shared = [name for name in after if name in before]
    assert {"embedding.weight", "layers.1.mlp.up.weight", "pooler.weight"} <= set(shared)
    assert {name.split(".")[0] for name in set(after) - set(shared)} == {"classifier"}
    assert all((after[name] - before[name]).abs().max() < 0.01 for name in shared)  # 5 steps of at most 1e-3


@pytest.mark.long
def test_a_bert_of_transformers_is_tuned_alike_and_handed_back(outcomes, root):
    """The run of its folder hf has the same parameters; their folders are models of the task's classes."""
    transformers = pytest.importorskip("transformers")
    one, other = (
        load_file(root / name / "iter_0000005" / "model.safetensors") for name in ("1-1", "from transformers")
    )
    assert one.keys() == other.keys()
    tokens = len(toy_tasks.SPECIAL) + len(toy_tasks.WORDS)
    for name, values in one.items():
        rows = tokens if name == "embedding.weight" else len(values)  # padding is random there, and 0 here
        assert torch.equal(values[:rows], other[name][:rows]), name
    assert not other["embedding.weight"][tokens:].any()
    kinds = {"1-1": "SequenceClassification", "race": "MultipleChoice", "squad": "QuestionAnswering"}
    for name, kind in kinds.items():
        (folder,) = (root / name).glob("iter_*/hf")
        found, told = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder, output_loading_info=True)
        assert not any(told.values()) and type(found).__name__ == f"MegatronBertFor{kind}"
    assert json.loads(next((root / "1-1").glob("*/hf/config.json")).read_text())["label2id"]["neutral"] == 2


@pytest.mark.long
def test_a_pooler_that_the_pretrained_model_lacks_is_new_and_said(outcomes, root):
    said = outcomes["new pooler"].err
    assert "no pooler: has no pooler (--bert-no-binary-head), so the one" in said[0] and said[1] == ""
    found = load_file(root / "pooled" / "iter_0000002" / "model.safetensors")
    assert found["pooler.weight"].std() > 0.01 and "embedding_norm.weight" in found


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "1-1"])
def test_losses_are_those_of_one_rank(outcomes, root, rows, name):
    for key in ("label_loss", "grad_norm"):
        one, other = ([row[key] for row in rows(root / folder, key)] for folder in ("1-1", name))
        assert len(one) == 5 and one == pytest.approx(other, abs=1e-4)


def test_a_resumed_run_goes_on_bit_for_bit(outcomes, root, rows):
    """It was stopped within an epoch, where it evaluated once more."""
    for key in ("label_loss", "grad_norm", "learning_rate", "validation_accuracy"):
        one, other = ({row["iteration"]: row[key] for row in rows(root / run, key)} for run in ("race", "stopped"))
        assert max(one) == 23 and one == {step: value for step, value in other.items() if step in one}
        assert set(other) - set(one) == ({10} if key == "validation_accuracy" else set())
    at_stop = {run: [row["iteration"] for row in rows(root / run, "at_stop")] for run in ("race", "stopped")}
    assert at_stop == {"race": [], "stopped": [10]}
    race, stopped = (load_file(root / run / "iter_0000023" / "model.safetensors") for run in ("race", "stopped"))
    assert race.keys() == stopped.keys() and all(torch.equal(race[name], stopped[name]) for name in race)


def test_an_evaluation_at_a_stop_is_never_the_best(outcomes, root):
    """Otherwise the kept checkpoint would depend on where a run stopped. Nothing is kept before the first one due."""
    said = outcomes["stopped"]
    assert re.search(r"iteration 10: .* accuracy [01]\.[0-9]+ \(at a stop, so it is not compared", said.err[0])
    assert "the best so far" not in said.err[0] and "kept" not in said.out[0]
    assert [report(root, run)["kept_iteration"] for run in ("race", "stopped")] == [23, 23]
    assert (root / "race" / "best").read_text() == (root / "stopped" / "best").read_text()


def test_a_run_that_goes_back_behind_its_best_checkpoint_marks_the_best_one_that_is_left(outcomes, root, pretrain):
    folder = root / "back"
    words = [*MNLI, *VOCAB, "--train-iters", "8", "--eval-interval", "4", "--save-interval", "4", "--keep-last", "9"]
    words = [word.format(root=root) for word in [*words, "--save", str(folder)]]
    (ran,) = pretrain((1, [*words, "--load", root / "bert"]), command="finetune")
    assert ran.codes == [0], ran.err
    for file in ("latest", "best"):  # as after a better evaluation at 8
        pointer.point_to(folder, "iter_0000008", file)
    back = [*words, "--load", folder / "iter_0000004", "--overwrite", "--exit-interval", "5"]
    (went,) = pretrain((1, back), command="finetune")
    assert went.codes == [75], went.err
    assert pointer.best(folder).name == "iter_0000004" and report(root, "back")["kept_iteration"] == 4
    assert not (folder / "iter_0000008").exists()


@pytest.mark.long
def test_a_run_without_a_folder_says_that_it_keeps_nothing(outcomes):
    found = outcomes["without a folder"]
    assert found.err[0].count("without --save DIR no checkpoint is kept") == 1
    assert "accuracy " in found.out[0] and "kept" not in found.out[0]
    assert "no checkpoint is kept" not in outcomes["early"].err[0]


# Predictions ------------------------------------------------------------------------------------------------------


def test_accuracy_over_51_samples_is_the_same_at_every_number_of_data_ranks(outcomes, root):
    """The model is neither right nor wrong everywhere, and no sample is left out or counted twice."""
    found = [json.loads((predicted(root, ranks) / "measures.json").read_text()) for ranks in (1, 2)]
    assert found[1] == found[0]
    assert 0.2 < found[0]["accuracy/matched"] < 0.95
    right = round(found[0]["accuracy/matched"] * 51)
    assert found[0]["accuracy/matched"] == right / 51
    texts = [(predicted(root, ranks) / "MNLI-m.tsv").read_text() for ranks in (1, 2)]
    assert texts[0] == texts[1]
    said = [line.split("\t")[1] for line in texts[0].splitlines()[1:]]
    gold = [line.split("\t")[-1] for line in (root / "data/mnli/dev_matched.tsv").read_text().splitlines()[1:]]
    assert len(said) == 51 and sum(a == b for a, b in zip(said, gold, strict=True)) == right


@pytest.mark.long
def test_accuracy_is_the_same_on_three_and_four_data_ranks(outcomes, root, pretrain):
    """A job of four ranks costs twice one of two."""
    words = {ranks: predicting(root, "mnli", root / "early", "--output", predicted(root, ranks)) for ranks in (3, 4)}
    for outcome in pretrain(*words.items(), command="finetune"):
        assert not any(outcome.codes), outcome.err
    for name in ("measures.json", "MNLI-m.tsv", "MNLI-mm.tsv"):
        assert len({(predicted(root, ranks) / name).read_text() for ranks in (1, 3, 4)}) == 1


@pytest.mark.long
def test_predictions_of_squad(outcomes, root):
    """At another layout than the training's, with the threshold of the best checkpoint."""
    folder = root / "squad2" / "predictions_dev"
    texts = json.loads((folder / "predictions.json").read_text())
    file = json.loads((root / "data/squad2/dev-v2.0.json").read_text())
    questions = [one for part in file["data"][0]["paragraphs"] for one in part["qas"]]
    right = [texts[one["id"]] == (one["answers"][0]["text"] if one["answers"] else "") for one in questions]
    assert sum(right) >= 0.95 * len(right) and len(texts) == len(questions) == 40
    assert json.loads((folder / "measures.json").read_text())["exact_match"] == 100 * sum(right) / 40


def test_predictions_of_a_test_split(outcomes, root):
    answers = json.loads((root / "race" / "predictions_test" / "RACE.json").read_text())
    gold = {
        f"{level}/{path.name}": json.loads(path.read_text())["answers"]
        for level in ("middle", "high")
        for path in (root / "data" / "race" / "test" / level).glob("*.txt")
    }
    assert answers.keys() == gold.keys()
    pairs = [(a, b) for name in gold for a, b in zip(answers[name], gold[name], strict=True)]
    assert sum(a == b for a, b in pairs) >= 0.95 * len(pairs)


@pytest.mark.long
def test_predictions_of_one_level_by_a_run_of_both(outcomes, root):
    answers = json.loads((root / "race middle" / "RACE.json").read_text())
    assert answers and all(name.startswith("middle/") for name in answers)
    assert json.loads((root / "race middle" / "measures.json").read_text()).keys() == {"accuracy"}


@pytest.mark.long
def test_seeds(outcomes, root):
    """Three runs, their median, its predictions; the same command again trains nothing and says the same."""
    found = json.loads((root / "seeds" / "seeds.json").read_text())
    assert list(found["runs"]) == ["seed_1234", "seed_1235", "seed_1236"]
    values = [run["f1"] for run in found["runs"].values()]
    assert found["median"] == statistics.median(values) == found["runs"][found["median_run"]]["f1"]
    assert len({run["loss"] for run in found["runs"].values()}) == 3
    assert (root / "seeds" / found["median_run"] / "predictions_dev" / "predictions.json").is_file()
    first, again = outcomes["seeds"].out[0], outcomes["seeds again"].out[0]
    assert first.count("parameters, tensor 1 x data 2") == 3 and "parameters" not in again
    assert again.count("nothing to train") == 3 and f"({found['median_run']})" in again
    assert outcomes["seeds"].out[1] == ""


@pytest.mark.long
def test_an_ensemble(outcomes, root):
    measures = json.loads((root / "together" / "measures.json").read_text())
    found = json.loads((root / "seeds" / "seeds.json").read_text())
    assert measures["f1"] >= min(run["f1"] for run in found["runs"].values())
    assert "an ensemble of 3 runs" in outcomes["ensemble"].out[0]
    assert len(json.loads((root / "together" / "predictions.json").read_text())) == 40


# Bad input --------------------------------------------------------------------------------------------------------

VOCAB = ["--tokenizer-model", "{root}/vocab.txt"]
PREDICT = ["--predict", "dev"]
SHORT = ["--train-iters", "3", "--eval-iters", "0", "--micro-batch-size", "4", "--seq-length", "16"]
MNLI = ["--task", "mnli", "--data", "{root}/data/mnli"]
REFUSED = {
    "no task": (["--load", "{root}/bert", "--data", "{root}/data/mnli"], ["--task: needed: one of mnli, qqp"]),
    "no data": (["--task", "mnli", "--load", "{root}/bert"], ["--data: needed"]),
    "no folder of data": (["--task", "mnli", "--load", "{root}/bert", "--data", "{root}/no"], ["--data .*/no: there"]),
    "no model": (MNLI, ["--load: needed: a run of pretrain_bert"]),
    "an empty folder": ([*MNLI, "--load", "{root}/data"], ["--load .*/data: holds no checkpoint"]),
    "a GPT": ([*MNLI, "--load", "{root}/gpt", *VOCAB], ["--load .*/gpt/iter_.*: holds a GPT, and a BERT is needed"]),
    "a new run without a model": (
        [*MNLI, "--load", "{root}/none", "--save", "{root}/none"], ["--pretrained-checkpoint: needed"],
    ),
    "two models": (
        [*MNLI, "--load", "{root}/bert", "--pretrained-checkpoint", "{root}/bert"], ["both name a model"],
    ),
    "no tokenizer": ([*MNLI, "--load", "{root}/bert"], ["--tokenizer-model: needed"]),
    "a larger vocabulary": (
        [*MNLI, "--load", "{root}/bert", "--tokenizer-model", "{root}/large.txt"],
        ["has 53 tokens, and the model only 51"],
    ),
    "a vocabulary without [CLS]": (
        [*MNLI, "--load", "{root}/bert", "--tokenizer-model", "{root}/bare.txt"], [r"no \[PAD\].*BERT needs"],
    ),
    "longer than the model": (
        [*MNLI, "--load", "{root}/bert", *VOCAB, "--seq-length", "64"], ["--seq-length 64: must not exceed the 48"],
    ),
    "another shape": (
        [*MNLI, "--load", "{root}/bert", *VOCAB, "--hidden-size", "32"],
        ["--hidden-size 32: the model of --load .* has 64"],
    ),
    "a preset of another model": (
        [*MNLI, "--load", "{root}/bert", *VOCAB, "--preset", "bert-336m"], ["--num-layers 24.* has 2"],
    ),
    "a preset of a GPT": ([*MNLI, "--load", "{root}/bert", "--preset", "gpt-355m"], ["is a model of pretrain_gpt"]),
    "no dev data": (
        ["--task", "qqp", "--data", "{root}/untested", "--load", "{root}/bert", *VOCAB],
        ["dev.tsv: there is no such file .--eval-iters 0 trains without dev data"],
    ),
    "a threshold that is no number": (
        ["--data", "{root}/data/squad2", "--load", "{root}/squad2", "--null-score-diff-threshold", "nan", *PREDICT],
        ["--null-score-diff-threshold nan: must be a finite number"],
    ),
    "an empty file": (
        ["--task", "mnli", "--data", "{root}/empty", "--load", "{root}/bert", *VOCAB], ["empty/train.tsv: is empty"],
    ),
    "a row without a field": (
        ["--task", "qqp", "--data", "{root}/short", "--load", "{root}/bert", *VOCAB], ["line 242: has 3 columns"],
    ),
    "an article without a field": (
        ["--task", "race", "--data", "{root}/lacking", "--load", "{root}/bert", *VOCAB], ["0.txt: options is missing"],
    ),
    "two versions": (
        ["--task", "squad", "--data", "{root}/both", "--load", "{root}/bert", *VOCAB, "--max-query-length", "8"],
        ["versions 1.1 and 2.0; say which with --squad-version"],
    ),
    "no room for a text": (
        ["--task", "squad", "--data", "{root}/data/squad", "--load", "{root}/bert", *VOCAB], ["must leave room"],
    ),
    "files of another task": (
        ["--task", "squad", "--data", "{root}/data/qqp", "--load", "{root}/bert", *VOCAB], ["has no train-v1.1.json"],
    ),
    "predictions of a pretrained model": (
        [*MNLI, "--load", "{root}/bert", "--predict", "dev"], ["is no run of finetune, so it has learnt no task"],
    ),
    "predictions of nothing": (
        [*MNLI, "--pretrained-checkpoint", "{root}/bert", "--predict", "dev"], ["--predict: needs --load RUN"],
    ),
    "predictions of another task": (
        [*MNLI, "--load", "{root}/race", "--predict", "dev"], ["--task mnli: the run of --load .* has race"],
    ),
    "an ensemble of one": (["--data", "{root}/data/race", "--ensemble", "{root}/race"], ["needs at least two runs"]),
    "an ensemble of two tasks": (
        ["--data", "{root}/data/race", "--ensemble", "{root}/race", "{root}/mnli"],
        ["--ensemble .*/mnli: has --task mnli, another one --task race"],
    ),
    "an ensemble without a place for its predictions": (
        ["--data", "{root}/data/race", "--ensemble", "{root}/race", "{root}/race", "--predict", "dev"],
        ["needs --output"],
    ),
    "seeds without a folder": (
        [*MNLI, "--load", "{root}/bert", *VOCAB, "--seeds", "5"], ["--seeds: needs --save DIR"],
    ),
    "seeds that go on with one run": (
        ["--task", "race", "--data", "{root}/data/race", "--load", "{root}/race", "--save", "{root}/n", "--seeds", "2"],
        ["race: is one run; with --seeds, --load is the folder of all .*, and --pretrained-checkpoint the run of"],
    ),
    "a level that is not there": (
        ["--data", "{root}/data/race middle", "--load", "{root}/race", *PREDICT],
        [r"dev/high: there is no \*.txt file; .* \(--race-level middle leaves this level out\)"],
    ),
    "another level": (
        ["--task", "race", "--data", "{root}/data/race", "--load", "{root}/race", "--save", "{root}/race",
         "--race-level", "middle"],
        ["--race-level middle: the run of --load .*race has both"],
    ),
    "a folder that holds a run": (
        [*MNLI, "--load", "{root}/bert", *VOCAB, "--save", "{root}/race"], ["holds a run already"],
    ),
    "a run of another task": (
        ["--task", "qqp", "--data", "{root}/data/qqp", "--load", "{root}/race", "--save", "{root}/race"],
        ["--task qqp: the run of --load .* has race"],
    ),
}  # fmt: skip


def damaged(root):
    """Make the files of the commands that must be refused."""
    (root / "large.txt").write_text((root / "vocab.txt").read_text() + "more\nwords\n")
    (root / "bare.txt").write_text("\n".join(toy_tasks.WORDS) + "\n")
    (root / "empty").mkdir()
    (root / "empty" / "train.tsv").write_text("")
    (toy_tasks.qqp(root / "untested") / "dev.tsv").unlink()
    short = toy_tasks.qqp(root / "short") / "train.tsv"
    short.write_text(short.read_text() + "1\t2\tWho?\n")
    path = toy_tasks.race(root / "lacking", 4) / "train" / "high" / "0.txt"
    path.write_text(json.dumps({"article": "A.", "questions": ["Who?"], "answers": ["A"]}))
    for version in ("1.1", "2.0"):
        toy_tasks.squad(root / "both", version)


def test_a_stop_in_the_last_step_of_a_seed_begins_no_other_one(outcomes, root):
    """The first run ends as usual, with its report; the command tells that something is left."""
    assert outcomes["stopped seeds"].codes == [75]
    said = outcomes["stopped seeds"].err[0]
    options = "--load {}/{} --pretrained-checkpoint {}/bert (exit status 75)"
    assert "came in the last step" in said
    assert f"1 of 2 runs are done; go on with {options.format(root, 'stopped seeds', root)}" in said
    assert [path.name for path in (root / "stopped seeds").iterdir()] == ["seed_1234"]
    assert report(root, "stopped seeds/seed_1234")["iteration"] == 3


def test_a_stop_of_a_seed_says_how_all_go_on(outcomes, root):
    assert outcomes["left seeds"].codes == [75]
    options = f"go on with --load {root}/left seeds --pretrained-checkpoint {root}/bert (exit status 75)"
    assert f"stopped by SIGTERM after step 1 of 3; the checkpoint is saved, {options}" in outcomes["left seeds"].err[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if "{root}/squad2" in given else [])
        for name, (given, _) in REFUSED.items()
    ],
)
def test_refused_with_one_line_on_rank_zero(outcomes, name):
    """All of them run on two ranks."""
    outcome, patterns = outcomes[f"refused: {name}"], REFUSED[name][1]
    assert outcome.codes == [2, 2]
    assert outcome.err[1] == "" and outcome.out == ["", ""]
    line = outcome.err[0]
    assert line.startswith("error: ") and line.count("\n") == 1, line
    for pattern in patterns:
        assert re.search(pattern, line), (pattern, line)
