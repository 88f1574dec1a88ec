"""A local OpenAI-compatible server with a toy model, speculation, and a fault of known size where one is planted."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType

from truedraw.audit.planted.asked import Asked
from truedraw.audit.planted.choices import Logprobs, Piece, pieces
from truedraw.audit.planted.decoder import Counted, Decoder, Rows
from truedraw.audit.planted.faults import FAULTS, Fault
from truedraw.audit.planted.model import PLAIN, Floats, Model, Settings
from truedraw.audit.planted.replies import Reply
from truedraw.audit.planted.troubles import Trouble, TroubleKind
from truedraw.audit.planted.wire import Http
from truedraw.errors import InvalidParameter


class PlantedServer:
    """Serves from `with` to its end, on a free port of this machine.

    fault, strength    a Fault or its name, and the share of steps in which it acts; None: a correct server
    model_seed         of the toy model; kernel_tv: its rows are off by exactly so much, on and off alike, before any parameter
    seed               of the noise of requests without a seed: with it, single-threaded runs repeat
    speculates         False: never, whatever is asked
    plain_name         a second model name, under which nothing is speculated
    processed_logprobs log-probabilities of the tokens' own law, not of the rows before any parameter
    digits             of printed log-probabilities; None: all
    has_ids, has_logprobs, knows_speculation   what it can do; a field `speculation` that it doesn't know is refused
    api_key            needed where given
    troubles           what else goes wrong
    """

    def __init__(
        self,
        fault: Fault | str | None = None,
        strength: float = 1.0,
        *,
        model_seed: int = 0,
        kernel_tv: float = 0.0,
        seed: int | None = None,
        name: str = "planted",
        plain_name: str | None = None,
        speculates: bool = True,
        processed_logprobs: bool = False,
        digits: int | None = None,
        has_ids: bool = True,
        has_logprobs: bool = True,
        knows_speculation: bool = True,
        api_key: str | None = None,
        troubles: tuple[Trouble, ...] = (),
    ) -> None:
        if isinstance(fault, str) and fault not in FAULTS:
            raise InvalidParameter("fault", fault, "one of " + ", ".join(FAULTS))
        if not 0 < strength <= 1:
            raise InvalidParameter("strength", strength, "0 < strength <= 1")
        self.fault = FAULTS[fault] if isinstance(fault, str) else fault
        self.strength = strength
        self.name, self.plain_name = name, plain_name
        self.has_ids, self.has_logprobs, self.knows_speculation = has_ids, has_logprobs, knows_speculation
        self.api_key, self.troubles = api_key, troubles
        self.reference = model(model_seed)
        self._speculates, self._processed, self._digits = speculates, processed_logprobs, digits
        self._model, self._other = model(model_seed, kernel_tv), functools.partial(model, model_seed + 1, kernel_tv)
        self._entropy = random.SystemRandom().getrandbits(64) if seed is None else seed
        self._numbers = itertools.count()
        self._rows = functools.lru_cache(maxsize=256)(Rows)
        self._http: Http | None = None

    def __enter__(self) -> PlantedServer:
        self._http = Http(self)
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._http is not None
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        """Without /v1."""
        assert self._http is not None, "the server runs inside `with`"
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def names(self) -> list[str]:
        return [self.name] if self.plain_name is None else [self.name, self.plain_name]

    def row(self, tokens: list[int], settings: Settings = PLAIN, *, prompt_length: int | None = None) -> Floats:
        """The target's law of the token after these, without kernel_tv and fault: (VOCAB,), sums to 1.

        prompt_length: how many of the tokens are prompt, which presence and frequency penalties leave out; None: all.
        """
        length = len(tokens) if prompt_length is None else prompt_length
        return self._rows(self.reference, settings).at(False, tokens, len(tokens), Counted(tokens, length), len(tokens)).array

    def next_number(self) -> int:
        """Of a request for a completion, from 0."""
        return next(self._numbers)

    def troubled(self, number: int) -> frozenset[TroubleKind]:
        return frozenset(trouble.kind for trouble in self.troubles if trouble.hits(number))

    def retry_after(self) -> float:
        return max(trouble.retry_after for trouble in self.troubles if trouble.kind == "429")

    def answer(self, asked: Asked, number: int) -> tuple[Reply, list[Iterator[Piece]]]:
        """What one request is told: of each choice its pieces, as they are decoded."""
        troubled = self.troubled(number)
        chosen = self._other() if "other model" in troubled else self._model
        speculates = self._speculates and not asked.off and (asked.model is None or asked.model != self.plain_name)
        name = f"{self.name}-2" if "other model" in troubled else asked.model or self.name
        reply = Reply(asked, number, name, speculates, self.has_ids)
        rows, judged = self._rows(chosen, asked.settings), self._rows(chosen, self._judged_by(asked.settings))
        told = None
        if asked.num_logprobs is not None and self.has_logprobs and "no logprobs" not in troubled:
            raw = None if self._processed else self._rows(chosen, PLAIN)
            told = Logprobs(raw, self._digits, asked.num_logprobs)
        coin = random.Random(self._entropy + (number << 80))
        same = speculates and self.fault is not None and self.fault.same_choices and coin.random() < self.strength
        choices = []
        for index in range(len(asked.prompts) * asked.n):
            choice = 0 if same else index % asked.n
            fresh = random.Random(self._entropy + (number << 80) + ((1 + (index - index % asked.n) + choice) << 64))
            decoder = Decoder(
                rows,
                judged,
                list(asked.prompts[index // asked.n]),
                speculates=speculates,
                fault=self.fault,
                strength=self.strength,
                noise=fresh if asked.seed is None else random.Random(f"{asked.seed}/{choice}"),
                fresh=fresh,
                race_key=None if asked.seed is None else (asked.seed, choice),
            )
            made = pieces(decoder, asked, told, self.fault)
            choices.append(_without_drafts(made) if "bare drafts" in troubled else made)
        return reply, choices

    def _judged_by(self, settings: Settings) -> Settings:
        return settings if self.fault is None else settings.without(self.fault.judged_without)


def _without_drafts(told: Iterator[Piece]) -> Iterator[Piece]:
    """Pieces without the log-probabilities of accepted drafts."""
    return (replace(piece, logprobs=piece.logprobs[piece.accepted :]) for piece in told)


@functools.lru_cache(maxsize=16)
def model(seed: int = 0, kernel_tv: float = 0.0) -> Model:
    return Model(seed, kernel_tv)
