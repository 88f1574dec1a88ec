"""A black-box audit of an OpenAI-compatible server: does what it streams have the law that it should?"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from truedraw.audit.client import Abilities, Answer, Arm, Client, ServerFailed
from truedraw.audit.contracts import Contract, contracts, first_difference
from truedraw.audit.draws import Evidence, OnAgainstOff, SelfConsistency
from truedraw.audit.findings import Example, ModeReport, Verdict
from truedraw.audit.heads import head_of, log_bound, untestable
from truedraw.audit.plan import ANSWER_TOKENS, SETTINGS, Plan
from truedraw.audit.probe import Found, Probe
from truedraw.audit.reference import Trust

INTERRUPTED = "interrupted"
_SEEDS = 8
_LIKE_LOADED = 8  # requests beside the seeded one
_SURPRISE = -20.0  # nats: what is less likely than this is told as the example
Progress = Callable[[str, float, float], None]
"""What is being done, the share that is done, and log10 of the evidence so far."""


async def audit(
    plan: Plan,
    on_progress: Progress = lambda what, share, evidence: None,
    *,
    settings: Sequence[tuple[str, Mapping[str, Any]]] = SETTINGS,
    laws_only: bool = False,
) -> tuple[list[ModeReport], dict[str, str]]:
    """The report of each mode, and facts to keep. Never raises for what a server does; cancelled, it tells what was seen."""
    async with Client(plan.headers, concurrency=plan.concurrency, timeout=plan.timeout) as client:
        try:
            found = await Probe(client, plan).look()
        except (ServerFailed, asyncio.CancelledError) as error:
            told = str(error) or INTERRUPTED
            return [ModeReport("connection", "not completed", "whether the server can be asked", told)], {}
        run = _Run(client, plan, found, on_progress)
        await run.all(settings, laws_only=laws_only)
        facts = {**found.facts, "tokens drawn": str(client.num_tokens), "requests": str(client.num_requests)}
        if client.num_proposed is not None:
            facts["drafts, as the server tells"] = f"{client.num_proposed} proposed, {client.num_accepted} accepted"
        if client.num_busy:
            facts["times it was busy (429)"] = str(client.num_busy)
        return run.reports, facts


class _Run:
    """The modes, one after the other. What a failing server leaves untested is told as not completed."""

    def __init__(self, client: Client, plan: Plan, found: Found, on_progress: Progress) -> None:
        self._client, self._plan, self._found, self._on_progress = client, plan, found, on_progress
        self.reports: list[ModeReport] = []
        self._sample: list[Answer] = []

    async def all(self, settings: Sequence[tuple[str, Mapping[str, Any]]], *, laws_only: bool) -> None:
        for name, parameters in settings:
            await self._laws(name, parameters)
            if any(report.verdict == "not completed" for report in self.reports):
                return
        for mode in () if laws_only else (self._contracts, self._seeds):
            try:
                await mode()
            except (ServerFailed, asyncio.CancelledError) as error:
                self.reports.append(ModeReport(mode.__name__.strip("_"), "not completed", "", str(error) or INTERRUPTED))
                return

    # ------------------------------------------------------------ laws

    async def _laws(self, name: str, settings: Mapping[str, Any]) -> None:
        """One setting: on against off, and the on run against its own report; both see the same draws."""
        plan, found, abilities = self._plan, self._found, self._found.abilities
        pairs, own = OnAgainstOff(), SelfConsistency()
        trust = Trust(plan.reference, self._found.abilities) if plan.reference is not None and name == SETTINGS[0][0] else None
        why_not = untestable(settings, num_top=abilities.num_logprobs, raw=abilities.raw)
        failure, refused, drawn, silent = "", "", 0, 0
        drafts_before = self._client.num_proposed
        per_round = max(1, plan.concurrency)
        target = plan.tokens_each if found.off is not None else plan.tokens_each // 2
        try:
            while drawn < target and not (pairs.rejects(plan.mode_alpha) or (not silent and own.rejects(plan.mode_alpha))):
                prompts = [plan.prompts[(drawn + i) % len(plan.prompts)] for i in range(per_round * len(plan.prompts))]
                ons = await self._draw(found.on, prompts, settings)
                offs = await self._draw(found.off, prompts, settings) if found.off is not None else [None] * len(ons)
                if not silent and (silent := _num_silent(ons, offs)):
                    pairs = OnAgainstOff()  # what was seen so far was chosen by what had a report
                for prompt, on, off in zip(prompts, ons, offs, strict=True):
                    drawn += len(on.tokens) + (len(off.tokens) if off is not None else 0)
                    drawn += not on.tokens  # an empty answer is a draw too
                    if abilities.raw is not None:
                        raw, shown = abilities.raw, abilities.digits
                        known = [head_of(token, settings, raw=raw, digits=shown) for token in on.tokens]
                        bounds = [log_bound(token, settings, raw=raw, digits=shown) for token in on.tokens]
                        own.add(on, prompt, known if why_not is None else [None] * len(known), log_bounds=bounds)
                    if off is not None:
                        pairs.add(self._summed(on, prompt, bool(silent)), self._summed(off, prompt, bool(silent)), prompt)
                    if trust is not None:
                        trust.add(on, off, prompt, settings)
                self._sample += ons[: 64 - len(self._sample)] if name == SETTINGS[0][0] else []
                best = max(pairs.log_maximum, own.log_maximum) / math.log(10)
                self._on_progress(name, min(drawn / target, 1.0), best)
        except asyncio.CancelledError:
            failure = INTERRUPTED
        except ServerFailed as error:
            if drawn or not _refuses(error):
                failure = str(error)
            else:  # it never takes such a request: no server that broke
                refused = why_not = str(error)
        example = self._example(settings)
        idle = self._client.num_proposed is not None and self._client.num_proposed == (drafts_before or 0)
        if found.off is None or refused or (idle and drawn and not failure and not pairs.rejects(plan.mode_alpha)):
            reason = found.why_not_off or refused or "the server says that it drafted nothing: prompts with copies may help"
            self._report(f"on against off, {name}", "whether speculation changes the law", reason, None, None)
        else:
            self._report(f"on against off, {name}", "whether speculation changes the law", "", pairs, example, failure)
        if trust is not None:
            self._trusted(trust, example, failure)
        asked = "whether tokens are drawn as their own log-probabilities say"
        if why_not is None and silent:
            why_not = "some tokens come without alternatives: which ones may depend on what was drawn"
        if why_not is None and not failure and not own.num_judged:
            why_not = "no token's report reached far enough"
        if not silent and own.rejects(plan.mode_alpha):  # by what is all but impossible, whether rows are known or not
            why_not = None
        self._report(f"self-consistency, {name}", asked, why_not or "", own, example, failure)
        if failure and not any(report.verdict == "not completed" for report in self.reports):
            self.reports.append(ModeReport(f"the rest of {name}", "not completed", "", failure))  # nothing else told of it

    def _summed(self, answer: Answer, prompt: str, silent: bool) -> Answer:
        """What pairs are summed up by: the server's log-probabilities, or the reference's where it tells none."""
        reference = self._plan.reference
        if reference is None or self._found.abilities.num_logprobs is not None:
            return answer.bare if silent else answer
        return reference.scored(prompt, answer)

    def _trusted(self, trust: Trust, example: Example, failure: str) -> None:
        asked = "whether tokens are drawn from the reference's rows, within the floor"
        why_not = (
            "" if trust.evidence.samples or failure else f"no answer could be scored: {trust.why_not or 'too few were drawn'}"
        )
        self._report("against a reference", asked, why_not, trust.evidence, example, failure)
        if not why_not:
            self.reports[-1] = replace(self.reports[-1], floor=trust.floor, notes=(*self.reports[-1].notes, *trust.notes))

    async def _draw(self, arm: Arm, prompts: Sequence[str], settings: Mapping[str, Any]) -> list[Answer]:
        """One answer to each, `concurrency` at a time, in the order of the prompts."""
        gate = asyncio.Semaphore(self._plan.concurrency)

        async def one(prompt: str) -> Answer:
            async with gate:
                return (await self._client.draw(arm, self._found.abilities, prompt, settings, ANSWER_TOKENS))[0]

        tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _report(
        self, mode: str, asked: str, why_not: str, evidence: Evidence | None, example: Example | None, failure: str = ""
    ) -> None:
        alpha = self._plan.mode_alpha
        if why_not or evidence is None:
            self.reports.append(ModeReport(mode, "not testable", asked, why_not))
            return
        found = evidence.rejects(alpha)
        notes = []
        blind = isinstance(evidence, OnAgainstOff) and self._found.abilities.num_logprobs is None and self._plan.reference is None
        if blind:
            notes.append("no log-probabilities: only which tokens came is compared, and what that would have seen is not known")
        if isinstance(evidence, SelfConsistency) and evidence.num_left_out:
            notes.append(f"{evidence.num_left_out} tokens left out: their report did not reach far enough")
        if isinstance(evidence, SelfConsistency) and evidence.contradiction is not None:
            token, head = evidence.contradiction
            example = Example(
                f"token {token.text!r} was drawn, which the report and the parameters forbid: {head.names[:3]}",
                example.command if example else "",
            )
        if found and isinstance(evidence, SelfConsistency) and evidence.rarest is not None and evidence.rarest[0] < _SURPRISE:
            bound, token = evidence.rarest
            told = f"token {token.text!r} was drawn, and its own report gives it a probability of {math.exp(bound):.0e} at most"
            example = Example(told, example.command if example else "")
        tokens = 2 * evidence.num_judged if isinstance(evidence, SelfConsistency) else evidence.samples
        self.reports.append(
            ModeReport(
                mode,
                "fault found" if found else "not completed" if failure else "no evidence",
                asked,
                failure,
                evidence.samples,
                "tokens",
                alpha,
                evidence.e_value,
                evidence.p_value,
                None if blind else self._plan.seen_with(tokens),
                None,
                evidence.fired(alpha) if found else (),
                example if found else None,
                tuple(evidence.path),
                tuple(notes),
            )
        )

    def _example(self, settings: Mapping[str, Any]) -> Example:
        prompt = self._plan.prompts[0]
        shown = prompt if len(prompt) <= 80 else f"{prompt[:50]} ... {prompt[-20:]}"
        return Example(f"draw this many times and compare: {shown!r}", self._curl(settings, prompt))

    def _curl(self, settings: Mapping[str, Any], prompt: str, max_tokens: int = ANSWER_TOKENS) -> str:
        body = {**self._client.body(self._found.on, self._found.abilities, prompt, settings, max_tokens), "stream": False}
        url = self._found.on.url + self._found.abilities.path
        sent = shlex.quote(json.dumps(body, ensure_ascii=False))
        return f"curl -s {shlex.quote(url)} -H 'Content-Type: application/json' -d {sent}"

    # ------------------------------------------------------------ contracts

    async def _contracts(self) -> None:
        abilities = self._found.abilities
        ids = Counter(
            token.key for answer in self._sample for token in answer.tokens if isinstance(token.key, int) and token.text.strip()
        )
        words = Counter(token.text for answer in self._sample for token in answer.tokens if len(token.text.strip()) > 1)
        words = words or Counter(word for answer in self._sample for word in answer.text.split() if len(word) > 1)
        stop = words.most_common(1)[0][0].strip() if words else None
        listed = contracts([key for key, _ in ids.most_common(3)], stop)
        for i, contract in enumerate(listed):
            self._on_progress(f"parameters: {contract.name}", i / len(listed), 0.0)
            self.reports.append(await self._contract(contract, abilities))
            if self.reports[-1].verdict == "not completed":
                return
        for name, known, why_not in (
            ("stop", stop, "no answer held a word"),
            ("logit_bias", ids, "the server tells no token ids"),
        ):
            if not known:
                asked = f"whether {name} holds on every token"
                self.reports.append(ModeReport(f"parameter {name}", "not testable", asked, why_not))

    async def _contract(self, contract: Contract, abilities: Abilities) -> ModeReport:
        mode, asked = f"parameter {contract.name}", f"whether {contract.name} holds on every token"
        if contract.needs_logprobs and (abilities.num_logprobs is None or abilities.raw is None):
            return ModeReport(mode, "not testable", asked, "the server tells no log-probabilities that it could be checked by")
        samples = 0
        for prompt in self._prompts(self._plan.requests_each):
            try:
                answers = await self._client.draw(self._found.on, abilities, prompt, contract.settings, contract.max_tokens)
            except ServerFailed as error:
                if samples or not _refuses(error):
                    return ModeReport(mode, "not completed", asked, str(error), samples)
                return ModeReport(mode, "not testable", asked, str(error))
            samples += sum(len(answer.tokens) for answer in answers)
            wrong = contract.check(answers, contract.settings, bool(abilities.raw), abilities.digits)
            if wrong is not None:
                example = Example(wrong, self._curl(contract.settings, prompt, contract.max_tokens))
                return ModeReport(mode, "fault found", asked, "", samples, example=example)
        return ModeReport(mode, "no evidence", asked, "", samples)

    def _prompts(self, count: int) -> Iterator[str]:
        return (self._plan.prompts[i % len(self._plan.prompts)] for i in range(count))

    async def _seeds(self) -> None:
        """Whether a seed repeats a text: alone, under load, without speculation."""
        plan, found = self._plan, self._found
        asked = "whether a seed gives the same text again"
        repeats = differs_off = differs_load = 0
        example: Example | None = None
        notes: list[str] = []
        samples = 0
        for seed, prompt in enumerate(self._prompts(_SEEDS)):
            self._on_progress("seeds", seed / _SEEDS, 0.0)
            settings = {"temperature": 1, "seed": 1000 + seed}
            try:
                first = await self._one(found.on, prompt, settings)
            except ServerFailed as error:
                if _refuses(error):
                    self.reports.append(ModeReport("seed", "not testable", asked, str(error)))
                    return
                raise
            again = await self._one(found.on, prompt, settings)
            beside = [
                self._one(found.on, other, {"temperature": 1}) for other in self._prompts(min(_LIKE_LOADED, plan.concurrency))
            ]
            loaded, *_ = await asyncio.gather(self._one(found.on, prompt, settings), *beside)
            samples += 3 * len(first.tokens)
            if (parted := first_difference(first, again)) is not None:
                repeats += 1
                example = example or Example(
                    f"seed {1000 + seed} gave two texts, which part at token {parted[0] + 1}{_margin(parted[1])}",
                    self._curl(settings, prompt),
                )
            elif (parted := first_difference(first, loaded)) is not None:
                differs_load += 1
                notes.append(
                    f"seed {1000 + seed}: beside other requests another text from token {parted[0] + 1} on{_margin(parted[1])}"
                )
            if (
                found.off is not None
                and (parted := first_difference(first, await self._one(found.off, prompt, settings))) is not None
            ):
                differs_off += 1
                notes.append(
                    f"seed {1000 + seed}: without speculation another text from token {parted[0] + 1} on{_margin(parted[1])}"
                )
        told = [f"of {_SEEDS} seeds, {repeats} gave another text when sent again, {differs_load} beside other requests"]
        if found.off is not None:
            told.append(
                f"{differs_off} of {_SEEDS} gave another text without speculation (a server need not promise that they agree)"
            )
        verdict: Verdict = "fault found" if repeats > _SEEDS // 2 else "no evidence"
        self.reports.append(
            ModeReport(
                "seed",
                verdict,
                asked,
                "",
                samples,
                example=example if verdict == "fault found" else None,
                notes=(*told, *notes[:3]),
            )
        )

    async def _one(self, arm: Arm, prompt: str, settings: Mapping[str, Any]) -> Answer:
        return (await self._client.draw(arm, self._found.abilities, prompt, settings, 24))[0]


def _num_silent(*arms: Sequence[Answer | None]) -> int:
    return sum(answer.num_silent for answers in arms for answer in answers if answer is not None)


def _margin(margin: float | None) -> str:
    return "" if margin is None else f" (the two likeliest tokens differ by {margin:.3f} nats there)"


def _refuses(error: ServerFailed) -> bool:
    return " answers 4" in str(error)
