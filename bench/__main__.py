"""The list of this package's commands: ``python -m bench``."""

import sys

from commengine.command.entry import list_modules

if __name__ == "__main__":
    sys.exit(list_modules("bench"))
