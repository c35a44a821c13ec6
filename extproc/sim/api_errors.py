"""Errors in the form that vLLM's OpenAI-compatible server gives them."""

import json
from collections.abc import Sequence
from http import HTTPStatus


class ApiError(Exception):
    """A request that is answered with an error; *message* is for the caller to read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or _kind(status)
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Return the JSON document of the error."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return json.dumps({"error": error}).encode()


def invalid(message: str, *, param: str | None = None) -> ApiError:
    """Return the error for a well-formed request that asks for something impossible."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, kind="BadRequestError", param=param)


def unknown_model(model: str, served: Sequence[str]) -> ApiError:
    """Return the error for a model that is not *served*."""
    return ApiError(
        HTTPStatus.NOT_FOUND,
        f"The model `{model}` does not exist. Valid aliases: {', '.join(served)}.",
        kind="NotFoundError",
        param="model",
    )


def _kind(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
