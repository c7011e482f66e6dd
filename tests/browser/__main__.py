"""Open the built site in a real browser, from files and without a network: ``python -m tests.browser``.

It searches for words of the pages and for names of the API, which a seed draws, and follows what it finds. It opens
every page, and every public name must have its anchor. No request may leave, and the console may show no error. make
docs builds the site first. The exit status is 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import random
import re
import shutil
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support import documents
from tests.support.mpirun import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DIRECTIVE = re.compile(r"^\.\. auto(?P<kind>\w+):: (?P<name>[\w.]+)$", re.MULTILINE)
#: the packages of which every public name is in the reference, and their pages
PACKAGES = {
    "commengine": "commengine",
    "commengine.cost": "cost",
    "tplayers": "tplayers",
    "tplayers.formulas": "formulas",
}
#: a word of more pages than these is too common to be looked for
RARE = 8


def anchors() -> dict[str, str]:
    """The anchor of each documented name, and its page in the site."""
    found = {}
    for path in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for kind, name in DIRECTIVE.findall(path.read_text()):
            found["module-" * (kind == "module") + name] = f"docs/reference/{path.stem}.html"
    return found


def undocumented() -> list[str]:
    """The public names that have no directive."""
    known = {(page, name.split(".")[-1]) for name, page in anchors().items()}
    missing = []
    for package, page in PACKAGES.items():
        module = importlib.import_module(package)
        public = [
            name for name in dir(module) if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
        ]
        missing += [f"{package}.{name}" for name in public if (f"docs/reference/{page}.html", name) not in known]
    return missing


def words() -> dict[str, set[str]]:
    """The words of the pages' sentences that are long and rare: the pages in the site that have each."""
    found = defaultdict(set)
    for path in documents.PAGES:
        if path.parent.name == "docs":
            text = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|^#.*$", " ", documents.prose(path), flags=re.MULTILINE)
            for word in re.findall(r"(?<![\w/.-])[a-z]{6,}(?![\w/.-])", text):
                found[word].add(f"docs/{path.stem}.html")
    return {word: pages for word, pages in found.items() if len(pages) <= RARE}


def wanted(seed: int, count: int) -> list[tuple[str, set[str]]]:
    """``count`` words, one half out of sentences and one half names of the API, and the addresses of each."""
    draw, of_pages, of_api = random.Random(seed), words(), defaultdict(set)
    for name, page in anchors().items():
        of_api[name.split(".")[-1]].add(f"{page}#{name}")
    half = count // 2
    return [
        *((word, of_pages[word]) for word in draw.sample(sorted(of_pages), count - half)),
        *((name, of_api[name]) for name in draw.sample(sorted(of_api), half)),
    ]


class Check:
    """The site in ``folder``, open on ``page`` of a browser. wrong: what was found so far."""

    def __init__(self, page: Any, folder: Path) -> None:
        self.page, self.folder, self.wrong, self.files = page, folder, list[str](), set[str]()
        page.context.on("request", self._requested)
        page.context.route(re.compile(r"^(?!file:|data:|blob:)"), lambda route: route.abort())
        page.on("console", lambda message: message.type == "error" and self._say(f"console: {message.text}"))
        page.on("pageerror", lambda error: self._say(f"error of a script: {error}"))
        page.on("requestfailed", lambda request: self._say(f"cannot be loaded: {request.url}"))

    def open(self, address: str) -> None:
        self.page.goto((self.folder / address).as_uri(), wait_until="load")

    def search(self, word: str) -> list[str]:
        """The addresses that the search field of the first page finds, in order."""
        self.open("docs/index.html")
        self.page.locator("input[name=q]:visible").first.fill(word)
        self.page.keyboard.press("Enter")
        self.page.wait_for_url("**/search.html?*")
        self.page.wait_for_function(
            "/finished|did not match/.test(document.querySelector('#search-results .search-summary')?.textContent)"
        )
        return [self.address(href) for href in self.page.eval_on_selector_all(
            "#search-results ul.search > li > a", "links => links.map(link => link.href)"
        )]  # fmt: skip

    def address(self, url: str) -> str:
        """``url`` without the folder of the site and the words to mark."""
        parts = urlsplit(url)
        path = Path(unquote(parts.path)).relative_to(self.folder).as_posix()
        return path + (f"#{parts.fragment}" if parts.fragment else "")

    def has(self, anchor: str) -> bool:
        return bool(self.page.evaluate("id => document.getElementById(id)?.getClientRects().length > 0", anchor))

    def _requested(self, request: Any) -> None:
        scheme = urlsplit(request.url).scheme
        if scheme == "file":
            self.files.add(request.url)
        elif scheme not in ("data", "blob"):
            self._say(f"leaves: {request.url}")

    def _say(self, text: str) -> None:
        self.wrong.append(f"{self.page.url}: {text}")


def check(page: Any, folder: Path, seed: int, count: int) -> list[str]:
    """Search, open all pages, look for anchors: what is wrong."""
    site = Check(page, folder)
    print(f"seed {seed}\n{'word':32}{'rank':>6}{'found':>7}  page")
    for word, pages in wanted(seed, count):
        found = site.search(word)
        ranks = [number for number, one in enumerate(found) if one in pages or one.split("#")[0] in pages]
        print(f"{word:32}{ranks[0] + 1 if ranks else '-':>6}{len(found):>7}  {found[ranks[0]] if ranks else ''}")
        if not ranks:
            site.wrong.append(f"a search for {word!r} does not find {' or '.join(sorted(pages))}")
            continue
        page.locator("#search-results ul.search > li > a").nth(ranks[0]).click()
        page.wait_for_load_state("load")
        if site.address(page.url).split("#")[0] != found[ranks[0]].split("#")[0]:
            site.wrong.append(f"the link for {word!r} leads to {page.url}")

    site.open("index.html")
    page.wait_for_url("**/docs/index.html", wait_until="load")
    pages = sorted({path.relative_to(folder).as_posix() for path in folder.rglob("*.html")} - {"index.html"})
    names = anchors()
    for one in pages:
        site.open(one)
        site.wrong.extend(f"{one}: no anchor {name}" for name, at in names.items() if at == one and not site.has(name))
    site.wrong.extend(f"{at}, the page of {name}, is not there" for name, at in names.items() if at not in pages)
    site.wrong.extend(f"{name} is not in the reference" for name in undocumented())
    print(f"opened {len(pages)} pages by {len(site.files)} files; looked for {len(names)} anchors")
    return site.wrong


def main(arguments: list[str]) -> int | str:
    parser = argparse.ArgumentParser("python -m tests.browser", description=__doc__)
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="the folder that make docs has built")
    parser.add_argument("--seed", type=int, default=1, help="draws the words")
    parser.add_argument("--words", type=int, default=20, help="how many; one half are names of the API")
    given = parser.parse_args(arguments)
    folder = given.site.resolve()
    if not (folder / "docs" / "index.html").exists():
        return f"tests.browser: there is no {folder}/docs/index.html: make docs builds it"
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return "tests.browser: there is no browser: apt install chromium, or put chromium or google-chrome on PATH"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return "tests.browser: there is no playwright: pip install playwright"
    began = time.monotonic()
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = playwright.chromium.launch(executable_path=browser, args=options)
        context = running.new_context(offline=True)
        context.set_default_timeout(60_000)
        wrong = check(context.new_page(), folder, given.seed, given.words)
        version = running.version
        running.close()
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    print(f"{len(wrong)} faults, in {time.monotonic() - began:.0f} s, with {Path(browser).name} {version}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
