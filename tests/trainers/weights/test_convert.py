"""trainers.convert and runs that start from other people's models: the commands, and their training."""

import json
import os
import shutil
from dataclasses import asdict

import pytest
import tokenizers
import torch

from commengine import ProcessGrid, UsageError
from commengine.options.ranges import OptionError
from tests.support.weights.hugging_face import from_hugging_face
from tests.support.weights.megatron_files import contents, write_megatron
from tplayers import BERTConfig, GPTConfig
from trainers.checkpoints import run_state
from trainers.data.corpus import open_corpus
from trainers.data.tokenizer import Tokenizer
from trainers.settings.commands import GPTSettings
from trainers.settings.rules import require_valid
from trainers.tasks.commands import PRETRAIN_BERT, PRETRAIN_GPT
from trainers.tasks.kinds import task_of
from trainers.trained import load_trained

STEPS, SEQUENCE, BATCH = 20, 12, 8
TRAINING = {
    "mock_data": True, "seq_length": SEQUENCE, "micro_batch_size": 2, "global_batch_size": BATCH,
    "train_iters": STEPS, "lr": 3e-3, "min_lr": 0.0, "lr_decay_style": "constant", "weight_decay": 0.1,
    "clip_grad": 0.5, "eval_iters": 0, "sample_tokens": 0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def plain_torch(model, samples):
    """The losses of the same steps in transformers and plain torch, on one rank."""
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}]  # fmt: skip
    adamw = torch.optim.AdamW(groups, lr=3e-3)
    losses = []
    for step in range(STEPS):
        rows = torch.stack([torch.from_numpy(samples[step * BATCH + n].copy()) for n in range(BATCH)])
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        adamw.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("GPT-2", marks=pytest.mark.sizes(1, 2)),
        pytest.param("Qwen 2", marks=[pytest.mark.sizes(4), pytest.mark.long]),
    ],
)
def test_training_from_a_model_equals_transformers_and_plain_torch(world, theirs, folder, command, name):
    """From the folder itself and from a converted run: the same losses; handed back, the same parameters."""
    model = theirs(name)
    if world.rank == 0:
        model.save_pretrained(folder / "in")
    world.barrier()
    tensor = 2 if world.size == 4 else world.size
    size = ("--tensor-model-parallel-size", tensor)
    command(world, "--from", "hf", folder / "in", "--save", folder / "converted", *size)
    found = {}
    for load in (f"hf:{folder / 'in'}", str(folder / "converted")):
        words = ["--load", load, *map(str, size)]
        config = PRETRAIN_GPT.parse(words)
        config = GPTSettings(**(asdict(config) | TRAINING | {"save": str(folder / "run")}))
        require_valid(config, world.size)
        config = task_of(config).completed(world.size)
        corpus = open_corpus(config)
        trainer = task_of(config).new_trainer(world, corpus)
        told = run_state.resume(trainer)
        assert (told is None) == load.startswith("hf:")
        found[load] = [trainer.step().loss for _ in range(STEPS)]
        if load.startswith("hf:"):
            run_state.CheckpointSaver(trainer).start(background=False)
        trainer.close()
    wanted = plain_torch(model, corpus.stream(config.seed))
    first, second = found.values()
    assert first == second
    assert torch.tensor(first).sub(torch.tensor(wanted)).abs().max() < 1e-4
    assert wanted[-1] < wanted[0] - 0.1  # it learns, so that the comparison means something
    command(world, "--load", folder / "run", "--to", "hf", folder / "out", *size)
    back = type(model).from_pretrained(folder / "out").state_dict()
    for key, values in model.state_dict().items():
        difference = back[key] - values
        if key.endswith("c_attn.bias"):
            # The softmax does not see the keys' bias. Its gradient is a rounding error, which AdamW makes a whole step.
            difference.chunk(3)[1].zero_()
        assert difference.norm() < 1e-4 * values.norm(), key
    world.barrier()


