"""A corpus made by a plain script on datasketch, one text after the other: the peer in ``bench.contest corpus``.

It has the stages and the rules of trainers.prepare_corpus, as one would write them with the libraries' own functions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from pathlib import Path

import ftfy
from datasketch import MinHash, MinHashLSH

from trainers.data.tokenizer import Tokenizer

BANDS, ROWS = 25, 5


def grams(text: str) -> set[str]:
    return {text[at : at + 5] for at in range(len(text) - 4)}


def ngrams(text: str) -> list[str]:
    words = re.findall(r"\w+", text.lower())
    return [" ".join(words[at : at + 8]) for at in range(len(words) - 7)]


def main() -> None:
    parser = argparse.ArgumentParser("bench.peers.datasketch_corpus", description=__doc__)
    parser.add_argument("--input", required=True)
    parser.add_argument("--output", required=True)
    for name in ("--tokenizer-model", "--vocab-file", "--merge-file", "--decontaminate"):
        parser.add_argument(name)
    given = parser.parse_args()
    began = time.perf_counter()
    tokenizer = None
    if given.tokenizer_model:
        tokenizer = Tokenizer.from_file(given.tokenizer_model)
    elif given.vocab_file:
        tokenizer = Tokenizer.from_gpt2(given.vocab_file, given.merge_file)

    with Path(given.input).open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    count = len(texts)
    texts = [ftfy.fix_text(text) for text in texts]
    if given.decontaminate:
        held_out = set(ngrams(Path(given.decontaminate).read_text(encoding="utf-8")))
        clean = []
        for text in texts:
            found = ngrams(text)
            if not found or sum(gram in held_out for gram in found) / len(found) <= 0.1:
                clean.append(text)
        texts = clean
    if tokenizer is not None:
        encoded = tokenizer.iter_encode_batch(texts)
        texts = [text for text, ids in zip(texts, encoded, strict=True) if len(ids) + 1 >= 128]

    texts = sorted(set(texts), key=lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest())
    index = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    kept: list[str] = []
    for text in texts:
        mine = grams(text)
        sketch = MinHash(num_perm=BANDS * ROWS)
        sketch.update_batch([gram.encode() for gram in mine])
        for number in index.query(sketch):
            theirs = grams(kept[number])
            if len(mine & theirs) / len(mine | theirs) >= 0.7:
                break
        else:
            index.insert(len(kept), sketch)
            kept.append(text)
    with Path(given.output).open("w", encoding="utf-8") as file:
        for text in kept:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    seconds = time.perf_counter() - began
    report = Path(given.output).with_name(f"{Path(given.output).stem}-report.json")
    report.write_text(json.dumps({"documents_in": count, "documents_out": len(kept), "seconds": seconds}))


if __name__ == "__main__":
    main()
