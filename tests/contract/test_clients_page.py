"""docs/clients.md has a row for each client whose quick start is tried, with the version that is tried."""

import re
from pathlib import Path

from harness.clients.matrix.table import CLIENTS, Language

HARNESS = Path(__file__).resolve().parents[1] / "harness/clients/matrix"
PAGE = (Path(__file__).resolve().parents[2] / "docs/clients.md").read_text("utf-8")


def test_the_page_lists_the_clients_with_their_versions() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in re.findall(r"^\| .*$", PAGE, re.MULTILINE)]
    assert rows[2:] == [[client.name, client.version] for client in CLIENTS]


def test_each_quick_start_is_tried() -> None:
    scripts = {path.name for path in (HARNESS / "quick_starts").glob("*.*")}
    assert scripts == {client.script for client in CLIENTS}


def test_all_packages_are_pinned() -> None:
    for client in CLIENTS:
        pin = "==" if client.language is Language.PYTHON else "@"
        assert all(pin in one[1:] for one in client.requirements), client.name
