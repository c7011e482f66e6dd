"""Small, learnable data for the four tasks of fine-tuning in their original files, and a BERT to begin with."""

import json
from pathlib import Path

import numpy as np

from trainers.data.wordpiece import SPECIAL

#: words of one token each
LETTERS = [f"{a}{b}" for a in "bcdfg" for b in "aeiou"]
MARKS = ["yes", "no", "maybe", "same", "other", "is", "who", "not", "?", ".", "_", "xx"]
#: names and surnames, which stand in answers only
NAMES, SURNAMES = ["ada", "bob", "eve", "ira"], ["hart", "king", "lopez"]
WORDS = [*LETTERS, *MARKS, *NAMES, *SURNAMES, "##s", "##x"]
LABELS = ["contradiction", "entailment", "neutral"]


def vocabulary(path: Path) -> Path:
    """A vocab.txt of the words here."""
    path.write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    return path


def words(rng: np.random.Generator, low: int, high: int) -> list[str]:
    return [str(word) for word in rng.choice(LETTERS, int(rng.integers(low, high)))]


def mnli(folder: Path, rows: int = 240, dev: int = 51) -> Path:
    """The first word of the second sentence is the label: no, yes or maybe."""
    folder.mkdir()
    parses = [f"sentence{n}_{kind}parse" for kind in ("binary_", "") for n in (1, 2)]
    header = ["index", "promptID", "pairID", "genre", *parses, "sentence1", "sentence2", "label1", "gold_label"]
    for name, count, seed in (("train", rows, 1), ("dev_matched", dev, 2), ("dev_mismatched", dev - 10, 3),
                              ("test_matched", 7, 4), ("test_mismatched", 5, 5)):  # fmt: skip
        rng, lines = np.random.default_rng(seed), ["\t".join(header[:10] if "test" in name else header)]
        for number in range(count):
            label = int(rng.integers(3))
            first, second = " ".join(words(rng, 1, 6)), " ".join([["no", "yes", "maybe"][label], *words(rng, 0, 4)])
            cells = [str(number), *["-"] * 7, first, second]
            lines.append("\t".join(cells if "test" in name else [*cells, LABELS[label], LABELS[label]]))
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def qqp(folder: Path, rows: int = 240) -> Path:
    """Questions are the same if the second one begins with "same"; the files end their lines in two ways."""
    folder.mkdir()
    for name, count, seed in (("train", rows, 1), ("dev", 50, 2), ("test", 9, 3)):
        rng = np.random.default_rng(seed)
        header = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
        lines = ["\t".join(["id", "question1", "question2"] if name == "test" else header)]
        for number in range(count):
            label = int(rng.integers(2))
            first, second = " ".join([*words(rng, 1, 5), '"', "?"]), " ".join([["other", "same"][label], "?"])
            cells = (
                [str(number), first, second] if name == "test" else [str(number), "1", "2", first, second, str(label)]
            )
            lines.append("\t".join(cells))
        end = "\r\n" if name == "dev" else "\n"
        (folder / f"{name}.tsv").write_text(end.join(lines) + end, newline="")
    return folder


def race(folder: Path, articles: int = 60) -> Path:
    """The right option is "yes"."""
    for split, seed in (("train", 1), ("dev", 2), ("test", 3)):
        rng = np.random.default_rng(seed)
        for level, share in (("middle", 0.5), ("high", 0.5)):
            (folder / split / level).mkdir(parents=True)
            for number in range(int((articles if split == "train" else 10) * share)):
                questions, options, answers = [], [], []
                for place in range(3):
                    right = int(rng.integers(4))
                    wrong = iter(["no", "maybe", "other"])
                    options.append(["yes" if n == right else next(wrong) for n in range(4)])
                    questions.append("who is _ ?" if place % 2 else "who is ?")
                    answers.append("ABCD"[right])
                value = {"article": " ".join(words(rng, 4, 12)), "questions": questions, "options": options,
                         "answers": answers, "id": f"{level}{number}.txt"}  # fmt: skip
                (folder / split / level / f"{number}.txt").write_text(json.dumps(value))
    return folder


def squad(folder: Path, version: str = "1.1", paragraphs: int = 80) -> Path:
    """The answer is a name, half of the time with a surname; in version 2.0 every third paragraph has none."""
    folder.mkdir(exist_ok=True)
    for split, count, seed in (("train", paragraphs, 1), ("dev", 20, 2)):
        rng, found = np.random.default_rng(seed), []
        for number in range(count):
            before, after = words(rng, 1, 20), words(rng, 0, 6)
            answer = " ".join([str(rng.choice(NAMES)), *([str(rng.choice(SURNAMES))] if number % 2 else [])])
            impossible = version == "2.0" and number % 3 == 0
            context = " ".join([*before, "not" if impossible else answer, *after, "."])
            start = len(" ".join(before)) + 1
            answers = [] if impossible else [{"text": answer, "answer_start": start}]
            qas = [
                {"id": f"{split}{number}-{place}", "question": "who is ?", "answers": answers}
                | ({"is_impossible": impossible} if version == "2.0" else {})
                for place in range(2)
            ]
            found.append({"context": context, "qas": qas})
        value = {"version": version, "data": [{"title": "Toy", "paragraphs": found}]}
        (folder / f"{split}-v{version}.json").write_text(json.dumps(value))
    return folder


MAKERS = {"mnli": mnli, "qqp": qqp, "race": race, "squad": squad}


def pretraining(vocab: Path, save: Path) -> list[str]:
    """The arguments of a pretrain_bert that saves a small BERT, which has learnt next to nothing."""
    return [
        "--mock-data", "--vocab-size", str(len(SPECIAL) + len(WORDS)), "--num-layers", "2", "--hidden-size", "64",
        "--num-attention-heads", "4", "--seq-length", "48", "--make-vocab-size-divisible-by", "64",
        "--train-iters", "1", "--eval-iters", "0", "--save", str(save),
    ]  # fmt: skip
