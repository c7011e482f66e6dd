"""Make a training corpus: ``mpiexec -n 8 python -m trainers.prepare_corpus --input FILES --output FILE.jsonl``.

The stages, in this order: mend the text (ftfy); keep some languages (py3langid, if ``--languages`` is given); remove
text that held-out files have (if ``--decontaminate`` is given); drop documents below 128 tokens (if a tokenizer is
given); drop documents that are equal, or nearly, to a kept one. The output has one JSON object a line, in the order of
the texts' hashes: the same file on any number of ranks and from any order of the input. NAME-report.json, .txt and
.png beside NAME.jsonl say what each stage kept and why.

Documents wait on disk, so the input may be larger than the memory of all ranks. The libraries are the extra "corpus".
"""

from __future__ import annotations

from argparse import RawDescriptionHelpFormatter

if __name__ == "__main__":  # before the other imports, which take seconds
    from .cleaning.settings import CorpusSettings
    from .settings.command import answer_help

    answer_help(
        CorpusSettings, "prepare_corpus", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )  # fmt: skip

import os
from collections.abc import Sequence
from typing import Any

from commengine import Communicator, launch
from commengine.options.declared import parse
from commengine.rank_zero import on_rank_zero

from .cleaning import summary
from .cleaning.pipeline import prepare
from .cleaning.settings import CorpusSettings


def settings(argv: Sequence[str] | None) -> CorpusSettings:
    """The valid settings that the command line gives. Raises ValueError, naming the option, and SystemExit for --help.

    argv: None for the arguments of this process.
    """
    about: dict[str, Any] = {"description": __doc__, "formatter_class": RawDescriptionHelpFormatter}
    made = parse(CorpusSettings, argv, "prepare_corpus", **about).completed()
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
