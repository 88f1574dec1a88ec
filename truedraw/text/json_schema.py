"""What a user may give as a JSON schema, looked at before a grammar is made of it.

Refused are schemas that are no JSON, keywords that the grammar would not enforce, and the few shapes whose
compilation takes minutes or gigabytes although the schema is small.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from truedraw.errors import InvalidParameter

MAX_BYTES = 64 * 1024
MAX_DEPTH = 64
MAX_COMBINED_PATTERNS = 12
"""What 20 intersected patterns took was 3 s and 0.3 GB, doubled by each further one; 12 take milliseconds."""
MAX_MULTIPLE = 10_000
"""9,973 took 0.04 s, 99,991 took 1.3 s, 999,983 took 10 s and 0.4 GB."""

_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_SCHEMAS = {"items", "additionalItems", "additionalProperties"}
_ASSERTIONS = {
    "$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties", "maxProperties", "minLength",
    "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip
_ANNOTATIONS = {
    "$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly",
    "writeOnly", "contentMediaType", "contentEncoding", "contentSchema", "discriminator",
}  # fmt: skip
KEYWORDS = frozenset(_LISTS | _MAPS | _SCHEMAS | _ASSERTIONS | _ANNOTATIONS)
"""Enforced, or saying nothing about what is valid. Keywords that begin with x- say nothing either."""


def checked(schema: object) -> Mapping[str, Any]:
    """The schema itself, once it is known to be JSON of bounded size whose keywords are all enforced.

    Raises InvalidParameter.
    """
    if not isinstance(schema, Mapping):
        raise refused(schema, "a JSON schema: a mapping of its keywords")
    nodes = list(_nodes(schema))
    if len(json.dumps(schema).encode()) > MAX_BYTES:
        raise InvalidParameter("response_format", "a larger schema", f"one of at most {MAX_BYTES} bytes as JSON")
    _check_keywords(schema, schema, "#")
    _check_cost(schema, nodes)
    return schema


def refused(schema: object, allowed: str) -> InvalidParameter:
    """The error for a schema, with its beginning."""
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        text = type(schema).__name__
    return InvalidParameter("response_format", text if len(text) <= 80 else f"{text[:77]}...", allowed)


def _nodes(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All mappings inside, values that are no schemas included. Raises InvalidParameter for what is no JSON."""
    todo: list[tuple[object, int]] = [(schema, 0)]
    num_values = 0
    while todo:
        value, depth = todo.pop()
        num_values += 1
        if depth > MAX_DEPTH:
            raise InvalidParameter("response_format", "a deeper schema", f"one of at most {MAX_DEPTH} levels")
        if num_values > MAX_BYTES:  # a value takes a byte at least; shared ones count as often as they are written
            raise InvalidParameter("response_format", "a larger schema", f"one of at most {MAX_BYTES} bytes as JSON")
        if isinstance(value, Mapping):
            todo += [(key, depth) for key in value]
            todo += [(inner, depth + 1) for inner in value.values()]
            if not all(isinstance(key, str) for key in value):
                raise refused(schema, "a schema whose keys are strings")
            yield value
        elif isinstance(value, list | tuple):
            todo += [(inner, depth + 1) for inner in value]
        elif isinstance(value, str):
            _check_text(schema, value)
        elif isinstance(value, int | float):
            if not _is_finite(value):
                raise refused(schema, "a schema whose numbers are finite")
        elif value is not None:
            raise refused(schema, f"a schema made of JSON values, and this one holds a {type(value).__name__}")


def _check_text(schema: object, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refused(
            schema, f"a schema whose strings are Unicode, and this one holds a lone surrogate, {text[error.start]!r}"
        ) from None


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _check_keywords(whole: object, schema: object, place: str) -> None:
    """Raises InvalidParameter for a keyword that no grammar enforces. Values of a wrong kind are the compiler's to tell."""
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if keyword == "x-guidance" or (keyword not in KEYWORDS and not keyword.startswith("x-")):
            raise refused(whole, f"a schema of keywords that are enforced, and {keyword!r} at {place} is not")
        inside = f"{place}/{keyword}"
        if keyword in _SCHEMAS and not isinstance(value, list):
            _check_keywords(whole, value, inside)
        elif (keyword in _LISTS or keyword == "items") and isinstance(value, Sequence):
            for i, inner in enumerate(value):
                _check_keywords(whole, inner, f"{inside}/{i}")
        elif keyword in _MAPS and isinstance(value, Mapping):
            for name, inner in value.items():
                _check_keywords(whole, inner, f"{inside}/{name}")
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if isinstance(least, int | float) and isinstance(required, Sequence) and least > len(required) + 1:
        # names that are not written out in the schema may come up twice
        raise refused(whole, f"minProperties of at most 1 more than what is required, and at {place} it is {least}")


def _check_cost(whole: object, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidParameter where compilation would take long: it grows with the product of what is intersected."""
    multiples = [_coefficient(node["multipleOf"]) for node in nodes if isinstance(node.get("multipleOf"), int | float)]
    combined = any(_intersects(node) for node in nodes)
    if any(multiple > MAX_MULTIPLE and str(multiple).strip("0") != "1" for multiple in multiples):
        raise refused(whole, f"a multipleOf of at most {MAX_MULTIPLE}, its decimal point left out, or a power of ten")
    if combined and math.lcm(*multiples) > MAX_MULTIPLE:
        raise refused(whole, f"several multipleOf whose least common multiple is at most {MAX_MULTIPLE}")
    num_patterns = sum(_num_patterns(node) for node in nodes)
    if combined and num_patterns > MAX_COMBINED_PATTERNS:
        raise refused(
            whole,
            f"at most {MAX_COMBINED_PATTERNS} patterns and formats in a schema that intersects some (allOf, or several of "
            f"anyOf, oneOf, $ref, pattern and format in one place), and this one has {num_patterns}",
        )


def _intersects(node: Mapping[str, Any]) -> bool:
    sources = sum(keyword in node for keyword in ("anyOf", "oneOf", "$ref", "pattern", "format"))
    return isinstance(node.get("allOf"), list) or "patternProperties" in node or sources > 1


def _num_patterns(node: Mapping[str, Any]) -> int:
    by_name = node.get("patternProperties")
    own = sum(isinstance(node.get(keyword), str) for keyword in ("pattern", "format"))
    return own + (len(by_name) if isinstance(by_name, Mapping) else 0)


def _coefficient(number: float) -> int:
    """The number without its decimal point: 0.25 -> 25, 250 -> 250; at least 1."""
    exact = Decimal(int(number)) if number == int(number) else Decimal(str(number))
    return max(1, int(f"{abs(exact):f}".replace(".", "")))
