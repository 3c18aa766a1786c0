"""`python -m harness.faults`: writes docs/faults.md from build/faults.json."""

import sys

from harness.faults import page
from harness.faults.cases import CASES


def main() -> int:
    """Write the page of fault results; return exit status 1 if a case has not been measured yet."""
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
