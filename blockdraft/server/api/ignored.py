"""Fields of a body that mean nothing here: named in a header and in the log, so that a typo is noticed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from starlette.responses import Response

from blockdraft.server.api.fields import AnyBody

HEADER = "x-blockdraft-ignored-fields"
MAX_SHOWN = 16  # names in one header; arbitrary, as the next one
MAX_LOGGED = 256  # names that the log has room for
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")

log = logging.getLogger(__name__)


class IgnoredFields:
    """Tells clients and the log; the log hears of a name once, as a client that is wrong is so every time."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def tell(self, response: Response, asked: AnyBody) -> Response:
        """The response, with a header that names what was ignored."""
        if asked.ignored_fields:
            names = [_UNSAFE.sub("?", name) for name in asked.ignored_fields[:MAX_SHOWN]]
            response.headers[HEADER] = ", ".join(names)
            self._log(names)
        return response

    def _log(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                log.warning("a request holds '%s', which means nothing here: it is ignored", name)
