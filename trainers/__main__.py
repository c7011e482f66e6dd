"""The programs of this package: ``python -m trainers``."""

from __future__ import annotations

import sys

from commengine.options.programs import answer

PROGRAMS = {
    "pretrain_gpt": "train a GPT or a Llama on text",
    "pretrain_bert": "train a BERT on sentences",
    "finetune": "fine-tune a BERT on MNLI, QQP, SQuAD or RACE",
    "evaluate": "the worth of a model on text: WikiText, LAMBADA, held-out documents, lm-evaluation-harness",
    "generate": "text that continues prompts",
    "convert": "models of other programs, both ways: Hugging Face and Megatron-LM",
    "compare": "compare two runs bit by bit",
    "preprocess_data": "turn text into an indexed data set, and train a tokenizer",
    "prepare_corpus": "make a training corpus: filters, near-duplicates, held-out text",
    "supervise": "bring a run to its end over crashes",
}

if __name__ == "__main__":
    sys.exit(answer("trainers", PROGRAMS))
