"""The models a worker answers for: base models, and LoRA adapters on the first of them.

Statuses, types and messages of the errors are those of vLLM 0.32.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from extproc.sim.api_errors import ApiError, unknown_model


class ServedModels:
    """The names that a request may give as its model; they can change at run time."""

    def __init__(self, bases: Sequence[str], lora_modules: Sequence[str] = ()) -> None:
        self._bases = tuple(bases)
        self._modules = dict(map(parse_lora_module, lora_modules))
        self._adapters = dict(self._modules)

    @property
    def bases(self) -> tuple[str, ...]:
        """The base models; the first is the default, the label of the metrics and every parent."""
        return self._bases

    def is_adapter(self, model: str) -> bool:
        """Return whether *model* is a LoRA adapter."""
        return model in self._adapters

    def resolve(self, model: str | None) -> str:
        """Return the name to answer under; ApiError 404 when *model* is not served."""
        if not model:
            return self._bases[0]
        if model in self._bases or model in self._adapters:
            return model
        raise unknown_model(model, self._bases)

    def replace(self, bases: Sequence[str]) -> None:
        """Serve *bases*, with the adapters of the start: as if started again with other models."""
        self._bases = tuple(bases)
        self._adapters = dict(self._modules)

    def load_adapter(self, name: str, path: str, *, in_place: bool) -> None:
        """Serve the adapter *name*; ApiError 400 when it cannot be."""
        if not name or not path:
            raise _invalid_input("Both 'lora_name' and 'lora_path' must be provided.")
        if name in self._bases:
            raise _invalid_input(f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self._adapters and not in_place:
            raise _invalid_input(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
        self._adapters[name] = path

    def unload_adapter(self, name: str) -> None:
        """Forget the adapter *name*; ApiError 404 when it is not served."""
        if not name:
            raise _invalid_input("'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self._adapters:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"The lora adapter '{name}' cannot be found.",
                kind="NotFoundError",
            )
        del self._adapters[name]

    def cards(self, *, created: int, max_model_len: int) -> list[dict[str, Any]]:
        """Return the entries of ``/v1/models``: base models, then adapters as they were loaded."""
        first = self._bases[0]
        shown: list[tuple[str, str, str | None, int | None]] = [
            (name, first, None, max_model_len) for name in self._bases
        ]
        shown.extend((name, path, first, None) for name, path in self._adapters.items())
        return [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": root,
                "parent": parent,
                "max_model_len": length,
            }
            for name, root, parent, length in shown
        ]


def parse_lora_module(module: str) -> tuple[str, str]:
    """Return name and path of ``NAME`` or ``NAME=PATH``; the path of a bare name is made up."""
    name, _, path = module.partition("=")
    return name, path or f"/adapters/{name}"


def _invalid_input(message: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, kind="InvalidUserInput")
