"""Write docs/faults.md from build/faults.json: `python -m kvferry.testing.faults`."""

import sys

from kvferry.testing.faults import page
from kvferry.testing.faults.cases import CASES


def main() -> int:
    """The exit status: 1 when a case was not measured yet."""
    results = page.read()
    missing = [case.name for case in CASES if case.name not in results.rows]
    for name in missing:
        sys.stderr.write(f"not measured: {name}; run `make faults` as root\n")
    if missing:
        return 1
    page.PAGE.write_text(page.render(results), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
