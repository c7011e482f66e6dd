"""lm-evaluation-harness, which runs on rank 0, on a model that all ranks hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window, make_table

from commengine import UsageError
from trainers.checkpoints import disk

from .passages import Passage
from .service import ModelService
from .settings import EvaluateSettings, names_of

#: tokens of a text that a task does not limit, as in the harness
MAX_GEN_TOKS = 256
#: samples of the standard errors that are not computed in closed form
BOOTSTRAP_ITERS = 1000


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A language model as lm-evaluation-harness asks for one. On rank 0, while the other ranks serve.

    service: the model. length: the most tokens that it reads at once. The results are those of the harness's own
    ``HFLM`` on the same weights and tokenizer: the same prefix token, tokens around a text, windows and truncation.
    """

    def __init__(self, service: ModelService, *, length: int, max_gen_toks: int = MAX_GEN_TOKS) -> None:
        super().__init__()
        self.service, self.max_length, self.max_gen_toks = service, length, max_gen_toks
        self._device = "cpu"
        #: the run's; ``tokenizer`` stays None, because the harness takes it for one of transformers
        self.own_tokenizer = service.tokenizer

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text; None if the tokenizer names none."""
        return None if self.own_tokenizer.end_token is None else self.own_tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return self.own_tokenizer.vocabulary()[str(self.own_tokenizer.start_token)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text, and around it what the tokenizer puts there, as <s>, but for a text that has it."""
        del kwargs
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.own_tokenizer.decode([self.prefix_token_id]))
        return self.own_tokenizer.encode_around(string, around=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        del disable_tqdm, kwargs
        passages, counted = [], []
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens is longer than the {self.max_length} tokens that "
                    "the model reads"
                )
            if continuation:  # an empty one is certain
                tokens = np.array([*context, *continuation][-self.max_length - 1 :], dtype=np.int32)
                passages.append(Passage(tokens, len(continuation)))
                counted.append(number)
        results = [(0.0, True)] * len(requests)
        scores = self.service.score(passages)
        for place, number in enumerate(counted):
            greedy = scores.predicted_of(place) == requests[number][2]
            results[number] = (-float(scores.nll[place]), greedy)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in nats, in windows that do not overlap, after a prefix token."""
        del disable_tqdm
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners = []
        for number, request in enumerate(requests):
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1,
            )  # fmt: skip
            for window in cut:
                context, continuation = make_disjoint_window(window)
                windows.append((None, context, continuation))
                owners.append(number)
        found = [0.0] * len(requests)
        for number, (log_likelihood, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            found[number] += log_likelihood
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that continues each context, before the first of its stop strings.

        A context that is too long loses its beginning, so that there is room for the new tokens within the model's
        positions, or for half of them if the task asks for more. The tokens are decoded apart from the context, as the
        harness does: a decoder of SentencePiece takes the blank off such a text.
        """
        del disable_tqdm
        prompts: list[list[int]] = []
        asked: list[dict[str, Any]] = []
        for request in requests:
            context, given = request.args
            kwargs = normalize_gen_kwargs(given, self.max_gen_toks)
            count = int(kwargs["max_gen_toks"])
            room = max(self.max_length - count, self.max_length // 2, 1)
            begin = self.own_tokenizer.begin_token  # here the harness does not take the end token in its place
            tokens = self.tok_encode(context, add_special_tokens=begin is None or not context.startswith(begin))
            prompts.append(tokens[-room:] or [self.prefix_token_id])
            sampling = {"temperature": float(kwargs.get("temperature") or 0.0) if kwargs.get("do_sample") else 0.0}
            if sampling["temperature"]:
                share = kwargs.get("top_p")
                sampling |= {"top_k": int(kwargs.get("top_k") or 0), "top_p": 1.0 if share is None else float(share)}
            end = None if self.eot_token_id is None else self.own_tokenizer.decode([self.eot_token_id])
            stops = [stop for stop in handle_stop_sequences(kwargs.get("until"), eos=end) if stop]
            asked.append({"count": count, "stop": stops, "sampling": sampling})
        texts = []
        for one, tokens in zip(asked, self.service.generate(prompts, asked), strict=True):
            text = self.own_tokenizer.decode(tokens, special=False)
            for stop in one["stop"]:
                text = text.partition(stop)[0]
            texts.append(text)
        return texts


def evaluate_tasks(config: EvaluateSettings, service: ModelService, length: int) -> None:
    """Run the harness on the tasks of ``config``, print its tables, and write the files that are asked for. On rank 0.

    length: the most tokens that the model reads at once. Raises UsageError for an unknown task, and what the harness
    raises.
    """
    manager = TaskManager(include_path=config.include_path)
    if unknown := [name for name in names_of(config) if not manager.match_tasks([name])]:
        where = "" if config.include_path is None else f" and in {config.include_path}"
        raise UsageError(f"no such task: {', '.join(unknown)} (looked for among the harness's{where})")
    limit = config.limit if config.limit is None or config.limit < 1 else int(config.limit)
    results: dict[str, Any] = simple_evaluate(
        model=HarnessModel(service, length=length, max_gen_toks=config.max_gen_toks), tasks=names_of(config),
        num_fewshot=config.num_fewshot, limit=limit, bootstrap_iters=BOOTSTRAP_ITERS,
        log_samples=config.samples is not None, task_manager=manager, random_seed=config.seed,
        numpy_random_seed=config.seed, torch_random_seed=config.seed, fewshot_random_seed=config.seed,
    )  # fmt: skip
    samples = results.pop("samples", {})
    print(make_table(results), flush=True)
    if results.get("groups"):
        print(make_table(results, "groups"), flush=True)
    if config.json is not None:
        content = json.dumps(results, indent=1, default=handle_non_serializable, ensure_ascii=False) + "\n"
        disk.rewrite(Path(config.json), content.encode())
    if config.samples is not None:
        rows = ({"task": task} | row for task, of_task in samples.items() for row in of_task)
        lines = (json.dumps(row, default=handle_non_serializable, ensure_ascii=False) for row in rows)
        disk.rewrite(Path(config.samples), "".join(f"{line}\n" for line in lines).encode())
