"""The paper's models by name: counts on the meta device, the recipe, tensor sizes, and the option --preset."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from commengine import UsageError
from commengine.options.ranges import OptionError
from tplayers import BERT, GPT, T5, formulas
from trainers import presets
from trainers.finetuning.completing import COMMAND as FINETUNE
from trainers.finetuning.completing import scheduled
from trainers.finetuning.settings import FinetuneSettings
from trainers.presets import PRESETS
from trainers.settings.commands import BERTSettings, GPTSettings
from trainers.settings.rules import require_valid
from trainers.tasks.commands import PRETRAIN, PRETRAIN_BERT, PRETRAIN_GPT, PRETRAIN_T5
from trainers.tasks.kinds import task_of

#: Tables 1, 2 and 4: layers, hidden size, heads, parameters as published, billions of them
TABLES = {
    "gpt-355m": (24, 1024, 16, "355M", 0.355),
    "gpt-1.2b": (40, 1536, 16, "1.2B", 1.2),
    "gpt-2.5b": (54, 1920, 20, "2.5B", 2.5),
    "gpt-4.2b": (64, 2304, 24, "4.2B", 4.2),
    "gpt-8.3b": (72, 3072, 24, "8.3B", 8.3),
    "gpt-8.3b-32-heads": (72, 3072, 32, "8.3B", 8.3),
    "bert-336m": (24, 1024, 16, "336M", 0.336),
    "bert-1.3b": (24, 2048, 32, "1.3B", 1.3),
    "bert-3.9b": (48, 2560, 40, "3.9B", 3.9),
}
#: with all heads and a vocabulary of 30,522
EXACT = {"bert-336m": 336_226_108, "bert-1.3b": 1_280_595_772, "bert-3.9b": 3_869_081_404}


def parameters_of_a_rank(preset, tensor=1, **more):
    """(Name, elements) of rank 0's parameters, of a model on the meta device by the training command's settings."""
    values = preset.settings() | more
    group = SimpleNamespace(size=tensor, rank=0)
    with torch.device("meta"):
        if preset.task == "gpt":
            model = GPT(task_of(GPTSettings(**values)).model(), group)
        else:
            model = BERT(task_of(BERTSettings(**values)).model(), group)
    assert all(parameter.is_meta for parameter in model.parameters())
    return [(name, parameter.numel()) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_the_papers(name):
    preset = PRESETS[name]
    layers, hidden, heads, published, billions = TABLES[name]
    assert (preset.layers, preset.hidden, preset.heads, preset.published) == (layers, hidden, heads, published)
    count = sum(size for _, size in parameters_of_a_rank(preset, make_vocab_size_divisible_by=1))
    assert count == preset.parameters
    assert round(count / 1e9, 3 if billions < 1 else 1) == billions
    assert count == EXACT.get(name, count)
    # what a rank of the preset's tensor group holds, with the vocabulary padded
    of_rank = parameters_of_a_rank(preset, preset.tensor)
    assert of_rank == formulas.parameter_sizes(preset.shape(), preset.tensor)
    assert sum(size for _, size in of_rank) == formulas.parameters(preset.shape(), preset.tensor)


def test_every_model_of_the_tables_is_there():
    assert list(PRESETS) == list(TABLES)


def test_the_recipes_are_those_of_sections_4_and_5():
    gpt, bert = (PRESETS[name].settings() for name in ("gpt-2.5b", "bert-3.9b"))
    for values in (gpt, bert):
        assert (values["weight_decay"], values["clip_grad"]) == (0.01, 1.0)
        assert (values["hidden_dropout"], values["attention_dropout"]) == (0.1, 0.1)
        assert values["recompute_granularity"] == "full"  # "activation checkpointing after every transformer layer"
    names = ("global_batch_size", "train_iters", "lr", "min_lr", "lr_warmup_iters", "lr_decay_iters", "lr_decay_style")
    assert [gpt[name] for name in names] == [512, 300_000, 1.5e-4, 1e-5, 3000, 300_000, "cosine"]
    assert [bert[name] for name in names] == [1024, 2_000_000, 1e-4, 0.0, 10_000, 2_000_000, "linear"]
    assert [(one["seq_length"], one["vocab_size"]) for one in (gpt, bert)] == [(1024, 50257), (512, 30522)]


def test_tensor_sizes_are_the_papers_and_else_the_smallest_for_32_gb():
    sizes = {name: preset.tensor for name, preset in PRESETS.items()}
    assert sizes == {
        "gpt-355m": 1, "gpt-1.2b": 1, "gpt-2.5b": 2, "gpt-4.2b": 4, "gpt-8.3b": 8, "gpt-8.3b-32-heads": 8,
        "bert-336m": 1, "bert-1.3b": 1, "bert-3.9b": 4,
    }  # fmt: skip
    for preset in PRESETS.values():  # the paper's sizes, on its 32 GB cards, are the smallest of this trainer, too
        assert preset.smallest_tensor(32) == preset.tensor
        fits = [preset.smallest_tensor(size) for size in presets.MEMORIES]
        assert all(a is None or a >= b for a, b in pairwise(fits))
        for tensor, size in zip(fits, presets.MEMORIES, strict=True):
            if tensor is not None:
                assert preset.rank_bytes(tensor) <= (size - 2) * 1e9
                smaller = [n for n in range(1, tensor) if preset.heads % n == preset.shape().vocab % n == 0]
                assert all(preset.rank_bytes(n) > (size - 2) * 1e9 for n in smaller if preset.hidden % n == 0)
    assert PRESETS["gpt-8.3b"].smallest_tensor(16) is None  # 24 heads divide by 12, and 51,200 columns do not
    # 18 bytes a parameter, and 2 in the copies that are sent when the activations are free
    assert PRESETS["gpt-8.3b"].rank_bytes(8) == pytest.approx(20 * formulas.parameters(PRESETS["gpt-8.3b"].shape(), 8))


def test_flags_win_over_files_and_files_over_the_preset(tmp_path):
    (tmp_path / "mine.yaml").write_text("lr: 3.0e-4\nmin_lr: 2.0e-5\nmock-data: true\n")
    argv = ["--preset", "gpt-1.2b", "--config", str(tmp_path / "mine.yaml"), "--min-lr", "3e-5", "--train-iters", "7"]
    config = PRETRAIN_GPT.parse(argv)
    assert (config.num_layers, config.hidden_size, config.lr_warmup_iters) == (40, 1536, 3000)
    assert (config.lr, config.min_lr, config.train_iters, config.mock_data) == (3e-4, 3e-5, 7, True)
    in_file = tmp_path / "named.yaml"
    in_file.write_text("preset: gpt-2.5b\nhidden-dropout: 0.0\nrecompute-granularity: none\n")
    config = PRETRAIN_GPT.parse(["--config", str(in_file)])
    assert (config.preset, config.num_layers, config.hidden_dropout) == ("gpt-2.5b", 54, 0.0)
    assert task_of(config).model().recompute is None
    assert task_of(PRETRAIN_GPT.parse(["--preset", "gpt-355m"])).model().recompute == "full"
    assert PRETRAIN_GPT.parse([]) == GPTSettings()


def test_a_bert_of_the_paper_in_its_command():
    config = PRETRAIN_BERT.parse(["--preset", "bert-3.9b", "--mock-data"])
    require_valid(config, 8)
    model = task_of(config).model()
    assert (model.num_layers, model.hidden_size, model.recompute) == (48, 2560, "full")
    # Figure 7 b, GELU by the error function, and the sentence-order head: the command's defaults
    assert (model.norm_placement, model.gelu, model.binary_head) == ("pre", "erf", True)
    assert (config.seq_length, config.tensor_model_parallel_size, config.global_batch_size) == (512, 4, 1024)
    with pytest.raises(UsageError, match="--tensor-model-parallel-size 4: does not divide the 2"):
        require_valid(config, 2)
    with pytest.raises(UsageError, match="--preset gpt-355m: is a model of pretrain_gpt; valid here: bert-336m"):
        PRETRAIN_BERT.parse(["--preset", "gpt-355m"])


@pytest.mark.parametrize(
    ("argv", "ranks", "message"),
    [
        (["gpt-8.3b"], 4, "--tensor-model-parallel-size 8: does not divide the 4 ranks"),
        (["gpt-2.5b"], 6, "--global-batch-size 512: must be a multiple of .* size 3, such as 510"),
        (["gpt-2.5b", "--lr", "1e-6"], 2, "--min-lr 1e-05: must not exceed --lr 1e-06"),
        (["gpt-355m", "--seq-length", "2048"], 1, "--seq-length 2048: .* --max-position-embeddings 1024"),
        (["gpt-8.3b", "--tensor-model-parallel-size", "3"], 4, "--tensor-model-parallel-size 3: does not divide the 4"),
    ],
)
def test_ranks_that_do_not_divide_are_told_what_does(argv, ranks, message):
    config = PRETRAIN_GPT.parse(["--mock-data", "--preset", *argv])
    with pytest.raises(UsageError, match=message):
        require_valid(config, ranks)


#: all parameters and those of a token: Jiang et al. 2024 and the model cards; Mixtral's from its published weights
MIXTURES = {
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248), "mixtral-8x22b": (140_620_634_112, 39_152_031_744),
    "qwen1.5-moe-a2.7b": (14_315_784_192, 2.69e9), "qwen3-30b-a3b": (30_532_122_624, 3.35e9),
}  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("name", presets.MIXTURES)
def test_a_mixture_of_experts_has_the_published_counts(name):
    config = PRETRAIN_GPT.parse(["--preset", name, "--mock-data", "--seq-length", "512"])
    require_valid(config, 8)
    with torch.device("meta"):
        model = GPT(task_of(config).model(), SimpleNamespace(size=1, rank=0))
    every, active = MIXTURES[name]
    shape = task_of(config).cost_shape()
    assert sum(parameter.numel() for parameter in model.parameters()) == every == formulas.parameters(shape)
    assert formulas.active_parameters(shape) == pytest.approx(active, rel=0.002)
    with pytest.raises(UsageError, match=f"--preset {name}: is a model of pretrain_gpt; valid here: bert-336m"):
        PRETRAIN_BERT.parse(["--preset", name])


def test_flags_make_a_preset_fit_other_ranks():
    argv = ["--mock-data", "--preset", "gpt-8.3b", "--tensor-model-parallel-size", "2", "--global-batch-size", "6"]
    require_valid(PRETRAIN_GPT.parse(argv), 6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-9b", "--preset gpt-9b: valid here: gpt-355m, .*, or list, which prints the table"),
        ("bert-336m", "--preset bert-336m: is a model of pretrain_bert; valid here: gpt-355m"),
    ],
)
def test_a_name_that_the_command_does_not_have(name, message):
    with pytest.raises(UsageError, match=message):
        PRETRAIN_GPT.parse(["--preset", name])
    with pytest.raises(OptionError, match="expected one argument"):
        PRETRAIN_GPT.parse(["--preset"])


def test_the_page_shows_the_same_table():
    page = (Path(__file__).parents[2] / "docs" / "sizes.md").read_text()
    for name, one in PRESETS.items():
        fits = ", ".join(str(one.smallest_tensor(size) or "none") for size in presets.MEMORIES)
        cells = [f"`{name}`", one.layers, one.hidden, one.heads, f"{one.parameters:,}", one.tensor]
        cells += [one.recipe["global_batch_size"], f"{one.rank_bytes(one.tensor) / 1e9:.1f}", fits]
        assert f"| {' | '.join(map(str, cells))} |" in page


@pytest.mark.slow
def test_the_command_prints_the_list_refuses_and_trains(pretrain):
    small = ["--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"]
    small += ["--max-position-embeddings", "16", "--vocab-size", "100", "--global-batch-size", "2", "--mock-data"]
    short = ["--train-iters", "2", "--lr-warmup-iters", "1", "--eval-iters", "0", "--sample-tokens", "0"]
    listed, refused, trained = pretrain(
        (2, ["--preset", "list"]),
        (2, ["--mock-data", "--preset", "gpt-4.2b"]),
        (2, ["--preset", "gpt-2.5b", *small, *short]),
    )
    assert listed.codes == [0, 0] and not listed.out[1]
    rows = {line.split("|")[1].strip(): line for line in listed.out[0].splitlines() if line.startswith("| ")}
    for name, preset in PRESETS.items():
        assert f"| {preset.parameters:,} | {preset.published} | {preset.tensor} |" in rows[name]
    for name, one in presets.MIXTURES.items():
        assert f"| {one['num_layers']} | {one['hidden_size']} | {one['num_attention_heads']} |" in rows[name]
    assert set(refused.codes) == {2} and "size 4: does not divide the 2 ranks" in "".join(refused.err)
    assert trained.codes == [0, 0] and "tensor 2" in trained.out[0]


# Table 6 ----------------------------------------------------------------------------------------------------------

#: batch and rate of the three models, epochs
TABLE_6 = {
    "mnli": ((128, 1e-5), (128, 1e-5), (128, 1e-5), 10),
    "qqp": ((128, 5e-5), (128, 3e-5), (256, 4e-5), 12),
    "squad-1.1": ((64, 3e-5), (48, 3e-5), (48, 1e-5), 2),
    "squad-2.0": ((48, 3e-5), (64, 3e-5), (48, 1e-5), 2),
    "race": ((32, 2e-5), (16, 1e-5), (32, 2e-5), 3),
}


def finetune(folder, *words):
    """The settings that finetune reads from its flags."""
    return FINETUNE.parse(["--data", str(folder), *words])


@pytest.mark.parametrize("task", TABLE_6)
@pytest.mark.parametrize("model", range(3))
def test_a_fine_tuning_is_that_of_table_6(tmp_path, task, model):
    name, version = task.partition("-")[::2]
    words = ["--task", name, "--preset", ("bert-336m", "bert-1.3b", "bert-3.9b")[model]]
    config = finetune(tmp_path, *words, *(["--squad-version", version] if version else []))
    *sizes, epochs = TABLE_6[task]
    assert (config.global_batch_size, config.lr, config.epochs) == (*sizes[model], epochs)
    assert (config.num_layers, config.hidden_size, config.num_attention_heads) == TABLES[config.preset][:3]
    assert config.seq_length == (384 if name == "squad" else 512)
    assert config.weight_decay == (0.01 if name == "squad" else 0.1)
    assert config.lr_warmup_fraction == {"mnli": 0.065, "qqp": 0.25}.get(name, 0.06)
    assert (config.min_lr, config.lr_decay_style, config.hidden_dropout) == (0.0, "linear", 0.1)


def test_the_version_of_squad_is_that_of_the_files_and_flags_win(tmp_path):
    words = ["--task", "squad", "--preset", "bert-336m"]
    assert finetune(tmp_path, *words).global_batch_size is None
    (tmp_path / "train-v2.0.json").touch()
    assert finetune(tmp_path, *words).global_batch_size == 48
    assert finetune(tmp_path, *words, "--global-batch-size", "7").global_batch_size == 7
    (tmp_path / "dev-v1.1.json").touch()
    assert finetune(tmp_path, *words).global_batch_size is None
    assert finetune(tmp_path, *words, "--squad-version", "1.1").global_batch_size == 64


def test_the_table_of_fine_tuning_is_printed(tmp_path, capsys):
    with pytest.raises(SystemExit):
        finetune(tmp_path, "--preset", "list")
    out = capsys.readouterr().out
    assert "| qqp | bert-3.9b | 256 | 4e-05 | 12 | 512 | 0.1 | 0.25 of the steps |" in out
    assert sum(line.startswith("| ") for line in out.splitlines()) == 1 + 15


def test_a_schedule_of_epochs():
    """10 samples in batches of 4 are 3 steps; what is given wins."""
    config = FinetuneSettings(epochs=5, global_batch_size=4, save="x", lr_warmup_fraction=0.2)
    found = scheduled(config, 10, 1)
    assert (found.train_iters, found.eval_interval, found.save_interval, found.keep_last) == (15, 3, 3, 1)
    assert found.lr_warmup_iters == 3 and found.global_batch_size == 4
    given = FinetuneSettings(train_iters=2, eval_interval=7, lr_warmup_iters=1, micro_batch_size=3, keep_last=4)
    found = scheduled(given, 100, 2)
    assert (found.train_iters, found.eval_interval, found.lr_warmup_iters) == (2, 7, 1)
    assert (found.global_batch_size, found.keep_last, found.save_interval) == (6, 4, None)


def test_no_warm_up_is_not_the_default_warm_up():
    """It is none, whatever the fraction is."""
    for fraction in (0.06, 0.25):
        config = FinetuneSettings(epochs=25, lr_warmup_fraction=fraction, global_batch_size=1, micro_batch_size=1)
        assert [scheduled(replace(config, lr_warmup_iters=n), 4, 1).lr_warmup_iters for n in (0, 1, None)] == [
            0, 1, int(100 * fraction),
        ]  # fmt: skip


def test_a_warm_up_of_a_fraction_ends_before_the_decay():
    """It has steps only when the training data is read, which is after the other options are compared."""
    config = FinetuneSettings(epochs=25, lr_warmup_fraction=0.25, lr_decay_iters=25, micro_batch_size=1)
    with pytest.raises(UsageError, match=r"--lr-warmup-fraction 0.25: is 25 of 100 steps, .* --lr-decay-iters 25"):
        scheduled(config, 4, 1)
    assert scheduled(replace(config, lr_decay_iters=26), 4, 1).lr_warmup_iters == 25
    assert scheduled(replace(config, lr_warmup_iters=24), 4, 1).lr_warmup_iters == 24


def test_a_run_that_keeps_the_newest_checkpoint_by_default_may_keep_every_nth(tmp_path):
    config = FinetuneSettings(task="mnli", data=str(tmp_path), load="x", save="x", keep_every=2)
    require_valid(config, 1)
    assert scheduled(config, 4, 1).keep_last == 1
    with pytest.raises(UsageError, match="--keep-every 2: needs"):
        require_valid(replace(config, save=None, predict="dev"), 1)


#: of transformers' T5ForConditionalGeneration with the published configurations
T5_COUNTS = {
    "t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096, "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344, "t5-1.1-small": 76_961_152, "t5-1.1-base": 247_577_856, "t5-1.1-large": 783_150_080,
    "t5-1.1-xl": 2_849_757_184, "t5-1.1-xxl": 11_135_332_352,
}  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("name", T5_COUNTS)
def test_a_t5_has_the_published_counts(name):
    """By the formula, and by the names and the sizes of the model itself, also on several ranks."""
    assert presets.t5_parameters(name) == T5_COUNTS[name]
    config = PRETRAIN_T5.parse(["--preset", name, "--mock-data", "--pad-attention-heads"])
    for tensor in (1, 4):
        with torch.device("meta"):
            model = T5(task_of(config).model(), SimpleNamespace(size=tensor, rank=0))
        sizes = dict(formulas.parameter_sizes(task_of(config).model().cost_shape(1, tensor), tensor))
        assert {name: one.numel() for name, one in model.named_parameters()} == sizes
    with pytest.raises(UsageError, match=f"--preset {name}: is a model of pretrain_t5; valid here: bert-336m"):
        PRETRAIN_BERT.parse(["--preset", name])


@pytest.mark.parametrize("name, kind, count", [("distilbert", "bert", 66_362_880), ("distilgpt2", "gpt", 81_912_576)])
def test_a_student_has_the_published_count_and_layers(name, kind, count):
    """DistilBERT's count is that without the head of masked tokens. Six layers of twelve, not strictly alternate."""
    config = PRETRAIN[kind].parse(["--preset", name, "--mock-data", "--make-vocab-size-divisible-by", "1"])
    assert config.student_layers == "0,2,4,7,9,11"
    with torch.device("meta"):
        model = {"bert": BERT, "gpt": GPT}[kind](task_of(config).model(), SimpleNamespace(size=1, rank=0))
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    assert sum(size for name, size in sizes.items() if not name.startswith("mlm_head")) == count
    with pytest.raises(UsageError, match="--student-layers 0,2,4,7,9,11: needs --teacher"):
        require_valid(config, 1)
