"""Fields and gradients between two programs of one MPI job: Python here, and C, C++ and Fortran by the files beside it.

The other program includes ``commengine_bridge.h``, or uses the module of ``commengine_bridge.f90``. `include` names
their folder. docs/bridge.md has the protocol.
"""

from __future__ import annotations

from pathlib import Path


def include() -> str:
    """The folder of ``commengine_bridge.h``, for a compiler's ``-I``."""
    return str(Path(__file__).parent)
