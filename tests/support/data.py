"""The data sets that some tests read, which are not in the repository."""

import os
from pathlib import Path

import pytest

#: $COMMENGINE_TEST_DATA, or the folder shared/data beside the repository
DATA = Path(os.environ.get("COMMENGINE_TEST_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip the test unless each of these folders is in DATA."""
    missing = [name for name in names if not (DATA / name).is_dir()]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)} in {DATA}; set COMMENGINE_TEST_DATA")