@pytest.mark.mpi
@pytest.mark.sizes(2, only=True)
def test_masters_are_the_files_values(world, theirs, folder):
    """A run in bfloat16 starts from the fp32 values, not from rounded ones."""
    model = theirs("GPT-2")
    if world.rank == 0:
        model.save_pretrained(folder / "in")
    world.barrier()
    words = ["--load", f"hf:{folder / 'in'}", "--tensor-model-parallel-size", "2", "--bf16"]
    config = GPTSettings(**(asdict(PRETRAIN_GPT.parse(words)) | TRAINING))
    trainer = task_of(config).new_trainer(world, open_corpus(config))
    with ProcessGrid(world, tensor=2) as grid:
        wanted = dict(load_trained(f"hf:{folder / 'in'}", grid).model.named_parameters())
    masters = {name.removeprefix("master."): one for name, one in trainer.optimizer.tensors() if "master." in name}
    assert masters.keys() == wanted.keys()
    for name, values in masters.items():
        rows = min(len(values), len(wanted[name]))  # padded otherwise
        assert values.dtype == torch.float32 and torch.equal(values[:rows], wanted[name][:rows]), name
    trainer.close()


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("name", ["GPT-2", "MegatronBert"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_megatron_lm_becomes_a_folder_of_transformers(world, theirs, folder, command, name, ranks):
    model = theirs(name)
    if name == "GPT-2":
        shape = GPTConfig(2, 32, 8, 57, 16, make_vocab_size_divisible_by=1)
    else:
        shape = BERTConfig(2, 32, 8, 57, 16, ffn_hidden_size=24, make_vocab_size_divisible_by=1)
    if world.rank == 0:
        ours = {key: values.detach() for key, values in from_hugging_face(model.state_dict(), shape).items()}
        settings = {"attn_mask_type": None, **({} if name == "GPT-2" else {"bias_gelu_fusion": False})}
        write_megatron(folder / "in", contents(ours, 8, version=2, ranks=ranks, padded=64, **settings))
    world.barrier()
    size = ("--tensor-model-parallel-size", world.size)
    words = ("--from", "megatron", folder / "in", "--save", folder / "run", *size)
    with pytest.raises(UsageError, match=r"--from megatron.*vocab|--load megatron:.*vocab"):
        command(world, *words)
    command(world, *words, "--vocab-size", 57)
    command(world, "--load", folder / "run", "--to", "hf", folder / "out", *size)
    back, told = type(model).from_pretrained(folder / "out", output_loading_info=True)
    assert not any(told.values())
    state = back.state_dict()
    assert all(torch.equal(state[key], values) for key, values in model.state_dict().items())
    with torch.no_grad():
        tokens = torch.arange(10)[None]
        (mine, *_), (wanted, *_) = back.eval()(tokens, return_dict=False), model(tokens, return_dict=False)
        assert (mine - wanted).norm() < 1e-4 * wanted.norm()  # the epsilon of the norms differs
    world.barrier()


@pytest.mark.slow
def test_the_model_comes_from_the_folder_and_flags_must_agree(tmp_path, theirs, changed):
    theirs("Qwen 2").save_pretrained(tmp_path)
    load = f"hf:{tmp_path}"

    def completed(*words):
        config = PRETRAIN_GPT.parse(["--load", load, "--mock-data", *words])
        require_valid(config, 1)
        return task_of(config).completed(1)

    config = completed()
    assert (config.num_layers, config.vocab_size, config.seq_length, config.hf_files) == (2, 57, 16, str(tmp_path))
    model = task_of(config).model()
    assert model.qkv_bias and model.query_groups == 2 and config.hidden_dropout == 0.0
    assert completed("--seq-length", "8", "--num-layers", "2", "--hidden-dropout", "0.2").seq_length == 8
    for words in (["--num-layers", "3"], ["--rotary-base", "9"], ["--no-add-qkv-bias"], ["--vocab-size", "60"]):
        with pytest.raises(ValueError if words[0] == "--seq" else Exception, match=words[0].replace("no-", "")):
            completed(*words, "--dry-run")  # a run compares them when it makes its trainer: tests of open_other
    with pytest.raises(Exception, match="--seq-length 32: must not exceed --max-position-embeddings 16"):
        completed("--seq-length", "32")

    with pytest.raises(Exception, match="holds a GPT, and a BERT is needed"):
        PRETRAIN_BERT.parse(["--load", load])
    with pytest.raises(OptionError):
        PRETRAIN_GPT.parse(["--load", ""])


TINY = ["--micro-batch-size", "2", "--train-iters", "2", "--log-interval", "1", "--eval-iters", "0", "--mock-data",
        "--sample-tokens", "0"]  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(pretrain, theirs, tmp_path_factory):
    """(folder, outcome by name) of many commands in one job."""
    root = tmp_path_factory.mktemp("convert")
    gpt, bert = root / "gpt", root / "bert"
    theirs("GPT-2").save_pretrained(gpt)
    words = {"[UNK]": 0, "</s>": 2, **{chr(97 + n): 3 + n for n in range(26)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (gpt / "tokenizer.json").write_bytes(Tokenizer(backend).to_bytes())
    (gpt / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    theirs("BERT").save_pretrained(bert)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(97 + n) for n in range(26)),
             *(f"##{chr(97 + n)}" for n in range(26))]  # fmt: skip
    (bert / "vocab.txt").write_text("\n".join(words) + "\n")
    hostile, cut, full = root / "hostile", root / "cut", root / "full"
    for name in (hostile, cut):
        shutil.copytree(gpt, name)
    (hostile / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Hostile(root / "made")}, hostile / "pytorch_model.bin")
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    full.mkdir()
    (root / "text").write_text("a b c d e f g h " * 9)
    (full / "something").touch()
    run, two = str(root / "run"), ["--tensor-model-parallel-size", "2"]
    commands = {
        "in": ("convert", ["--from", "hf", gpt, "--save", run, *two]),
        "again": ("convert", ["--from", "hf", gpt, "--save", run, *two]),
        "over": ("convert", ["--from", "hf", gpt, "--save", run, "--overwrite"]),
        "train": ("pretrain_gpt", ["--load", run, "--save", root / "trained", *TINY, *two]),
        "go on": ("pretrain_gpt", ["--load", root / "trained", "--save", root / "trained", *TINY, *two,
                                   "--train-iters", "3", "--seq-length", "16"]),
        "every": ("pretrain_gpt", ["--load", f"hf:{gpt}", "--save", root / "every", *TINY, "--save-hf",
                                   "--save-interval", "1", "--async-save"]),
        "none": ("pretrain_gpt", ["--load", f"hf:{gpt}", "--save", root / "none", *TINY, "--no-save-hf"]),
        "out": ("convert", ["--load", root / "trained", "--to", "hf", root / "out", *two]),
        "bert": ("convert", ["--from", "hf", bert, "--save", root / "bert-run"]),
        "generate": ("generate", ["--load", f"hf:{gpt}", "--prompt", "a b c", "--max-new-tokens", "4"]),
        "evaluate": ("evaluate", ["--load", f"hf:{gpt}", "--task", "perplexity", "--data", root / "text", *two]),
        "bert trained": ("pretrain_bert", ["--load", f"hf:{bert}", "--save", root / "tuned", *TINY[:-2], *two]),
        "both": ("convert", ["--from", "hf", gpt, "--save", run, "--load", run, "--to", "hf", full]),
        "neither": ("convert", []),
        "no folder": ("convert", ["--from", "hf", root / "nowhere", "--save", root / "x"]),
        "program": ("convert", ["--from", "gguf", gpt, "--save", root / "x"]),
        "one word": ("convert", ["--from", "hf", "--save", root / "x"]),
        "no save": ("convert", ["--from", "hf", gpt]),
        "not empty": ("convert", ["--load", run, "--to", "hf", full]),
        "hostile": ("convert", ["--from", "hf", hostile, "--save", root / "x", *two]),
        "cut": ("convert", ["--from", "hf", cut, "--save", root / "x", *two]),
        "heads": ("convert", ["--from", "hf", gpt, "--save", root / "x", "--num-attention-heads", "4"]),
        "wrong flag": ("pretrain_gpt", ["--load", f"hf:{gpt}", *TINY, "--hidden-size", "64"]),
        "wrong kind": ("pretrain_bert", ["--load", f"hf:{gpt}", *TINY[:-2]]),
        "step": ("generate", ["--load", f"hf:{gpt}", "--ckpt-step", "4", "--prompt", "a"]),
    }  # fmt: skip
    found = pretrain(*((2, words) for _, words in commands.values()), command=[name for name, _ in commands.values()])
    return root, dict(zip(commands, found, strict=True))


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["in", "over", "train", "go on", "every", "none", "out", "bert", "generate", "evaluate", "bert trained"]
)  # fmt: skip
def test_good_commands(outcomes, name):
    _, outcome = outcomes
    assert outcome[name].codes == [0, 0], outcome[name].err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("again", "--save .*run: holds a run already"), ("both", "needed: one of the two"),
        ("neither", "one of the two"),
        ("no folder", "--from hf .*nowhere: there is no such folder"),
        ("program", "--from gguf .*: want one of hf, megatron"),
        ("one word", "--from hf: want one of"), ("no save", "--save DIR: needed"),
        ("not empty", "--to hf .*full: is there already"),
        ("hostile", "--from hf .*pytorch_model.bin: refused, because it asks for .*mkdir"),
        ("cut", "--from hf .*model.safetensors: .*its header says"), ("heads", "goes with --from megatron"),
        ("wrong flag", "--hidden-size 64: the model of --load hf:.* has 32"),
        ("wrong kind", "holds a GPT, and a BERT is needed"), ("step", "--ckpt-step 4: --load hf:.* is no run"),
    ],
)  # fmt: skip
def test_bad_commands_are_one_error_on_every_rank(outcomes, name, said):
    import re

    root, outcome = outcomes
    assert all(code not in (0, None) for code in outcome[name].codes), outcome[name]
    (text,) = [text for text in outcome[name].err if text.strip()]
    assert re.search(said, text) and "Traceback" not in text
    assert len([line for line in text.splitlines() if line.strip()]) == 1, text
    assert not (root / "made").exists() and not (root / "x").exists()


