"""The report of a corpus: what each stage kept and why, as text, as JSON and as a picture."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TITLES = {
    "read": "read", "fix": "mended by ftfy", "language": "language", "decontaminate": "held-out text",
    "length": "length", "deduplicate": "duplicates",
}  # fmt: skip
#: reasons for dropping that are drawn: those of most documents
_DRAWN = 8


def text(summary: dict[str, Any]) -> str:
    """The report for people. summary: of `trainers.cleaning.pipeline.prepare`."""
    lines = [
        f"{summary['documents_out']:,} of {summary['documents_in']:,} documents kept, {summary['ranks']} ranks, "
        f"{summary['seconds']:.1f} s, {summary['documents_per_second']:,.0f} documents/s",
        "",
        f"{'stage':<18}{'documents':>12}{'dropped':>11}{'changed':>11}{'MB of text':>13}{'seconds':>10}",
    ]
    for stage in summary["stages"]:
        dropped = sum(stage["dropped"].values())
        seconds = f"{stage['seconds']:.1f}" if stage["seconds"] else ""
        lines.append(
            f"{TITLES[stage['name']]:<18}{stage['documents_out']:>12,}{dropped:>11,}{stage['changed']:>11,}"
            f"{stage['bytes_out'] / 1e6:>13.1f}{seconds:>10}"
        )
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in summary["seconds_of_parts"].items())
    lines += ["", f"also: {parts}", *_settings(summary["settings"])]
    for stage in summary["stages"]:
        lines += _reasons(stage)
    candidates = summary["candidates"]
    if candidates["compared"]:
        lines += ["", f"{candidates['compared']:,} pairs compared, {candidates['similar']:,} similar enough"]
    if summary["held_out"]:
        lines += ["", "distinct 8-grams of held-out files that the corpus has", ""]
        lines.append(f"  {'8-grams':>10}{'input':>10}{'output':>10}  file")
        for row in summary["held_out"]:
            lines.append(
                f"  {row['ngrams']:>10,}{row['share_in_input']:>10.2%}{row['share_in_output']:>10.2%}  {row['file']}"
            )
    lines += ["", f"peak memory of a rank: {max(summary['peak_memory_bytes']) / 1e6:.0f} MB"]
    return "\n".join([*lines, ""])


def _settings(settings: dict[str, Any]) -> Iterator[str]:
    """What was left out, so that nobody takes it for done."""
    if not settings["fix_text"]:
        yield "not done: mending (--no-fix-text)"
    if not settings["min_tokens"]:
        yield "not done: dropping short documents, which needs a tokenizer (--tokenizer-model FILE)"
    if not settings["deduplicate"]:
        yield "not done: dropping duplicates (--no-deduplicate)"
    if settings["decontaminate"] and settings["decontaminate_by"] == "nothing":
        yield "not done: removing held-out text (--decontaminate-by nothing)"


def _reasons(stage: dict[str, Any]) -> Iterator[str]:
    """Why a stage dropped documents, and some of them."""
    for reason, count in sorted(stage["dropped"].items(), key=lambda item: (-item[1], item[0])):
        if not count:
            continue
        yield ""
        yield f"{TITLES[stage['name']]}: {count:,} dropped: {reason}"
        for _, beginning, more in stage["examples"].get(reason, []):
            yield f"  {_shown(beginning)}"
            if "similar_to" in more:
                yield f"    {more['jaccard']:.2f} {_shown(more['similar_to'], 92)}"


def _shown(beginning: str, width: int = 100) -> str:
    line = " ".join(beginning.split())
    return line if len(line) <= width else f"{line[: width - 4]} ..."


def save(summary: dict[str, Any], json_file: Path, text_file: Path, picture: Path) -> None:
    """Write the three files of the report. Raises OSError."""
    json_file.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text_file.write_text(text(summary), encoding="utf-8")
    draw(summary, picture)


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draw the documents that each stage kept and dropped, and the similarities of the candidates."""
    from matplotlib.figure import Figure

    stages = summary["stages"]
    figure = Figure(figsize=(9, 0.5 * len(stages) + 1.8), layout="constrained")
    kept_axes, similar_axes = figure.subplots(1, 2, width_ratios=(3, 2))
    names = [TITLES[stage["name"]] for stage in stages]
    kept = [stage["documents_out"] for stage in stages]
    kept_axes.barh(names, kept, color="C0", label="kept")
    left = kept
    dropped: Counter[str] = sum((Counter(stage["dropped"]) for stage in stages), Counter())
    for number, (reason, _) in enumerate(dropped.most_common(_DRAWN), 1):
        of_stages = [stage["dropped"].get(reason, 0) for stage in stages]
        kept_axes.barh(names, of_stages, left=left, color=f"C{number}", label=f"dropped: {reason}")
        left = [one + more for one, more in zip(left, of_stages, strict=True)]
    kept_axes.invert_yaxis()
    kept_axes.set_xlabel("documents")
    figure.legend(loc="outside lower left", fontsize="small", ncols=2)
    counts = summary["candidates"]["jaccard_histogram"]
    width = 1 / len(counts)
    similar_axes.bar([width * (number + 0.5) for number in range(len(counts))], counts, width=0.9 * width)
    similar_axes.axvline(summary["settings"]["jaccard"], color="black", linestyle=":")
    similar_axes.set_xlabel("Jaccard similarity of compared pairs")
    similar_axes.set_ylabel("pairs")
    figure.savefig(path, dpi=120)
