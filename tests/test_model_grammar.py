"""Grammars over the vocabulary of the real model."""

import json
import time
from dataclasses import replace

import jsonschema_rs
import pytest

from truedraw.engine import Engine
from truedraw.policy import FixedLength
from truedraw.text.grammar import Grammars
from truedraw.types import SamplingParams

pytestmark = pytest.mark.model

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "people": {"type": "integer", "minimum": 0},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 3},
        "size": {"enum": ["small", "large", "très grande"]},
    },
    "required": ["city", "country", "people", "rivers", "size"],
    "additionalProperties": False,
}
EITHER = {
    "anyOf": [{"type": "integer"}, {"type": "object", "properties": {"answer": {"type": "boolean"}}, "required": ["answer"]}]
}
CHAT = [{"role": "user", "content": 'Describe Paris as JSON, like {"city": "Rome", "country": "Italy", "people": 2800000}.'}]
PARAMS = SamplingParams(max_tokens=110, seed=3)


def only(engine, params, constraint, **options):
    return engine.generate([CHAT], params, constraint=constraint, **options)[0]


@pytest.mark.parametrize(("drafter", "temperature"), [("suffix", 0.0), ("suffix", 1.0), ("random", 1.0), ("ngram", 0.0)])
def test_texts_are_valid_and_those_without_drafts(drafter, temperature):
    """Below 256 cached tokens the rows do not depend on the pass."""
    with Engine.load("smollm2", drafter=drafter, draft_length=4) as engine:
        grammars = Grammars(engine.model.tokenizer, engine.model.runner.vocab_size)
        for schema in (CITY, EITHER):
            constraint, params = grammars.json_schema(schema), replace(PARAMS, temperature=temperature)
            drafted = only(engine, params, constraint)
            assert drafted.tokens == only(engine, params, constraint, max_draft=0).tokens
            for result in (drafted, only(engine, params, constraint, rule="block")):
                assert result.error is None
                if schema is not CITY and result.finish_reason == "length":
                    continue  # strings without a bound
                assert result.finish_reason == "stop"
                assert jsonschema_rs.validator_for(schema).is_valid(json.loads(result.text)), result.text


def test_the_draft_model_is_masked_too():
    with Engine.load("smollm2", drafter="model", draft_model="smollm2", kv_type="bf16") as engine:
        engine.policy = FixedLength(3)
        constraint = Grammars(engine.model.tokenizer, engine.model.runner.vocab_size).json_schema(CITY)
        for rule in ("coupled", "token", "block"):
            result = only(engine, PARAMS, constraint, rule=rule)
            stats = result.stats
            assert result.finish_reason == "stop" and stats.accepted >= stats.proposed - 3 > 20  # the end cuts the last


def test_no_control_token_is_allowed_and_the_vocabulary_is_read_quickly():
    with Engine.load("smollm2", drafter="none") as engine:
        tokenizer = engine.model.tokenizer
        started = time.perf_counter()
        place = Grammars(tokenizer, engine.model.runner.vocab_size).json_object()
        assert time.perf_counter() - started < 3  # 0.25 s on the machine where it was written
        control = [token for token in range(tokenizer.vocab_size) if not tokenizer.token_bytes(token)]
        for token in tokenizer.encode('{"a": ["b", 1.5, {}]}', add_special=False):
            assert not place.mask()[control].any()
            place.advance(token)
        assert set(place.mask().nonzero()[0]) == tokenizer.eos_ids
