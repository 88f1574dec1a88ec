"""Texts that keep to a JSON schema, with drafts and without: valid, the same, of the same law."""

import json
from dataclasses import replace
from fractions import Fraction
from itertools import product

import jsonschema_rs
import numpy as np
import pytest

from truedraw.drafters.model import ModelDrafter
from truedraw.drafters.ngram import NGramDrafter
from truedraw.drafters.random import RandomDrafter
from truedraw.drafters.suffix import SuffixDrafter
from truedraw.engine import Engine
from truedraw.errors import ConstraintError, RowError
from truedraw.policy import FixedLength
from truedraw.protocols import Drafter
from truedraw.prove import engine_law
from truedraw.prove.exact import Problem, table_problem
from truedraw.prove.problems import rows
from truedraw.registry import RULES, Model
from truedraw.runners.toy import ByteTokenizer, ToyRunner, hashed
from truedraw.text.grammar import Grammars
from truedraw.types import PointMass, Proposal, SamplingParams
from truedraw.verify import token

VOCAB = 300  # no multiple of 32, and more than the tokenizer has
GRAMMARS = Grammars(ByteTokenizer(), VOCAB)
SCHEMAS = {
    "any object": {"type": "object"},
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "at": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False},
        },
        "required": ["name", "at"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"enum": ["red", 'g"reen', "blåu", 7, None]}, "minItems": 2, "maxItems": 4},
    "numbers": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": -5, "maximum": 1200},
            "b": {"type": "number", "exclusiveMinimum": 0.5, "maximum": 2.25},
            "c": {"type": "integer", "multipleOf": 7},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"const": "é\n"}},
        "required": ["c"],
        "additionalProperties": False,
    },
    "references": {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
        "$ref": "#/$defs/tree",
    },
    "either": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[ab☃]{2,5}$"}, {"type": "array", "maxItems": 0}]},
}  # fmt: skip

_BONUS = np.full(VOCAB, -2.0)
_BONUS[[*b'"]:,', 256]] = 2.5
_BONUS[[*b"}0123456789"]] = 0.5
_BONUS[257:] = 9.0  # what no tokenizer knows is what the model likes best


def json_writer(seed, blend=0.0):
    """A toy model that closes what it opens sooner or later."""
    noise = hashed(VOCAB, seed=seed, order=3, blend=blend)
    return lambda context: noise(context) + _BONUS


TARGET, DRAFT = json_writer(1), json_writer(1, blend=0.5)
PARAMS = SamplingParams(max_tokens=60, seed=5)
PROMPT = '{"name": "a", "at": {"x": 1}} ["red", 7, 7] {"a": true} '


class Script(Drafter):
    """Proposes the same, always."""

    def __init__(self, *tokens):
        self._proposal = Proposal(tokens, PointMass())

    def propose(self, requests):
        return [self._proposal for _ in requests]


def engine(drafter=None, length=4, slots=1, target=TARGET):
    model = Model("toy", ToyRunner(target, VOCAB, num_slots=slots), ByteTokenizer())
    return Engine(model, drafter, FixedLength(length))


def self_drafter(logits=DRAFT):
    return ModelDrafter(ToyRunner(logits, VOCAB), VOCAB)


def only(under_test, params=PARAMS, prompt=PROMPT, **options):
    return under_test.generate([prompt], params, **options)[0]


