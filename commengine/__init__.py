"""Collectives on torch tensors, started by MPI. Importing the package does not start MPI."""

from . import launch
from .cartesian import CartesianGrid
from .communicator import Communicator
from .decomposition import Decomposition
from .errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, LaunchError, UsageError
from .grid import GridLayout, ProcessGrid
from .host.switch_points import SwitchPoints
from .stream import Event, Stream, Work
from .trace import CollectiveEvent, Trace, trace

__all__ = [
    "CartesianGrid",
    "CollectiveError",
    "CollectiveEvent",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "Decomposition",
    "Event",
    "GridLayout",
    "LaunchError",
    "ProcessGrid",
    "Stream",
    "SwitchPoints",
    "Trace",
    "UsageError",
    "Work",
    "launch",
    "trace",
]
