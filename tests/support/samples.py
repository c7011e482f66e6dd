"""Samples of which a test can tell where they come from."""

from typing import Any

from trainers.data.samples import Samples


class Named(Samples):
    """Samples that say what they are: the name of their source, the epoch in which they are drawn, their index."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> Any:
        return self.draw(0, n)

    def draw(self, epoch: int, n: int) -> Any:
        return self.name, epoch, n