def is_valid(schema, text):
    return jsonschema_rs.validator_for(schema).is_valid(json.loads(text))


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["coupled", "block", "token"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_is_valid_or_cut(name, rule, temperature):
    constraint, ended = GRAMMARS.json_schema(SCHEMAS[name]), 0
    sampled = (RandomDrafter(VOCAB, sampled=True), self_drafter(), self_drafter(TARGET))
    for seed, drafter in product(range(3), (SuffixDrafter(), NGramDrafter(min_match=1), RandomDrafter(VOCAB), *sampled)):
        params = replace(PARAMS, seed=seed, temperature=temperature)
        result = only(engine(drafter), params, rule=rule, constraint=constraint)
        assert result.error is None
        if result.finish_reason == "length":
            assert len(result.tokens) == 60
        else:
            ended += 1
            assert result.tokens[-1] == 256 and is_valid(SCHEMAS[name], result.text)
    assert ended >= (9 if temperature else 0)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_seeded_text_is_that_without_drafts(name):
    constraint = GRAMMARS.json_schema(SCHEMAS[name])
    accepted = 0
    for seed in range(4):
        params = replace(PARAMS, seed=seed, temperature=seed % 2)
        plain = only(engine(), params, constraint=constraint)
        for drafter in (SuffixDrafter(), RandomDrafter(VOCAB), self_drafter(), Script(*b'{"a": 1}', 256)):
            drafted = only(engine(drafter, length=7), params, constraint=constraint)
            assert drafted.tokens == plain.tokens and drafted.text == plain.text
            accepted += drafted.stats.accepted
    assert accepted > 10


def test_drafting_with_the_target_itself_accepts_everything_since_q_is_masked_too():
    for name, rule in product(SCHEMAS, ("coupled", "block", "token")):
        result = only(
            engine(self_drafter(TARGET)),
            replace(PARAMS, ignore_eos=False),
            rule=rule,
            constraint=GRAMMARS.json_schema(SCHEMAS[name]),
        )
        assert result.stats.accepted >= result.stats.proposed - 4 and result.stats.proposed > 0


def test_json_object_is_an_object():
    for seed in range(20):
        result = only(engine(self_drafter()), replace(PARAMS, seed=seed, max_tokens=150), constraint=GRAMMARS.json_object())
        assert result.text.startswith("{")
        if result.finish_reason == "stop":
            assert isinstance(json.loads(result.text), dict)


# ---------------------------------------------------------------- drafts that are not allowed


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("drafts", [(0, 0, 0), (256, 256), (299, 34), (0xFF, 123, 34), (32, 123)])
def test_a_drafter_of_forbidden_tokens_changes_nothing(drafts, rule):
    """None of them begins the text of the schema; the third is a token that no tokenizer knows."""
    constraint = GRAMMARS.json_schema({"enum": ["abcabcabc"]})
    result = only(engine(Script(*drafts), 3), replace(PARAMS, temperature=0), rule=rule, constraint=constraint)
    assert result.text == '"abcabcabc"' and result.finish_reason == "stop"
    ends = result.origins[-1] == "draft"  # 256 is what comes last
    assert result.stats.accepted == ends and ends == (drafts[0] == 256)


def test_rows_behind_a_forbidden_draft_are_place_holders(monkeypatch):
    """A rule may look at all rows before it decides."""

    def eager(proposal, target_rows, noise):
        seen = [target_rows[i] for i in range(len(proposal) + 1)]
        assert all(row.sum() == pytest.approx(1) for row in seen)
        return token.verify(proposal, target_rows, noise)

    constraint = GRAMMARS.json_schema(SCHEMAS["nested"])
    for drafter in (Script(123, 1, 34, 1), Script(123, 0, 34, 34), Script(*b'{"x'), RandomDrafter(VOCAB)):
        lazy = only(engine(drafter), rule="token", constraint=constraint)
        with monkeypatch.context() as patched:
            patched.setitem(RULES, "token", eager)
            result = only(engine(drafter), rule="token", constraint=constraint)
        assert result.error is None and result.tokens == lazy.tokens


# ---------------------------------------------------------------- the law, exactly


class Digits(ByteTokenizer):
    """Token 0 ends the text, tokens 1 and 2 are the digits."""

    vocab_size = 3
    eos_ids = frozenset({0})

    def token_bytes(self, token):
        return b"" if token == 0 else b"%d" % token


def masked(problem, constraint):
    """The problem whose rows are those of `problem` where the grammar allows them, in fractions. Behind a text
    that it forbids the rows stay: nobody may look at them."""

    def row(original):
        def masked_row(context):
            place = constraint.fork()
            for token_id in context:
                if not place.mask()[token_id]:
                    return original(context)
                place.advance(token_id)
            left = [mass if allowed else Fraction(0) for mass, allowed in zip(original(context), place.mask(), strict=True)]
            return tuple(mass / sum(left) for mass in left)

        return masked_row

    return Problem(problem.name, problem.vocab, row(problem.p), row(problem.q), lambda context: context)


class Lagging:
    """A planted fault: only what is emitted moves the masks.

    forks  how many forks away from the one that a sequence owns
    """

    def __init__(self, grammar, forks=-1):
        self._grammar, self._forks = grammar, forks

    def mask(self):
        return self._grammar.mask()

    def fork(self):
        return Lagging(self._grammar.fork(), self._forks + 1)

    def advance(self, token_id):
        if self._forks == 0 and self.mask()[token_id]:
            self._grammar.advance(token_id)


def grammar_setting(rule, width, copies, steps, drafts):
    """Digits of a few numbers; copies do not know the grammar and are mostly forbidden, the draft model's are masked.
    Token 0 goes on for ever once it may come."""
    constraint = Grammars(Digits(), 3).json_schema({"enum": [1, 12, 121, 22, 2112]})
    unmasked = table_problem("three", rows("1/2 1/3 1/6", "1/5 1/5 3/5"), rows("1/6 1/2 1/3", "2/5 2/5 1/5"))
    return engine_law.Setting(
        "grammar", masked(unmasked, constraint), rule, 1, steps, lambda: FixedLength(drafts), width,
        engine_law.COPIED if copies else (0,), copies, constraint, unmasked,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "width", "copies", "steps", "drafts"),
    [
        ("block", 1, True, 2, 2), ("block", 1, True, 1, 3), ("block", 1, False, 2, 2), ("token", 1, True, 2, 2),
        ("token", 1, False, 2, 2), ("multidraft", 2, False, 1, 4), ("traversal", 2, False, 1, 4),
    ],
)  # fmt: skip
def test_the_law_of_constrained_texts_is_exact(rule, width, copies, steps, drafts):
    """Enumerated through the engine, in fractions; so is a constraint that drafts do not move, which is found."""
    setting = grammar_setting(rule, width, copies, steps, drafts)
    assert engine_law.total_variation(setting) == 0
    assert sum(mass for _, mass in engine_law._runs(setting)) == 1


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_mask_that_does_not_follow_the_drafts_moves_that_law(rule):
    setting = grammar_setting(rule, 1, False, 2, 2)
    assert engine_law.total_variation(replace(setting, constraint=Lagging(setting.constraint))) > Fraction(1, 100)


