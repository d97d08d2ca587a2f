"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}`` with a fitting status."""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.responses import JSONResponse

from frameshard import errors
from frameshard.errors import FrameshardError

STATUS: dict[type[FrameshardError], int] = {
    errors.BadArgument: 400,
    errors.BadMessage: 400,
    errors.ContextOverflow: 400,
    errors.Unsupported: 400,
    errors.BudgetBelowFloor: 400,
    errors.StaleLease: 409,
    errors.Overloaded: 429,
    errors.ConnectionLost: 503,
    errors.EngineDied: 503,
    errors.OutOfMemory: 503,
    errors.JobCancelled: 503,
    errors.DeadlineMissed: 504,
}
"""The status of each error of the sidecar. Any other is 500."""

CODES = {errors.ContextOverflow: "context_length_exceeded", errors.BadArgument: "invalid_value"}
"""OpenAI's code where it differs from the name of the error."""

FIELDS = {"json_schema": "response_format", "template_keywords": "chat_template_kwargs", "images": "messages"}
"""The field of a request for a field of the job, where it has another name."""

RETRY = {"Retry-After": "1"}
"""Of refusals that a later request may not get. OpenAI's clients ask again, but not sooner than after this second."""


class Refusal(Exception):
    """A request that is not done.

    :param status: HTTP status.
    :param message: a sentence for a person.
    :param code: stable name for programs.
    :param param: the field of the request that is wrong.
    :param headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def document(self) -> dict[str, object]:
        kind = "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.document(), self.status, headers=self.headers)


def bad(message: str, param: str | None = None) -> Refusal:
    """A wrong value in the request."""
    return Refusal(400, message, "invalid_value", param)


def unsupported(message: str, param: str) -> Refusal:
    """A field of OpenAI's interface that asks for something that the sidecar cannot do."""
    return Refusal(400, message, "unsupported_parameter", param)


def overloaded(status: int, message: str) -> Refusal:
    """This server has too much to do."""
    return Refusal(status, f"{message}: try again later", errors.Overloaded.name, headers=RETRY)


def of_error(error: FrameshardError, asked_in: str = "messages") -> Refusal:
    """The refusal for an error of the sidecar.

    :param asked_in: the field of the request that the prompt is in.
    """
    status = STATUS.get(type(error), 500)
    field = error.detail.get("field")
    param, message = None, error.message
    if isinstance(error, errors.ContextOverflow):
        param = asked_in
    elif field and isinstance(field, str) and status == 400:
        param = FIELDS.get(field, field)
        message = re.sub(rf"^{re.escape(field)}(?=: )", param, message)
    headers = RETRY if error.retriable else None
    return Refusal(status, message, CODES.get(type(error), error.name), param, headers=headers)
