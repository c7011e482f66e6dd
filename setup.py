"""The part of the project's metadata that pyproject.toml cannot say: a README that reads right on a package index.

README.md has relative links, which a package index does not have. COMMENGINE_REPOSITORY, such as
https://HOST/OWNER/commengine/blob/v0.2.0, makes them absolute at build time. Without it they become text, and pictures
their descriptions.
"""

import os
import re
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)(?P<target>[^)\s]+)\)")


def readme(text: str, repository: str) -> str:
    """The text of README.md for a package index."""

    def replaced(link: re.Match[str]) -> str:
        if repository:
            return f"{link['picture']}[{link['text']}]({repository.rstrip('/')}/{link['target']})"
        return f"({link['text']})" if link["picture"] else link["text"]

    return _LINK.sub(replaced, text)


if __name__ == "__main__":
    setup(
        long_description=readme(
            (Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
            os.environ.get("COMMENGINE_REPOSITORY", ""),
        ),
        long_description_content_type="text/markdown",
    )
