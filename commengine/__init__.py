"""Collectives on torch tensors, started by MPI. Importing the package does not start MPI.

The names below are public. Each is imported when it is first used, so that what needs no torch, such as the options of
a command, does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .trace import CollectiveEvent as CollectiveEvent
from .trace import Trace as Trace
from .trace import trace as trace  # now: its module has the same name

#: the version of the whole distribution
__version__ = "0.2.0"

if TYPE_CHECKING:
    from . import launch as launch
    from .cartesian import CartesianGrid as CartesianGrid
    from .communicator import Communicator as Communicator
    from .decomposition import Decomposition as Decomposition
    from .errors import CollectiveError as CollectiveError
    from .errors import CollectiveMismatch as CollectiveMismatch
    from .errors import CollectiveTimeout as CollectiveTimeout
    from .errors import LaunchError as LaunchError
    from .errors import UsageError as UsageError
    from .grid import GridLayout as GridLayout
    from .grid import ProcessGrid as ProcessGrid
    from .host.switch_points import SwitchPoints as SwitchPoints
    from .operations.exchange import Exchange as Exchange
    from .stream import Event as Event
    from .stream import Stream as Stream
    from .stream import Work as Work

#: the public names, and the modules that they are in
_MODULES = {
    "launch": ".launch",
    "CartesianGrid": ".cartesian",
    "Communicator": ".communicator",
    "Decomposition": ".decomposition",
    "CollectiveError": ".errors",
    "CollectiveMismatch": ".errors",
    "CollectiveTimeout": ".errors",
    "LaunchError": ".errors",
    "UsageError": ".errors",
    "GridLayout": ".grid",
    "ProcessGrid": ".grid",
    "SwitchPoints": ".host.switch_points",
    "Exchange": ".operations.exchange",
    "Event": ".stream",
    "Stream": ".stream",
    "Work": ".stream",
    "CollectiveEvent": ".trace",
    "Trace": ".trace",
    "trace": ".trace",
}


if not TYPE_CHECKING:  # else a type checker takes any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(_MODULES[name], __name__)
        value = module if name == "launch" else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(_MODULES)
