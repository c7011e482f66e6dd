"""Collectives on torch tensors, started by MPI. Importing the package does not start MPI.

The names that are imported here as themselves are public.
"""

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
from .stream import Event as Event
from .stream import Stream as Stream
from .stream import Work as Work
from .trace import CollectiveEvent as CollectiveEvent
from .trace import Trace as Trace
from .trace import trace as trace
