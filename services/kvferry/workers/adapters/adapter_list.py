"""The list of adapters in a file: its format, and the changes from one list to the next. Pure.

```toml
[[adapters]]
name = "support"
path = "/models/adapters/support-v2"
digest = "5f0c..."  # optional: first digits of the content's digest
```
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from kvferry.core.errors import UsageError
from kvferry.core.ids import MAX_ADAPTER_NAME_CHARS
from kvferry.core.process.struct_types import describe
from kvferry.core.process.toml_text import parse_toml
from kvferry.engine.schedule.adapters.adapter_store import MAX_ADAPTERS

MAX_LIST_BYTES = 4 << 20


class ListedAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One adapter of the list."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ADAPTER_NAME_CHARS)]
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096, pattern="^/")]
    digest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16,64})?$")] = ""


class _List(msgspec.Struct, forbid_unknown_fields=True):
    adapters: Annotated[list[ListedAdapter], msgspec.Meta(max_length=MAX_ADAPTERS)] = []


describe(_List)


def read_adapter_list(raw: bytes) -> Mapping[str, ListedAdapter]:
    """Read a list; return its adapters by name.

    Raises:
        UsageError: the list is too large, is not TOML, has an unknown or invalid field, or repeats a name.
    """
    if len(raw) > MAX_LIST_BYTES:
        raise UsageError(
            f"the list of adapters has more than {MAX_LIST_BYTES} bytes; shorten it", field="adapters_file"
        )
    try:
        found = msgspec.convert(parse_toml(raw.decode()), _List).adapters
    except ValueError as error:  # invalid UTF-8 and wrong fields too
        raise UsageError(f"the list of adapters is not valid: {error}", field="adapters_file") from error
    named = {one.name: one for one in found}
    if len(named) < len(found):
        names = [one.name for one in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"the list of adapters has {twice!r} twice; use unique names", field="adapters_file")
    return named


def changes(
    loaded: Mapping[str, ListedAdapter], listed: Mapping[str, ListedAdapter]
) -> tuple[Sequence[ListedAdapter], Sequence[str]]:
    """Return the adapters to load and the names to remove so that the loaded adapters match the list.

    Args:
        loaded: the loaded adapters by name.
        listed: the adapters of the list by name.
    """
    to_load = [one for name, one in listed.items() if loaded.get(name) != one]
    return to_load, [name for name in loaded if name not in listed]
