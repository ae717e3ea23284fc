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


def describe_error(error: BaseException) -> ErrorFacts:
    """The HTTP status and the text for a client. An unexpected error is logged, and the client gets no details."""
    from aiohttp import web

    message, status, kind, code = str(error), 400, "invalid_request_error", None
    if isinstance(error, RequestRefused):
        status, code = error.status, error.code
        kind = "rate_limit_error" if status == 429 else kind
    elif isinstance(error, PromptTooLong):
        code = "context_length_exceeded"
    elif isinstance(error, QueueFull):
        status, kind, code = 429, "rate_limit_error", "queue_full"
    elif isinstance(error, EngineClosed):
        status, kind, code = 503, "server_error", "engine_closed"
    elif isinstance(error, NotFinite):
        status, kind, code = 500, "server_error", "not_finite"
    elif isinstance(error, web.HTTPException):
        status, message = error.status, f"{error.reason}."
        kind = "server_error" if status >= 500 else kind
    elif not isinstance(error, (ConfigError, TemplateError)):
        logger.error("a request failed", exc_info=error)
        status, kind, message = 500, "server_error", "Internal error; the server's log says more."
    return ErrorFacts(status, kind, code, message)
