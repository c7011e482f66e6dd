"""A small random model in a drawn folder: the harness's numbers and greedy texts, here and by transformers."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from commengine import Communicator, ProcessGrid
from tests.support.tokenizers.comparing import told
from tests.support.tokenizers.drawing import MODELS
from tplayers import GPT, Sampling
from trainers.data.tokenizer import Tokenizer
from trainers.generation.texts import Prompt, encoded, generate_texts
from trainers.trained import Trained, load_trained
from trainers.weights.tokenizer_files import tokenizer_file

LENGTH, NEW = 64, 16
PROMPTS = ["the cat", "<s> the cat", "<|u|>the cat<|end|>\n", "Schön, is n't it?", "a<|endoftext|> b"]
PAIRS = [("the cat", " sat"), ("the cat ", "sat on"), ("", "the cat sat"), ("<s>the", " dog"), ("<|u|>cat", "<|end|>"),
         ("a dog and", " a cat"), ("a dog and", " the matter"), ("", "</s> the"), ("the mat " * 12, "sat"),
         ("Schön", " 3.14")]  # fmt: skip
ROLLING = ["the cat sat on the mat, " * 8, "<s> a dog", "don't they 've it's a U.S. matter"]


def has_model(folder: Path) -> bool:
    """Whether a model can be made for the folder, and its tokenizer names an end, without which HFLM fails."""
    path = folder / "config.json"
    if not path.is_file() or json.loads(path.read_text())["model_type"] not in MODELS:
        return False
    found = Tokenizer.from_file(str(tokenizer_file(folder)))
    try:  # a vocabulary without an unknown token cannot encode all of them
        for text in (*PROMPTS, *ROLLING, *(word for pair in PAIRS for word in pair)):
            found.encode_around(text)
    except ValueError:
        return False
    return found.settings() is not None and found.end_token is not None


def make_model(folder: Path, seed: int) -> None:
    """Put a random model into the folder, which says its end tokens by some that the model writes.

    The files say them where they did: in config.json or generation_config.json, as one number or several.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    config = json.loads((folder / "config.json").read_text())
    size = max(tokenizer.get_vocab().values()) + 1
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size, "initializer_range": 0.3}))
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms stay; biases of 0 would make a dull model
            if parameter.dim() > 1:
                parameter.mul_(1.7)
        written = model.generate(
            torch.tensor([tokenizer("the cat")["input_ids"] or [1]]), max_new_tokens=NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )[0, -NEW:].tolist()  # fmt: skip
        draw = random.Random(seed)
        if tokenizer.eos_token_id is not None and draw.random() < 0.5:  # the model says the tokenizer's end, too
            rows = model.get_output_embeddings().weight
            rows[tokenizer.eos_token_id] = 1.1 * rows[written[draw.randrange(4, NEW)]]
    model.save_pretrained(folder / "saved")
    shutil.copy(folder / "saved" / "model.safetensors", folder)
    shutil.rmtree(folder / "saved")
    for name in ("config.json", "generation_config.json"):
        if (path := folder / name).is_file() and (keys := json.loads(path.read_text())).get("eos_token_id") is not None:
            several = isinstance(keys["eos_token_id"], list)
            ends = sorted(set(written))
            keys["eos_token_id"] = draw.sample(ends, min(3, len(ends))) if several else draw.choice(ends)
            path.write_text(json.dumps(keys))


def greedy_differences(folder: Path, world: Communicator) -> Iterator[str]:
    """What differs from transformers in greedy texts, on one rank."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with ProcessGrid(world, tensor=1) as grid:
        trained = load_trained(f"hf:{folder}", grid, kind="gpt")
        yield from _greedy(trained, AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


def differences(folder: Path, world: Communicator) -> Iterator[str]:
    """What differs from transformers and from the harness's HFLM, on one rank."""
    from lm_eval.models.huggingface import HFLM

    from trainers.scoring.harness import HarnessModel
    from trainers.scoring.service import ModelService

    with ProcessGrid(world, tensor=1) as grid:
        trained = load_trained(f"hf:{folder}", grid, kind="gpt")
        assert isinstance(trained.model, GPT)
        theirs = HFLM(pretrained=str(folder), batch_size=1, device="cpu", max_length=LENGTH)
        yield from _greedy(trained, theirs.model, theirs.tokenizer)
        service = ModelService(world, grid, trained.model, trained.tokenizer, batch=1, ends=trained.end_tokens)
        ours = HarnessModel(service, length=LENGTH)
        yield from told("eot", ours.eot_token_id, theirs.eot_token_id)
        yield from told("prefix", ours.prefix_token_id, theirs.prefix_token_id)
        pairs = [pair for pair in PAIRS if _usable(theirs, *pair)]
        here = ours.loglikelihood(_asked("loglikelihood", pairs), disable_tqdm=True)
        # One by one: HFLM (0.4.13) takes the logits of another request whose tokens without the last are the same, also
        # where that one has more tokens to predict, as "the cat" " sat" and "" "the cat sat" after one prefix token.
        there = [theirs.loglikelihood(_asked("loglikelihood", [pair]), disable_tqdm=True)[0] for pair in pairs]
        for pair, mine, other in zip(pairs, here, there, strict=True):
            if mine[0] != pytest.approx(other[0], abs=1e-3) or mine[1] != other[1]:
                yield f"log-likelihood of {pair}: {mine}, HFLM {other}"
        texts = [(text,) for text in ROLLING]
        here = ours.loglikelihood_rolling(_asked("loglikelihood_rolling", texts), disable_tqdm=True)
        there = theirs.loglikelihood_rolling(_asked("loglikelihood_rolling", texts), disable_tqdm=True)
        for text, mine, other in zip(texts, here, there, strict=True):
            if mine != pytest.approx(other, abs=1e-2):
                yield f"rolling {text}: {mine}, HFLM {other}"
        for until in (["."], []):
            here, there = (
                model.generate_until(_asked("generate_until", [
                    (prompt, {"until": list(until), "max_gen_toks": NEW, "do_sample": False}) for prompt in PROMPTS
                ]), disable_tqdm=True)
                for model in (ours, theirs)
            )  # fmt: skip
            yield from told(f"texts until {until}", here, there)


def _greedy(trained: Trained, theirs: Any, their_tokenizer: Any) -> Iterator[str]:
    tokenizer, model = trained.tokenizer, trained.model
    assert isinstance(model, GPT)
    for prompt in PROMPTS:
        (ids,) = encoded([Prompt("here", prompt)], tokenizer, LENGTH)
        (text,) = generate_texts(
            model, tokenizer, [ids], NEW, sampling=Sampling(temperature=0.0), ends=trained.end_tokens
        )
        given = their_tokenizer(prompt, return_tensors="pt")
        whole = theirs.generate(
            given["input_ids"], max_new_tokens=NEW, do_sample=False, pad_token_id=0,
            attention_mask=given["attention_mask"],
        )[0].tolist()  # fmt: skip
        yield from told(f"greedy tokens after {prompt!r}", ids + text.tokens, whole)
        kept = whole[:-1] if text.ended_by == "end_of_text" else whole
        before, after = (their_tokenizer.decode(one, skip_special_tokens=False) for one in (ids, kept))
        if after.startswith(before):
            yield from told(f"greedy text after {prompt!r}", text.text, after.removeprefix(before))


def _usable(theirs: Any, context: str, continuation: str) -> bool:
    """HFLM itself fails for a continuation without a token after no context."""
    return bool(context or theirs.tok_encode(continuation, add_special_tokens=False))


def _asked(kind: str, requests: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arguments, number) for number, arguments in enumerate(requests)]
