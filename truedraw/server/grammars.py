"""response_format to what constrains the answer."""

from __future__ import annotations

from truedraw.protocols import Constraint
from truedraw.registry import Model
from truedraw.server.schema import ResponseFormat


class Formats:
    """Of one model: its vocabulary is read when the first request needs it."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def constraint(self, format: ResponseFormat) -> Constraint | None:
        """None for plain text. Raises InvalidParameter for a schema that cannot be held to."""
        if format.type == "text":
            return None
        raise NotImplementedError
