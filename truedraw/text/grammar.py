"""Constraints that keep a text inside a grammar, by llguidance (its one home).

A token is allowed if its bytes continue some text of the grammar, whatever the tokenizer itself would have
made of that text; control tokens are not. Whitespace between the parts of a JSON text is what the model
makes of it, within bounds: nothing, one space, or one line break with up to 20 spaces or tabs, so that no
text can go on with whitespace for ever. None comes before the first or after the last character.

The text may end exactly where the grammar accepts it: there all end-of-text tokens of the model are allowed, and
where nothing can follow only these. Not for requests with min_tokens or ignore_eos: the text could not end.

Names of an object that its schema does not spell out may come up twice, as JSON itself allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from truedraw.errors import ConstraintError, MissingExtra, UsageError
from truedraw.protocols import Constraint, Mask, Tokenizer
from truedraw.text.json_schema import checked, refused

_WHITESPACE = r" |\n[ \t]{0,20}"
_OPTIONS = {"item_separator": ",", "key_separator": ":", "whitespace_pattern": _WHITESPACE, "lenient": False}
_MAX_LEXER_STATES = 50_000  # of 1 to 2 kB, for each sequence
_JSON_OBJECT = {"type": "object"}


class Grammars:
    """Makes constraints for one tokenizer. Its vocabulary is read on first use (0.2 s for 49k tokens).

    vocab_size  the length of the model's rows, and so of the masks
    Raises UsageError if the tokenizer knows no token that ends a text, MissingExtra on first use without llguidance.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._ends = sorted(token for token in tokenizer.eos_ids if 0 <= token < vocab_size)
        if not self._ends:
            raise UsageError("the model has no token that ends a text: a response_format needs one")

    def json_object(self) -> Constraint:
        """Any JSON object."""
        return self._json(_JSON_OBJECT)

    def json_schema(self, schema: object) -> Constraint:
        """The JSON texts that a schema describes, properties in the order in which it names them.

        schema: a mapping, as in docs/json_schema.md of llguidance (draft 2020-12 with gaps). Raises InvalidParameter for
        one that is no JSON, too large, not enforced in every keyword, or that no text satisfies.
        """
        return self._json(checked(schema))

    def _json(self, schema: Mapping[str, Any]) -> Grammar:
        llguidance = _llguidance()
        source = json.dumps({**schema, "x-guidance": _OPTIONS})
        # no_forcing: else only the tokenizer's own spelling of what must follow is allowed
        grammar = f'%llguidance {{"no_forcing": true}}\nstart: %json {source}'
        limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=_MAX_LEXER_STATES)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise refused(schema, f"a schema that a grammar can be made of ({_reason(matcher)})")
        start = Grammar(matcher, self._vocab_size)
        try:
            start.mask()
        except ConstraintError:
            raise refused(schema, "a schema that some text in this vocabulary satisfies") from None
        return start

    @cached_property
    def _vocabulary(self) -> Any:
        known = min(self._vocab_size, self._tokenizer.vocab_size)
        tokens = [b"" if token in self._ends else self._tokenizer.token_bytes(token) for token in range(known)]
        tokens += [b""] * (self._vocab_size - known)
        vocabulary = _Vocabulary(self._tokenizer, tuple(tokens), self._ends[0])
        return _llguidance().LLTokenizer(vocabulary, n_vocab=self._vocab_size, eos_token=self._ends)


class Grammar:
    """A place in a grammar: a Constraint. A fork takes microseconds, a mask tens of them."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def mask(self) -> Mask:
        """See Constraint. Raises ConstraintError where the grammar can't go on: it has become too complex, or the
        vocabulary has no token for what must follow."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():  # the mask then names the end, whatever came before it
            raise ConstraintError(f"the grammar cannot go on: {_reason(self._matcher)}")
        return np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)

    def fork(self) -> Grammar:
        return Grammar(self._matcher.deep_copy(), self._vocab_size)

    def advance(self, token: int) -> None:
        """See Constraint. Raises ConstraintError for a token that the mask forbade."""
        if not self._matcher.consume_token(token):
            raise ConstraintError(f"the grammar does not allow token {token} here: {_reason(self._matcher)}")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What LLTokenizer asks of a tokenizer."""

    tokenizer: Tokenizer
    tokens: tuple[bytes, ...]
    eos_token_id: int
    bos_token_id: int | None = None
    special_token_ids: tuple[int, ...] = ()
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=False)


def _reason(matcher: Any) -> str:
    """llguidance's error, in one line and without the grammar that it repeats."""
    message = re.split(r"\n<|\n +1 \| ", matcher.get_error())[0]
    message = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", message)
    message = " ".join(message.split())
    return message if len(message) <= 200 else f"{message[:197]}..."


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtra("llguidance", "server") from None
    return llguidance
