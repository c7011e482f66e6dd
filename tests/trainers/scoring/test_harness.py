"""The adapter against lm-evaluation-harness's own HFLM on the same weights, on 4 ranks (TP 2 x DP 2), offline.

The models: a GPT that a run has trained, and a Llama of random weights whose tokenizer puts <s> before a text.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.support.tokenizers.sentencepiece import sentencepiece
from tests.support.weights.hugging_face import to_hugging_face
from tplayers import Sampling
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.data.tokenizer import Tokenizer
from trainers.settings.commands import GPTSettings
from trainers.tasks.kinds import task_of

if not all(map(find_spec, ("lm_eval", "evaluate", "accelerate"))):  # to import them takes 3 s
    pytest.skip("lm-evaluation-harness is not installed: pip install '.[lm-eval]' accelerate", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]  # most of its time is the library's start

TEXT = Path(__file__).with_name("articles.raw").read_text(encoding="utf-8")
LENGTH, ROWS = 32, 100
MODEL = [
    "--num-layers", "1", "--hidden-size", "48", "--num-attention-heads", "4", "--seq-length", LENGTH,
    "--make-vocab-size-divisible-by", "4", "--micro-batch-size", "4", "--global-batch-size", "8", "--lr", "5e-3",
    "--train-iters", "300", "--eval-iters", "0", "--sample-tokens", "0",
]  # fmt: skip
TASKS = {
    "choices": "output_type: multiple_choice\ndoc_to_text: '{{context}}'\ndoc_to_target: 0\n"
    "doc_to_choice: '{{[first, second]}}'\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{context}}'\n"
    "metric_list:\n  - metric: word_perplexity\n",
    "written": "output_type: generate_until\ndoc_to_text: '{{context}}'\ndoc_to_target: '{{first}}'\n"
    "generation_kwargs:\n  until: ['.', 'zz']\n  max_gen_toks: 8\n  do_sample: false\nmetric_list:\n"
    "  - metric: exact_match\n",
}
REFUSED = {
    "an unknown task": ("--task lm-eval:nothing_like_it --include-path {}/tasks", "no such task: nothing_like_it"),
    "no task": ("--task lm-eval:", "--task lm-eval:: must be wikitext, "),
    "no folder": ("--task lm-eval:choices --include-path {}/none", "--include-path {}/none: no such folder"),
    "a task without its data": ("--task lm-eval:lost --include-path {}/tasks", "--task lm-eval:lost: "),
    "a window beyond the model": (
        "--task lm-eval:choices --seq-length 33",
        "--seq-length 33: the model knows 32 positions",
    ),
    "a BERT": ("--load {}/bert --task lm-eval:choices", "holds a BERT, and a GPT is needed"),
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train_bpe([TEXT], 320)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    """A data set, and three tasks on 100 local documents."""
    root = tmp_path_factory.mktemp("harness")
    with IndexedDatasetWriter(root / "tokens", np.uint16) as writer:
        for line in TEXT.splitlines():
            writer.add_document(np.array([*tokenizer.encode(line), tokenizer.eod]))
    (root / "tokens-tokenizer.json").write_bytes(tokenizer.to_bytes())
    words, generator, rows = TEXT.split(), np.random.default_rng(0), []
    for number in range(ROWS):  # half of the first choices are what follows in the text that the model was trained on
        start, size = int(generator.integers(0, len(words) - 60)), int(generator.integers(1, 40))
        context = " ".join(["so", *words[start : start + size]]) if number % 10 else ""
        first, second = (" ".join(words[at : at + 1 + number % 3]) for at in generator.integers(0, 400, 2))
        if number % 2:
            first = " ".join(words[start + size : start + size + 1 + number % 3])
        context += " " if number % 7 == 0 and context else ""  # the continuation then begins with it
        rows.append({"context": context, "first": f" {first}", "second": f" {second}"})
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "tasks").mkdir()
    for name, text in [*TASKS.items(), ("lost", TASKS["choices"])]:
        file = root / ("rows.jsonl" if name != "lost" else "nowhere.jsonl")
        common = (
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {file}\ntest_split: test\n"
        )
        (root / "tasks" / f"{name}.yaml").write_text(common + text)
    save_llama(root / "llama")
    return root


def save_llama(folder):
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    backend = sentencepiece([TEXT], 300)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    set_seed(3)
    shape = LlamaConfig(
        vocab_size=backend.get_vocab_size(), hidden_size=48, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    several = {"eos_token_id": [2, *range(100, 160)]}  # so many that most texts meet one
    (folder / "generation_config.json").write_text(json.dumps(several))


@pytest.fixture(scope="module")
def outcomes(pretrain, folder):
    data = ["--data-path", folder / "tokens", "--split", "1"]
    mock = ["--mock-data", "--vocab-size", "60", "--train-iters", "1"]
    every = f"lm-eval:{','.join(TASKS)}"
    commands = {
        "run": ("pretrain_gpt", 2, [*MODEL, *data, "--save", folder / "run"]),
        "bert": ("pretrain_bert", 1, [*(word for word in MODEL if word not in ("--sample-tokens", "0")),
                                      "0", *mock, "--save", folder / "bert"]),
        "llama": ("evaluate", 2, ["--load", f"hf:{folder / 'llama'}", "--task", every, "--include-path",
                                 folder / "tasks", "--offline", "--tensor-model-parallel-size", "2",
                                 "--samples", folder / "llama.jsonl"]),
        "tasks": ("evaluate", 4, ["--load", folder / "run", "--task", every, "--include-path", folder / "tasks",
                                 "--offline", "--tensor-model-parallel-size", "2", "--json", folder / "results.json",
                                 "--samples", folder / "samples.jsonl", "--micro-batch-size", "7"]),
    }  # fmt: skip
    for name, (line, _) in REFUSED.items():
        words = line.replace("{}", str(folder)).split()
        load = [] if "--load" in words else ["--load", folder / "run"]
        commands[name] = ("evaluate", 2, [*load, *words, "--offline"])
    done = pretrain(
        *(row[1:] for row in commands.values()), command=[command for command, _, _ in commands.values()], timeout=280
    )
    return dict(zip(commands, done, strict=True))


@pytest.fixture(scope="module", params=["tasks", "llama"])
def samples(request, outcomes, folder):
    """By task, (arguments, answer) of each request."""
    assert set(outcomes[request.param].codes) == {0}, outcomes[request.param].err
    found = {name: [] for name in TASKS}
    name = "samples.jsonl" if request.param == "tasks" else "llama.jsonl"
    for line in (folder / name).read_text().splitlines():
        row = json.loads(line)
        arguments = row["arguments"].values() if isinstance(row["arguments"], dict) else row["arguments"]
        for asked, answer in zip(arguments, row["resps"], strict=True):
            words = list(asked.values()) if isinstance(asked, dict) else asked
            found[row["task"]].append((tuple(words), answer[0] if len(answer) == 1 else answer))
    return found


@pytest.fixture
def hflm(request, outcomes, folder, samples):
    """The harness's own model of the weights that gave ``samples``."""
    from lm_eval.models.huggingface import HFLM

    if request.node.callspec.params["samples"] == "tasks":
        return request.getfixturevalue("gpt")
    return HFLM(pretrained=str(folder / "llama"), batch_size=8, device="cpu", max_length=LENGTH)


