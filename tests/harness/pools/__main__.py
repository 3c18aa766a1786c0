"""`python -m harness.pools`: writes the table in docs/operations.md from build/zero-loss.json."""

import sys

from harness.pools import table


def main() -> int:
    """Write the table of pool events; return exit status 1 if an event has not been measured yet."""
    results = table.read()
    missing = [event for event in table.EVENTS if event not in results.rows]
    for event in missing:
        sys.stderr.write(f"not measured: {event}; run `make zero-loss` as root\n")
    if missing:
        return 1
    table.PAGE.write_text(table.renewed(table.PAGE.read_text("utf-8"), results), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
