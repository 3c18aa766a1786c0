"""Admin route GET /ledger: the tokens of each tenant and adapter, as JSON or CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.gateway.decide.lifecycle.ledger import COLUMNS, Ledger, LedgerRow
from kvferry.gateway.http.client_api import error_response
from kvferry.gateway.http.fields.query import known, single_fields
from kvferry.gateway.http.openai import reply

PATHS = ("/ledger",)
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_FORMATS = ("json", "csv")
_FORMULA_MARKS = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a cell that spreadsheets take for a formula."""


@dataclass(frozen=True, slots=True)
class LedgerRoute:
    """Handler of the route and its dependency."""

    ledger: Ledger

    def routes(self) -> list[Route]:
        """Return the route."""
        return [Route("/ledger", self._ledger, methods=["GET"])]

    async def _ledger(self, request: Request) -> Response:
        try:
            given = known(single_fields(request.query_params), ("format",)).get("format", _FORMATS[0])
            if given not in _FORMATS:
                raise InvalidRequest(f"format must be json or csv, not {shortened(given)!r}", field="format")
        except InvalidRequest as error:
            return error_response(error)
        rows = self.ledger.rows()
        if given == "csv":
            return Response(as_csv(rows), headers=_HEADERS, media_type="text/csv")
        return Response(reply.encode({"rows": rows}), headers=_HEADERS, media_type="application/json")


def as_csv(rows: Sequence[LedgerRow]) -> str:
    """Return rows as CSV with a line of names (RFC 4180). A name that a spreadsheet would compute as a formula gets an
    apostrophe in front."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    for row in rows:
        cells = asdict(row)
        for name in ("tenant", "adapter"):
            cells[name] = f"'{cells[name]}" if cells[name].startswith(_FORMULA_MARKS) else cells[name]
        writer.writerow({**cells, "is_others": "true" if row.is_others else "false"})
    return text.getvalue()
