"""Builds msgspec's description of a struct type before several threads use the type.

msgspec 0.22 builds the description on the first use of a type: it attaches it to the class, then fills in the fields,
and other threads run in between. A second thread that converts a value meanwhile follows a null pointer, and the
process ends with SIGSEGV. Modules are imported by one thread, so each describes its types when it is imported.
"""

import msgspec


def describe(kind: type[msgspec.Struct]) -> None:
    """Build the description of a struct type and of all types in its fields. Call it in the type's module."""
    msgspec.json.Decoder(kind)
