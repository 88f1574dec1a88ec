"""What is refused as a JSON schema, each with its message, and what is not."""

import time

import pytest

from truedraw.errors import InvalidParameter
from truedraw.runners.toy import ByteTokenizer
from truedraw.text.grammar import Grammars
from truedraw.text.json_schema import KEYWORDS

GRAMMARS = Grammars(ByteTokenizer(), 257)


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


def doubled(times):
    """2**times values, of which a few exist."""
    schema = {}
    for _ in range(times):
        schema = {"anyOf": [schema, schema]}
    return schema


def cyclic():
    schema = {}
    schema["properties"] = {"a": schema}
    return schema


def patterns(count):
    return {"type": "string", "allOf": [{"pattern": f"a.*{i}.*b"} for i in range(count)]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (None, "a mapping of its keywords"),
        ([], "a mapping of its keywords"),
        ("{}", "a mapping of its keywords"),
        (True, "a mapping of its keywords"),
        ({"minimum": float("nan")}, "whose numbers are finite"),
        ({"const": [{"a": float("inf")}]}, "whose numbers are finite"),
        ({"minimum": 10**400}, "whose numbers are finite"),
        ({"minimum": 10**30, "type": "integer"}, "Failed to generate regex for integer range"),
        ({1: 2}, "whose keys are strings"),
        ({"enum": {1, 2}}, "holds a set"),
        ({"description": "\ud800"}, "lone surrogate"),
        ({"\udcff": 1}, "lone surrogate"),
        ({"description": "x" * 70_000}, "at most 65536 bytes"),
        ({"enum": ["\N{GRINNING FACE}" * 6_000]}, "at most 65536 bytes"),
        (doubled(30), "at most 65536 bytes"),
        (nested(40), "at most 64 levels"),
        (cyclic(), "at most 64 levels"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' at # is not"),
        ({"not": {}}, "'not' at # is not"),
        ({"if": {}, "then": {}}, "'if' at # is not"),
        ({"type": "string", "maxLenght": 3}, "'maxLenght' at # is not"),
        ({"type": "string", "nullable": True}, "'nullable' at # is not"),
        ({"$defs": {"a": {"contains": {}}}}, "'contains' at #/$defs/a is not"),
        ({"anyOf": [{"items": {"not": {}}}]}, "'not' at #/anyOf/0/items is not"),
        ({"items": [{"not": {}}]}, "'not' at #/items/0 is not"),
        ({"additionalProperties": {"unevaluatedItems": False}}, "'unevaluatedItems' at #/additionalProperties is not"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "'x-guidance' at # is not"),
        ({"properties": {"a": {"x-guidance": {}}}}, "'x-guidance' at #/properties/a is not"),
        ({"type": "object", "minProperties": 2}, "minProperties of at most 1 more than what is required"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "string", "format": "colour"}, "Unknown format: colour"),
        ({"type": "string", "pattern": "["}, "regex parse error: [ ^ error: unclosed character class"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf constraints are not supported"),
        ({"$ref": "http://localhost/schema"}, "Default retriever does not fetch resources"),
        ({"$ref": "#/$defs/a"}, "Pointer '/$defs/a' does not exist"),
        ({"enum": []}, "anyOf is empty"),
        ({"allOf": [{"type": "string"}, {"type": "number"}]}, "incompatible types"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength (3) is greater than maxLength (2)"),
        ({"properties": [1]}, "properties must be an object"),
        ({"multipleOf": 0}, "invalid multiple of"),
        ({"$ref": "#"}, "some text in this vocabulary satisfies"),
        (patterns(13), "at most 12 patterns and formats"),
        (patterns(40), "at most 12 patterns and formats"),
        ({"type": "integer", "multipleOf": 999_983}, "a multipleOf of at most 10000"),
        ({"type": "integer", "multipleOf": 9_973_000}, "a multipleOf of at most 10000"),
        ({"type": "integer", "allOf": [{"multipleOf": 97}, {"multipleOf": 9973}]}, "least common multiple"),
    ],
)
def test_what_is_refused_says_why_in_one_line_and_at_once(schema, message):
    started = time.perf_counter()
    with pytest.raises(InvalidParameter) as caught:
        GRAMMARS.json_schema(schema)
    text = str(caught.value)
    assert text.startswith("response_format is ") and message in text
    assert "\n" not in text and len(text) < 400
    assert time.perf_counter() - started < 5  # what the bounds keep away takes minutes


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": {"not": {"type": "null"}, "x-guidance": {"type": "string"}, "pattern": {"type": "string"}}},
        {"title": "t", "description": "d", "default": {"not": 1}, "examples": [{"if": 2}], "x-order": 3},
        {"enum": [{"uniqueItems": True}]},
        {"type": "object", "minProperties": 2, "required": ["a"]},
        {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": f"a.*{i}"} for i in range(40)}},
        {"type": "integer", "multipleOf": 1_000_000},
        {"type": "number", "multipleOf": 0.01},
        {"const": "a // b } %json # \n\\\" /* "},
        nested(31),
    ],
)  # fmt: skip
def test_what_is_not(schema):
    assert GRAMMARS.json_schema(schema).mask().any()


def test_the_keywords_said_to_be_enforced_are_known_to_the_compiler():
    """llguidance refuses the standard's keywords that it does not implement, and ignores words of no standard."""
    for keyword in sorted(KEYWORDS):
        try:
            GRAMMARS.json_schema({keyword: "a"})
        except InvalidParameter as error:
            assert "Unimplemented keys" not in str(error), keyword
