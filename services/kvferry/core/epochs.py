"""Interface of the table of page epochs, which is a list or memory that peers can read."""

from typing import Protocol


class EpochTable(Protocol):
    """Table with an unsigned 64-bit epoch per page, indexed by page. Written only by
    `engine.schedule.blocks.block_pool`."""

    def __len__(self) -> int: ...

    def __getitem__(self, block: int, /) -> int: ...

    def __setitem__(self, block: int, epoch: int, /) -> None: ...
