"""``python -m commengine`` is the command ``commengine``."""

import sys

from commengine.command.entry import run

if __name__ == "__main__":
    sys.exit(run())
