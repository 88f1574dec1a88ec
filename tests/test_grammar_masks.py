"""What a grammar allows where, token by token, and what it says when it can't go on."""

import sys

import numpy as np
import pytest

from truedraw.errors import ConstraintError, MissingExtra, UsageError
from truedraw.runners.toy import ByteTokenizer
from truedraw.text.grammar import Grammars

GRAMMARS = Grammars(ByteTokenizer(), 257)


class Pieces(ByteTokenizer):
    """Bytes, three kinds of ends and tokens of several bytes, some of them the same, some no UTF-8."""

    pieces = (
        b"",
        b"",
        b"<end>",
        b'{"',
        b'": ',
        b"}}",
        b"a",
        b'a"',
        b"\xc3\xa9",
        b"\xff",
        b"\xff\xff",
        b"  ",
        b"\n ",
        b"\n\n",
        b"12",
        b"",
    )
    vocab_size = 256 + len(pieces)
    eos_ids = frozenset({256, 257, 258, 999})

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else self.pieces[token - 256]


def test_a_token_is_allowed_if_its_bytes_are_and_an_end_where_the_text_is_complete():
    pieces = Pieces()
    text = b'{"a": {"\xc3\xa9": [1, 12,\n  "a"]}, "b": 12}'
    for schema in ({"type": "object"}, {"properties": {"a": {"type": "object"}}, "required": ["a", "b"], "type": "object"}):
        place = Grammars(pieces, 280).json_schema(schema)
        for at in range(len(text) + 1):
            mask = place.mask()
            assert mask.shape == (280,) and mask.dtype == np.bool_
            complete = at == len(text)
            assert [bool(mask[end]) for end in (256, 257, 258)] == [complete] * 3 and not mask[271:].any()
            for piece in range(259, 271):
                ahead, allowed = place.fork(), True
                for byte in pieces.token_bytes(piece):
                    allowed = allowed and bool(ahead.mask()[byte])
                    if allowed:
                        ahead.advance(byte)
                assert mask[piece] == allowed, (text[:at], pieces.token_bytes(piece))
            if complete:
                assert mask.sum() == 3
            else:
                place.advance(text[at])


@pytest.mark.parametrize(
    ("text", "goes_on"),
    [
        ("{", " "), ('{"a"', " "), ('{"a":', "\n"), ('{"a":1', "\n"), ('{"a": 1,\n  \t', " "), ("{\n" + " " * 19, " "),
    ],
)  # fmt: skip
def test_whitespace_may_come(text, goes_on):
    assert after(text).mask()[ord(goes_on)]


@pytest.mark.parametrize("text", ["", "{ ", '{"a": ', "{\n" + " " * 20, '{"a": 1 ', "{}"])
def test_and_does_not_go_on_for_ever(text):
    mask = after(text).mask()
    assert not mask[[9, 10, 13, 32]].any() and mask.any()


def after(text):
    place = GRAMMARS.json_object().fork()
    for byte in text.encode():
        place.advance(byte)
    return place


def test_a_text_that_could_go_on_may_also_end():
    place = GRAMMARS.json_schema({"type": "integer"})
    assert not place.mask()[256]
    place.advance(ord("1"))
    assert place.mask()[256] and place.mask()[ord("2")]
    place.advance(256)
    assert place.mask().nonzero()[0].tolist() == [256]


def test_forks_are_independent():
    place = after('{"a": ')
    mask, forks = place.mask(), [place.fork() for _ in range(3)]
    for fork, byte in zip(forks, b'1"{', strict=True):
        fork.advance(byte)
    assert (place.mask() == mask).all()
    assert len({fork.mask().tobytes() for fork in forks}) == 3
    mask[:] = False
    assert place.mask().any()


# ---------------------------------------------------------------- errors


def test_a_grammar_that_becomes_too_complex_says_so():
    place = GRAMMARS.json_schema({"type": "string", "pattern": "(.*a.{200}){3}"})
    letters = np.random.default_rng(0).choice([*b"ab"], size=1000)
    with pytest.raises(ConstraintError) as caught:
        for byte in (ord('"'), *letters):
            place.mask()
            place.advance(int(byte))
    assert str(caught.value) == "the grammar cannot go on: lexer error: too many expressions constructed"


def test_a_forbidden_token_is_an_error():
    for bad in (ord("x"), 256, 999_999):
        with pytest.raises(ConstraintError, match=f"does not allow token {bad} here"):
            GRAMMARS.json_object().fork().advance(bad)


def test_a_model_without_an_end_and_a_machine_without_llguidance(monkeypatch):
    class Endless(ByteTokenizer):
        eos_ids = frozenset()

    with pytest.raises(UsageError, match="no token that ends a text"):
        Grammars(Endless(), 257)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"llguidance is not installed: pip install 'truedraw\[server\]'"):
        Grammars(ByteTokenizer(), 257).json_object()
