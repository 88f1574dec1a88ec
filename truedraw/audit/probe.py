"""A few requests that find out what a server can do, before anything is tested."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from truedraw.audit.client import Abilities, Arm, Client, ServerFailed, digits
from truedraw.audit.plan import Plan

NEUTRAL = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""Nothing is cut or penalised. Who leaves them out is at the mercy of the server's defaults (llama.cpp: top-k 40, top-p 0.95,
min-p 0.05) or of a file beside the model."""


@dataclass(frozen=True, slots=True)
class Found:
    """What probing found."""

    on: Arm
    off: Arm | None
    why_not_off: str
    abilities: Abilities
    facts: dict[str, str]


class Probe:
    """A few requests that find out what a server can do."""

    def __init__(self, client: Client, plan: Plan) -> None:
        self._client, self._plan = client, plan

    async def look(self) -> Found:
        """Raises ServerFailed."""
        client, plan = self._client, self._plan
        models = await client.models(plan.on.url)
        on = plan.on if plan.on.model else replace(plan.on, model=models[0]["id"] if models else "default")
        if models and on.model not in {model["id"] for model in models}:
            raise ServerFailed(
                f"{on.url} has no model {on.model!r}: it has {', '.join(repr(model['id']) for model in models[:5])}"
            )
        path = "/v1/completions"
        refused = await client.refuses(on, path, {"prompt": plan.prompts[0]})
        if refused is not None:
            path = "/v1/chat/completions"
            again = await client.refuses(on, path, {"messages": [{"role": "user", "content": plan.prompts[0]}]})
            if again is not None:
                raise ServerFailed(f"neither completions nor chats are answered: {refused}; {again}")
        off, why = plan.off, ""
        if off is not None and not off.model:
            names = [model["id"] for model in await client.models(off.url)]
            off = replace(off, model=on.model if on.model in names or not names else names[0])
        neutral = await self._neutral([on] if off is None else [on, off], path)
        abilities = await self._logprobs(on, Abilities(path, neutral=neutral))
        abilities = await self._ids(on, abilities)
        if off is None:
            off, why = await self._plain(on, abilities)
        facts = {
            "model": on.model,
            "endpoint": path,
            "log-probabilities": "none"
            if abilities.num_logprobs is None
            else f"{abilities.num_logprobs} alternatives, {_rawness(abilities.raw)}"
            + (f", {abilities.digits} decimals" if abilities.digits is not None else ""),
            "token ids": "yes" if abilities.ids else "no",
            "sent to switch off the server's defaults": ", ".join(f"{k} {v}" for k, v in abilities.neutral.items()) or "nothing",
            "plain decoding": why
            if off is None
            else f"{off.url} {off.model} {json.dumps(dict(off.extra)) if off.extra else ''}".strip(),
        }
        return Found(on, off, why, abilities, facts)

    async def _neutral(self, arms: Sequence[Arm], path: str) -> dict[str, float]:
        """Those of NEUTRAL that every arm takes."""
        text = self._plan.prompts[0]
        asked = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
        taken: dict[str, float] = {}
        for name, value in NEUTRAL.items():
            if not any([await self._client.refuses(arm, path, {**asked, name: value}) for arm in arms]):
                taken[name] = value
        return taken

    async def _logprobs(self, on: Arm, abilities: Abilities) -> Abilities:
        for count in (5, 2, 1):
            tried = replace(abilities, num_logprobs=count)
            try:
                answers = await self._client.draw(on, tried, self._plan.prompts[0], {"temperature": 1}, 4)
            except ServerFailed:
                continue
            if not all(token.top for answer in answers for token in answer.tokens):
                continue
            raw, shown = await self._raw(on, tried)
            return replace(tried, raw=raw, digits=shown)
        return abilities

    async def _raw(self, on: Arm, abilities: Abilities) -> tuple[bool | None, int | None]:
        """Whether a first token's alternatives are the same at two temperatures."""
        tops: list[dict[str, float]] = []
        for temperature in (1.0, 0.5):
            (answer, *_) = await self._client.draw(on, abilities, self._plan.prompts[-1], {"temperature": temperature}, 2)
            if not answer.tokens:
                return None, None
            tops.append(dict(answer.tokens[0].top))
        shared = [name for name in tops[0] if name in tops[1] and tops[0][name] > -12]
        if len(shared) < 2:
            return None, None
        gaps = [[top[name] - top[shared[0]] for name in shared[1:]] for top in tops]
        widest = max(range(len(gaps[0])), key=lambda i: abs(gaps[0][i]))
        ratio = gaps[1][widest] / gaps[0][widest] if abs(gaps[0][widest]) > 0.2 else math.nan
        raw = True if abs(ratio - 1) < 0.1 else False if abs(ratio - 2) < 0.2 else None
        return raw, digits([value for top in tops for value in top.values()])

    async def _ids(self, on: Arm, abilities: Abilities) -> Abilities:
        tried = replace(abilities, ids=True)
        try:
            answers = await self._client.draw(on, tried, self._plan.prompts[0], {"temperature": 1}, 4)
        except ServerFailed:
            return abilities
        known = all(isinstance(token.key, int) for answer in answers for token in answer.tokens)
        return tried if known else abilities

    async def _plain(self, on: Arm, abilities: Abilities) -> tuple[Arm | None, str]:
        arm = replace(on, extra={**on.extra, "speculation": {"off": True}})
        before = self._client.num_with_statistics
        try:
            await self._client.draw(arm, abilities, self._plan.prompts[0], {"temperature": 1}, 4)
        except ServerFailed:
            return None, "the server knows no way to ask for plain decoding: name one with --off"
        if self._client.num_with_statistics == before:
            return None, "the server does not say that it knows the field speculation: name plain decoding with --off"
        return arm, ""


def _rawness(raw: bool | None) -> str:
    return {True: "before temperature", False: "after all parameters", None: "before or after temperature: could not be told"}[
        raw
    ]
