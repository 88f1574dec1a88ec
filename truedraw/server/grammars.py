"""response_format to what constrains the answer."""

from __future__ import annotations

import threading
from functools import cached_property

from truedraw.protocols import Constraint
from truedraw.registry import Model
from truedraw.server.schema import ResponseFormat
from truedraw.text.grammar import Grammars


class Formats:
    """Of one model: its vocabulary is read when the first request needs it. May be asked by several threads."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = threading.Lock()

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._model.tokenizer, self._model.runner.vocab_size)

    def constraint(self, format: ResponseFormat) -> Constraint | None:
        """None for plain text. Raises InvalidParameter for a schema that cannot be held to, and UsageError."""
        if format.type == "text":
            return None
        with self._lock:
            if format.json_schema is None:
                return self._grammars.json_object()
            return self._grammars.json_schema(format.json_schema.schema_)
