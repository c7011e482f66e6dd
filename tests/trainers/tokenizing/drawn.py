"""Drawn tokenizers against ``AutoTokenizer``: ``python -m tests.trainers.tokenizing.drawn --number 300``.

Each folder is one of BPE, WordPiece, WordLevel and Unigram, with files as transformers 2 to 5 wrote them, or by hand.
The results are lines of JSON in ``runs/tokenizers/SEED.jsonl``; the command goes on after the last one. ``--harness N``
compares lm-evaluation-harness's numbers and greedy texts on the first N folders that hold a model, too
(`tests.support.tokenizers.harness`). The exit status is 1 if something is wrong.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.support.tokenizers.comparing import compare, files
from tests.support.tokenizers.drawing import draw_folder
from tests.support.tokenizers.harness import differences, has_model, make_model


def harness(folder: Path, seed: int) -> list[str]:
    """What differs with a model in the folder."""
    from mpi4py import MPI

    from commengine import Communicator

    make_model(folder, seed)
    with Communicator(MPI.COMM_SELF, device="cpu") as world:
        try:
            return list(differences(folder, world))
        except Exception as error:
            return [f"{type(error).__name__}: {error}"[:300]]


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--number", type=int, default=300)
    made.add_argument("--harness", type=int, default=0)
    made.add_argument("--only", type=int, help="compare this folder alone, and show its files")
    made.add_argument("--results", type=Path, default=Path("runs/tokenizers"))
    return made


def main() -> int:
    """The command: its exit status."""
    given = parser().parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    import transformers

    transformers.logging.set_verbosity_error()
    root = Path(tempfile.mkdtemp(prefix="drawn-tokenizers-"))
    try:
        if given.only is not None:
            print(
                draw_folder(given.seed, given.only, root / "one"), *compare(root / "one"), files(root / "one"), sep="\n"
            )
            return 0
        return _all(given, root)
    finally:
        shutil.rmtree(root)


def _all(given: argparse.Namespace, root: Path) -> int:
    given.results.mkdir(parents=True, exist_ok=True)
    path = given.results / f"{given.seed}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    harnessed = sum("harness" in row for row in rows)
    with path.open("a") as out:
        for number in range(len(rows), given.number):
            folder = root / str(number)
            drawn = draw_folder(given.seed, number, folder)
            result, why = compare(folder)
            row = {"number": number, "drawn": drawn, "result": result, "why": why}
            if result == "equal" and harnessed < given.harness and has_model(folder):
                faults, harnessed = harness(folder, given.seed + number), harnessed + 1
                row |= {"harness": "equal"} if not faults else {"harness": "wrong", "why": "; ".join(faults[:3])}
            rows.append(row)
            print(json.dumps(row, ensure_ascii=False), file=out, flush=True)
            if "wrong" in (result, row.get("harness")):
                print(number, drawn, row["why"], flush=True)
            shutil.rmtree(folder)
    counts = Counter(row["result"] for row in rows[: given.number])
    print(f"seed {given.seed}:", ", ".join(f"{count} {result}" for result, count in counts.most_common()))
    print("harness and texts:", Counter(row["harness"] for row in rows[: given.number] if "harness" in row))
    reasons = Counter(row["why"].split(":")[1].strip() if ":" in row["why"] else row["why"]
                      for row in rows[: given.number] if row["result"] == "refused")  # fmt: skip
    print("refused:", "; ".join(f"{count} {why}" for why, count in reasons.most_common(12)))
    return int(counts["wrong"] > 0 or any(row.get("harness") == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
