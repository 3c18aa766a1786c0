"""Tier URLs: `dram://?size=2GiB`, `disk:///var/cache/kvferry?size=20GiB`, `redis://host:6379/0?ttl=3600`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from kvferry.core.errors import UsageError

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A parsed tier URL; the tier's module parses the options."""

    text: str
    """The URL without user and password, for messages and logs."""
    scheme: str
    host: str
    port: int | None
    path: str
    username: str
    password: str = field(repr=False)
    options: Mapping[str, str]

    def option(self, name: str, parse: Callable[[str], V], default: V) -> V:
        """Parse one option.

        Args:
            name: name of the option.
            parse: converts the option's text; raises `ValueError` if it is invalid.
            default: value if the option is not set.

        Raises:
            UsageError: the value is invalid; the message has tier, option and value.
        """
        if name not in self.options:
            return default
        try:
            return parse(self.options[name])
        except ValueError as error:
            raise UsageError(
                f"tier {self.text}: {name}={self.options[name]!r} is not valid ({error})", field="tier"
            ) from error

    def check_options(self, known: tuple[str, ...]) -> None:
        """Reject unknown options.

        Raises:
            UsageError: an option is unknown; the message names it and the known options.
        """
        for name in self.options:
            if name not in known:
                raise UsageError(
                    f"tier {self.text}: unknown option {name!r}; use one of {', '.join(known)}", field="tier"
                )


def parse_tier(url: str) -> TierSpec:
    """Parse a tier URL.

    Raises:
        UsageError: the URL is malformed.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        options = dict(pairs)
    except ValueError:
        # Passwords must not be shown, even if the URL is malformed. The parser's error may quote a part of the URL, so
        # it is not chained.
        raise UsageError(
            f"{_without_user(url)!r} is not a tier: its host, port or options are invalid; percent-encode special "
            "characters in a password",
            field="tier",
        ) from None
    if len(options) < len(pairs):
        raise UsageError(f"{_without_user(url)!r} is not a tier: an option is repeated; set it once", field="tier")
    if "://" not in url or not parts.scheme:
        raise UsageError(
            f"{_without_user(url)!r} is not a tier; use dram://?size=2GiB, disk:///FOLDER?size=20GiB or "
            "redis://HOST:PORT/0",
            field="tier",
        )
    if "@" in parts.path + parts.query or parts.fragment:
        raise UsageError(
            f"{_without_user(url)!r} is not a tier: an '@' or '#' follows the host; percent-encode it",
            field="tier",
        )
    bare = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return TierSpec(
        text=bare,
        scheme=parts.scheme,
        host=parts.hostname or "",
        port=port,
        path=parts.path,
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        options=options,
    )


def _without_user(url: str) -> str:
    """Return the URL without user and password, even if it is malformed."""
    scheme, mark, rest = url.partition("://")
    return scheme + mark + rest.rpartition("@")[2] if mark else url.rpartition("@")[2]
