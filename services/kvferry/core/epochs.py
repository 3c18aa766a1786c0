"""The table of page epochs, wherever it is kept: a list, or memory that peers can read."""

from typing import Protocol


class EpochTable(Protocol):
    """One unsigned 64-bit number a page. Written by the block pool alone (`engine.blocks`)."""

    def __len__(self) -> int: ...

    def __getitem__(self, block: int, /) -> int: ...

    def __setitem__(self, block: int, epoch: int, /) -> None: ...