@pytest.mark.slow
def test_what_the_folders_hold(outcomes):
    transformers = pytest.importorskip("transformers")
    root, outcome = outcomes
    assert "starting from iteration 0" in outcome["train"].out[0] + outcome["train"].err[0]
    last = root / "trained" / "iter_0000003"
    assert sorted(path.name for path in (root / "trained").glob("iter_*/hf")) == ["hf", "hf"]
    for folder in (last / "hf", root / "out", root / "every" / "iter_0000002" / "hf"):
        model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(told.values()) and model.config.eos_token_id == 2
    assert {path.parent.name for path in (root / "every").glob("*/hf")} == {"iter_0000001", "iter_0000002"}
    assert not list((root / "none").glob("*/hf"))
    state = json.loads((root / "run" / "iter_0000000" / "state.json").read_text())
    assert state["settings"]["converted_from"] == f"hf:{root / 'gpt'}"
    assert (root / "run" / "hf_files" / "config.json").read_bytes() == (root / "gpt" / "config.json").read_bytes()
    _, told = transformers.AutoModelForPreTraining.from_pretrained(
        root / "tuned" / "iter_0000002" / "hf", output_loading_info=True
    )
    assert not any(told.values())
    kept = json.loads((root / "bert-run" / "iter_0000000" / "state.json").read_text())["settings"]
    assert kept["tokenizer_model"] == str(root / "bert-run" / "hf_files" / "vocab.txt")
