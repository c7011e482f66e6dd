"""Make a training corpus: ``mpiexec -n 8 python -m trainers.prepare_corpus --input FILES --output FILE.jsonl``.

The stages, in this order: mend the text (ftfy); keep some languages (py3langid, if ``--languages`` is given); remove
text that held-out files have (if ``--decontaminate`` is given); drop documents below 128 tokens (if a tokenizer is
given); drop documents that are equal, or nearly, to a kept one. The output has one JSON object a line, in the order of
the texts' hashes: the same file on any number of ranks and from any order of the input. NAME-report.json, .txt and
.png beside NAME.jsonl say what each stage kept and why.

Documents wait on disk, so the input may be larger than the memory of all ranks. The libraries are the extra "corpus".
"""

from __future__ import annotations

import os
from argparse import BooleanOptionalAction, RawDescriptionHelpFormatter
from collections.abc import Sequence

from commengine import Communicator, launch
from commengine.rank_zero import on_rank_zero

from .cleaning import summary
from .cleaning.pipeline import prepare
from .cleaning.settings import DEFAULT_MIN_TOKENS, DOCUMENT, LEAST_JACCARD, NOTHING, PIECES, CorpusSettings
from .options import FRACTION, Parser, between


def parser() -> Parser:
    """The command line."""
    default = CorpusSettings([], "")
    made = Parser(prog="prepare_corpus", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = made.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help=".jsonl or .json: one document per line; any other name: UTF-8 text",
    )
    add("--json-key", default=default.json_key, help="key of the text in a JSON line (default: %(default)s)")
    add("--split-on-blank-lines", action="store_true", help="text files: each paragraph is a document, not each file")
    add("--output", required=True, metavar="FILE", help="write the documents that are kept: NAME.jsonl")
    add("--overwrite", action="store_true", help="replace the corpus that is in --output")
    add("--fix-text", action=BooleanOptionalAction, default=default.fix_text, help="mend texts by ftfy (default: yes)")
    add("--languages", nargs="+", default=[], metavar="CODE", help="keep these languages, such as en (default: all)")
    add("--tokenizer-model", metavar="FILE", help="a tokenizer.json, to count tokens")
    add("--vocab-file", metavar="FILE", help="GPT-2's encoder.json, to count its tokens; needs --merge-file")
    add("--merge-file", metavar="FILE", help="GPT-2's vocab.bpe; needs --vocab-file")
    add(
        "--min-tokens",
        type=int,
        valid=between(0, 2**31),
        metavar="N",
        help="drop documents of fewer tokens, the end token included; 0: none "
        f"(default: {DEFAULT_MIN_TOKENS} with a tokenizer, else 0)",
    )
    add(
        "--deduplicate",
        action=BooleanOptionalAction,
        default=default.deduplicate,
        help="drop documents that are equal or similar to a kept one (default: yes)",
    )
    add(
        "--jaccard",
        type=float,
        valid=between(LEAST_JACCARD, 1),
        default=default.jaccard,
        metavar="J",
        help="from this Jaccard similarity of their character 5-grams on, documents are similar (default: %(default)s)",
    )
    add("--decontaminate", nargs="+", default=[], metavar="FILE", help="held-out files, such as test sets")
    add(
        "--decontaminate-by",
        choices=(DOCUMENT, PIECES, NOTHING),
        default=default.decontaminate_by,
        help=f"{DOCUMENT}: drop a document that has too much held-out text; {PIECES}: cut out 13-grams of words with "
        f"200 characters on either side, as Megatron-LM does; {NOTHING}: measure only (default: %(default)s)",
    )
    add(
        "--decontaminate-share",
        type=float,
        valid=FRACTION,
        default=default.decontaminate_share,
        metavar="S",
        help=f"{DOCUMENT}: too much is more than this share of the document's 8-grams (default: %(default)s)",
    )
    add("--work-dir", metavar="DIR", help="a folder for the text that waits on disk (default: the output's)")
    add(
        "--buffer-megabytes",
        type=int,
        valid=between(1, 2**20),
        default=default.buffer_megabytes,
        metavar="MB",
        help="a rank reads an eighth of it at a time (default: %(default)s)",
    )
    return made


def settings(argv: Sequence[str] | None) -> CorpusSettings:
    """The valid settings that the command line gives. Raises ValueError, naming the option, and SystemExit for --help.

    argv: None for the arguments of this process.
    """
    given = vars(parser().parse_args(argv))
    given.pop("config")
    if given["min_tokens"] is None:
        has_tokenizer = given["tokenizer_model"] is not None or given["vocab_file"] is not None
        given["min_tokens"] = DEFAULT_MIN_TOKENS if has_tokenizer else 0
    made = CorpusSettings(**given)
    made.validate()
    return made


def main(world: Communicator) -> None:
    """One rank of the command. Rank 0 reads the flags; an error on any rank is raised on every rank."""
    chosen = CorpusSettings(**on_rank_zero(world, lambda: settings(None).to_json()))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each rank has a core
    result = prepare(world, chosen)
    on_rank_zero(world, lambda: report(result, chosen))


def report(result: dict[str, object], chosen: CorpusSettings) -> None:
    """Print the report, and write it beside the output. On rank 0."""
    summary.save(result, *(chosen.report(suffix) for suffix in (".json", ".txt", ".png")))
    print(summary.text(result), end="", flush=True)


if __name__ == "__main__":
    launch.run(main, device="cpu")
