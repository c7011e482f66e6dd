"""What the project uses of torch by private names: the table of them, and what takes their place."""

from .names import MissingInTorch as MissingInTorch
from .names import private as private
