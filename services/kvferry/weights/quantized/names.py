"""Matches names of modules with the lists of a checkpoint: substrings, exact names, and limited regular expressions."""

import re
from collections.abc import Sequence

from kvferry.weights.families.config_fields import ConfigFields

MAX_PATTERNS = 65536
_MAX_EXPRESSIONS = 512
_MAX_CHARS = 512
_MAX_REPEATS = 3
_REGEX = "re:"
_REPEATED_GROUP = re.compile(r"\)\s*[*+{?]")
_REPEATS = re.compile(r"(?<!\\)[*+{]")
_UNUSUAL = re.compile(r"\(\?|\\[1-9]")


def name_list(fields: ConfigFields, key: str) -> tuple[str, ...]:
    """Return a list of names; empty if the field is absent.

    Args:
        fields: fields of the quantization config.
        key: name of the field.

    Raises:
        ModelFileError: the field is not a list of limited length with strings of limited length.
    """
    value = fields.value(key)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_PATTERNS:
        fields.refuse(key, f"it must be a list of at most {MAX_PATTERNS} names")
    if not all(isinstance(item, str) and 0 < len(item) <= _MAX_CHARS for item in value):
        fields.refuse(key, f"names must have at most {_MAX_CHARS} characters")
    return tuple(value)


class ModuleNames:
    """Names and expressions (`re:...`) of modules, as in the fields `ignore` and `targets` of compressed-tensors."""

    def __init__(self, fields: ConfigFields, key: str, listed: Sequence[str]) -> None:
        """
        Args:
            fields: fields of the quantization config, for error messages.
            key: name of the field.
            listed: its names and expressions.

        Raises:
            ModelFileError: an expression is not valid, or could take long to match.
        """
        self._exact = frozenset(name for name in listed if not name.startswith(_REGEX))
        texts = [name.removeprefix(_REGEX) for name in listed if name.startswith(_REGEX)]
        if len(texts) > _MAX_EXPRESSIONS:
            fields.refuse(key, f"it must have at most {_MAX_EXPRESSIONS} expressions")
        self._expressions = []
        for text in texts:
            # The time to match grows with the length of a name to the power of the number of repeats.
            if _REPEATED_GROUP.search(text) or _UNUSUAL.search(text) or len(_REPEATS.findall(text)) > _MAX_REPEATS:
                fields.refuse(
                    key,
                    f"the expression {text[:60]!r} may take long to match; use at most {_MAX_REPEATS} repeats, none of "
                    "a group",
                )
            try:
                self._expressions.append(re.compile(text))
            except (re.error, OverflowError, RecursionError) as error:
                fields.refuse(key, f"the expression {text[:60]!r} is not valid ({error})")

    def has(self, module: str) -> bool:
        """Return whether the list has the module's name, or an expression that matches the start of it."""
        return module in self._exact or any(each.match(module) for each in self._expressions)

    @property
    def exact(self) -> frozenset[str]:
        """Names that are compared literally, without regular expressions."""
        return self._exact


def contains_any(listed: Sequence[str], module: str) -> bool:
    """Return whether a listed name is part of a module's name, between dots.

    Args:
        listed: names of modules, or parts of them between dots.
        module: name of the module, for example `model.layers.0.mlp`.
    """
    dotted = f".{module}."
    return any(f".{name.strip('.')}." in dotted for name in listed)