# ---------------------------------------------------------------- errors


class NoBrace(ByteTokenizer):
    def token_bytes(self, token):
        return b"" if token == ord("}") else super().token_bytes(token)


def test_a_grammar_that_gets_stuck_ends_its_own_request_alone():
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    stuck = Grammars(NoBrace(), VOCAB).json_schema(schema)
    for drafter in (None, SuffixDrafter(), Script(*b'{"a":1}'), ModelDrafter(ToyRunner(DRAFT, VOCAB, num_slots=2), VOCAB)):
        under_test = engine(drafter, slots=2)
        bad = under_test.submit("x", PARAMS, constraint=stuck)
        good = under_test.submit("x", PARAMS, constraint=GRAMMARS.json_object())
        while not under_test.idle:
            under_test.step()
        result = bad.results[0]
        assert isinstance(result.error, ConstraintError) and result.finish_reason == "error"
        assert str(result.error).startswith("the grammar cannot go on: ") and "\n" not in str(result.error)
        assert "".join(result.text.split()) == '{"a":1'
        assert good.results[0].error is None
        assert good.results[0].tokens == only(engine(), PARAMS, "x", constraint=GRAMMARS.json_object()).tokens


def test_a_text_that_may_not_end_yet_but_can_not_go_on_is_an_error():
    constraint = GRAMMARS.json_schema({"const": 1})
    result = only(engine(), replace(PARAMS, min_tokens=3), constraint=constraint)
    assert isinstance(result.error, RowError) and "allows no token" in str(result.error) and result.text == "1"