@pytest.fixture(scope="module")
def gpt(outcomes, folder, tokenizer):
    from lm_eval.models.huggingface import HFLM
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    config = task_of(GPTSettings(
        num_layers=1, hidden_size=48, num_attention_heads=4, seq_length=LENGTH, vocab_size=tokenizer.vocab_size,
        make_vocab_size_divisible_by=4,
    )).model()  # fmt: skip
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=config.vocab_size, n_positions=LENGTH, n_embd=48, n_layer=1, n_head=4,
                   bos_token_id=tokenizer.eod, eos_token_id=tokenizer.eod)
    )  # fmt: skip
    ours = load_file(folder / "run" / "iter_0000300" / "model.safetensors")
    model.load_state_dict(to_hugging_face(ours, config), strict=False)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokens-tokenizer.json"), eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    return HFLM(pretrained=model.eval(), tokenizer=theirs, batch_size=8, device="cpu", max_length=LENGTH)


@pytest.mark.parametrize("told", [None, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("start", [True, False])
def test_tokens_around_a_text_are_hflms(tmp_path, folder, told, start):
    """What tokenizer.json and tokenizer_config.json say about <s>, and texts that spell special tokens out."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    from trainers.scoring.harness import HarnessModel

    backend = sentencepiece([TEXT], 300, start=start)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.save_pretrained(tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings = {name: value for name, value in settings.items() if not name.startswith("add_")} | (told or {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(folder / "llama"),
        tokenizer=AutoTokenizer.from_pretrained(tmp_path), device="cpu",
    )  # fmt: skip
    service = SimpleNamespace(tokenizer=Tokenizer.from_file(tmp_path / "tokenizer.json"))
    ours = HarnessModel(service, length=LENGTH)
    assert ours.prefix_token_id == theirs.prefix_token_id and ours.eot_token_id == theirs.eot_token_id
    for text in ("the", " the", "<s> the", "<s>", "a</s>b <unk>", "", "漢 \n"):
        for special in (None, True, False):
            assert ours.tok_encode(text, special) == theirs.tok_encode(text, special), (text, special)


def instances(kind, requests):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arguments, number) for number, (arguments, _) in enumerate(requests)]


def test_log_likelihoods_and_greedy_choices_are_hflms(samples, hflm):
    requests = samples["choices"]
    assert len(requests) == 2 * ROWS
    expected = hflm.loglikelihood(instances("loglikelihood", requests), disable_tqdm=True)
    for (_, (found, greedy)), (log_likelihood, is_greedy) in zip(requests, expected, strict=True):
        assert float(found) == pytest.approx(log_likelihood, abs=1e-4)
        assert str(greedy) == str(is_greedy)
    assert sum(str(greedy) == "True" for _, (_, greedy) in requests) < ROWS


def test_rolling_log_likelihoods_are_hflms(samples, hflm):
    requests = samples["rolling"]
    expected = hflm.loglikelihood_rolling(instances("loglikelihood_rolling", requests), disable_tqdm=True)
    assert len(requests) == ROWS and max(len(hflm.tok_encode(one[0])) for one, _ in requests) > 2 * LENGTH
    for (_, found), log_likelihood in zip(requests, expected, strict=True):
        assert float(found if not isinstance(found, list) else found[0]) == pytest.approx(log_likelihood, abs=1e-3)


def test_texts_are_hflms(samples, hflm):
    requests = [one for one in samples["written"] if one[0][0]]
    expected = hflm.generate_until(instances("generate_until", requests), disable_tqdm=True)
    assert [found for _, found in requests] == expected
    assert len(set(expected)) > 5


def test_results_are_a_table_and_json(outcomes, folder):
    results = json.loads((folder / "results.json").read_text())
    assert 0 <= results["results"]["choices"]["acc,none"] <= 1
    assert results["results"]["rolling"]["word_perplexity,none"] > 1 and "samples" not in results
    out = outcomes["tasks"].out
    assert "|choices" in out[0] and "word_perplexity" in out[0] and out[1:] == ["", "", ""]


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_clear_error(outcomes, folder, name):
    one = outcomes[name]
    assert one.codes == [2, 2] and not one.err[1]
    (line,) = [line for line in one.err[0].splitlines() if line.startswith("error: ")]
    assert REFUSED[name][1].replace("{}", str(folder)) in line


def test_a_share_of_0_is_not_all_tokens(tokenizer):
    """It is refused, as by generate; a share that is not given is the whole."""
    from trainers.scoring.harness import HarnessModel

    asked = []
    service = SimpleNamespace(
        tokenizer=tokenizer, generate=lambda prompts, given: asked.extend(given) or [[] for _ in prompts]
    )
    sampling = {"until": ["."], "do_sample": True, "temperature": 0.7}
    requests = [(("the", sampling | more), None) for more in ({}, {"top_p": None}, {"top_p": 0.5}, {"top_p": 0.0})]
    HarnessModel(service, length=LENGTH).generate_until(instances("generate_until", requests))
    assert [one["sampling"]["top_p"] for one in asked] == [1.0, 1.0, 0.5, 0.0]
    with pytest.raises(ValueError, match="must be above 0"):
        Sampling(**asked[-1]["sampling"])
