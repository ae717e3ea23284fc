"""Errors of an HTTP server, and how a client is told about them. Loads without aiohttp."""

import logging
from typing import Any, NamedTuple

from ludic.types import ConfigError, EngineClosed, LudicError, NotFinite, PromptTooLong, QueueFull, TemplateError

logger = logging.getLogger(__name__)


class RequestRefused(LudicError):
    """A request that is not served, with the HTTP status of the reason."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ErrorFacts(NamedTuple):
    """An error as a client is told about it."""

    status: int
    kind: str
    code: str | None
    message: str

    def openai_body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": None, "code": self.code}}


_BAD, _DOWN = "invalid_request_error", "server_error"
_KNOWN: dict[type[Exception], tuple[int, str, str | None]] = {
    PromptTooLong: (400, _BAD, "context_length_exceeded"),
    QueueFull: (429, "rate_limit_error", "queue_full"),
    EngineClosed: (503, _DOWN, "engine_closed"),
    NotFinite: (500, _DOWN, "not_finite"),
    ConfigError: (400, _BAD, None),
    TemplateError: (400, _BAD, None),
}
"""Status, kind and code of errors that clients are told about; the first class that fits."""


def describe_error(error: BaseException) -> ErrorFacts:
    """The HTTP status and the text for a client. An unexpected error is logged, and the client gets no details."""
    from aiohttp import web

    if isinstance(error, RequestRefused):
        return ErrorFacts(error.status, "rate_limit_error" if error.status == 429 else _BAD, error.code, str(error))
    for known, facts in _KNOWN.items():
        if isinstance(error, known):
            return ErrorFacts(*facts, str(error))
    if isinstance(error, web.HTTPException):
        return ErrorFacts(error.status, _DOWN if error.status >= 500 else _BAD, None, f"{error.reason}.")
    logger.error("a request failed", exc_info=error)
    return ErrorFacts(500, _DOWN, None, "Internal error; the server's log says more.")
