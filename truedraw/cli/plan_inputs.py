"""What truedraw plan reads: acceptance from the command line or a trace, pass costs from a profile, a server's counters."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from truedraw.cli.files import read_text
from truedraw.economics import (
    Counters,
    MeasuredCost,
    Survival,
    TokenCost,
    constant_survival,
    depth_survival,
    trace_survival,
)
from truedraw.errors import InvalidParameter, RunError, UsageError

_MAX_BYTES = 64 * 2**20
_TIMEOUT = 10.0
_ACCEPTANCE = "a number in [0, 1], rates by depth as in 0.8,0.7,0.6, or the path of a trace"
_TRACE = (
    "a JSON list of accepted counts, a JSON list of [proposed, accepted] pairs, or objects with acceptance_by_depth, as "
    "generate --json prints them"
)
_PROFILE = '{"sizes": [{"size": 1, "seconds": 0.008}, ...]}'


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A survival, where it comes from, and what a reader should know about it."""

    survival: Survival
    source: str
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------- acceptance


def read_acceptance(text: str, max_length: int) -> Acceptance:
    """A number, rates by depth, or the path of a trace; at most max_length deep."""
    numbers = _numbers(text)
    if numbers is None:
        return _trace(read_text("acceptance", text, _ACCEPTANCE), text, max_length)
    if len(numbers) == 1:
        return Acceptance(constant_survival(numbers[0], max_length), f"{numbers[0]:g} at every depth")
    return _cut(Acceptance(depth_survival(numbers), f"rates of {len(numbers)} depths"), max_length)


def _cut(acceptance: Acceptance, max_length: int) -> Acceptance:
    """The first max_length depths. Less than that: a note, as nothing is known of longer drafts."""
    depth = len(acceptance.survival)
    if depth >= max_length:
        return Acceptance(acceptance.survival[:max_length], acceptance.source, acceptance.notes)
    note = f"the acceptance is known to depth {depth}: longer drafts are left out"
    return Acceptance(acceptance.survival, acceptance.source, (*acceptance.notes, note))


def _numbers(text: str) -> list[float] | None:
    """The numbers of a text that is nothing else."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return None


def _trace(text: str, path: str, max_length: int) -> Acceptance:
    entries = _json_values(text, path)
    if entries and all(isinstance(entry, dict) for entry in entries):
        return _cut(_generated(entries, path), max_length)
    if len(entries) != 1 or not isinstance(entries[0], list) or not entries[0]:
        raise UsageError(f"{path} is no trace: needed is {_TRACE}")
    steps = entries[0]
    notes: tuple[str, ...]
    if all(isinstance(step, list) and len(step) == 2 for step in steps):
        proposed, accepted = [step[0] for step in steps], [step[1] for step in steps]
        survival = _checked_trace(accepted, proposed, path, max_length)
        num_plain = sum(length == 0 for length in proposed)
        notes = (f"{num_plain} of {len(steps)} steps proposed nothing: plain steps, not counted",) if num_plain else ()
    else:
        odd = next((index for index, step in enumerate(steps) if isinstance(step, list | dict | str)), None)
        if odd is not None:
            raise UsageError(f"entry {odd} of {path} is {json.dumps(steps[odd])[:80]}: needed is {_TRACE}")
        survival = _checked_trace(steps, None, path, max_length)
        notes = (f"no proposed counts: {max(1, *steps)} draft tokens per step, the most accepted, are assumed",)
    if not survival:
        raise UsageError(f"{path} holds {len(steps)} steps and no proposed token: needed is at least one step with a draft")
    return _cut(Acceptance(survival, f"trace of {len(steps)} steps", notes), max_length)


def _checked_trace(accepted: list[Any], proposed: list[Any] | None, path: str, max_length: int) -> Survival:
    try:
        return trace_survival(accepted, proposed, max_length)
    except InvalidParameter as error:
        raise UsageError(f"{path}: {error}") from None


def _generated(entries: list[dict[str, Any]], path: str) -> Acceptance:
    """Of what `generate --json` printed: acceptance_by_depth is accepted over proposed at each depth, which is S_k."""
    runs = [run for entry in entries for run in (entry["choices"] if isinstance(entry.get("choices"), list) else [entry])]
    rates = [run.get("acceptance_by_depth") if isinstance(run, dict) else None for run in runs]
    for run, by_depth in enumerate(rates):
        if not isinstance(by_depth, list):
            raise UsageError(f"run {run} of {path} has no acceptance_by_depth: needed is {_TRACE}")
        try:
            for rate in by_depth:
                depth_survival([rate])
        except InvalidParameter as error:
            raise UsageError(f"run {run} of {path}: {error}") from None
    notes: list[str] = []
    drafting = [
        (_steps(run, path) if len(runs) > 1 else 1, by_depth) for run, by_depth in zip(runs, rates, strict=True) if by_depth
    ]
    if not drafting:
        raise UsageError(f"{path} holds {len(runs)} run(s) without a proposed token: needed is one with drafts")
    if len(drafting) < len(runs):
        notes.append(f"{len(runs) - len(drafting)} of {len(runs)} runs proposed nothing: not counted")
    if len(drafting) > 1:
        notes.append("runs are pooled by their steps")
    pooled = [_pooled(drafting, depth) for depth in range(max(len(by_depth) for _, by_depth in drafting))]
    survival = list(accumulate(pooled, min))
    if survival != pooled:
        notes.append("acceptance rises with depth, as longer drafts were made where more is accepted: held at its minimum so far")
    return Acceptance(tuple(survival), f"{len(drafting)} run(s) of generate", tuple(notes))


def _steps(run: dict[str, Any], path: str) -> int:
    steps = run.get("steps")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"{path}: steps is {steps!r}: needed is the number of steps of each run, to pool several")
    return steps


def _pooled(runs: list[tuple[int, list[float]]], depth: int) -> float:
    reached = [(steps, by_depth[depth]) for steps, by_depth in runs if depth < len(by_depth)]
    return sum(steps * rate for steps, rate in reached) / sum(steps for steps, _ in reached)


# ---------------------------------------------------------------- pass costs


def read_pass_cost(text: str) -> tuple[TokenCost | MeasuredCost, tuple[str, ...]]:
    """A number, or the path of a profile; and notes. Of a profile the single sequence at the shortest cache counts."""
    numbers = _numbers(text)
    if numbers is not None and len(numbers) == 1:
        return TokenCost(numbers[0]), ()
    allowed = f"a number >= 0 (further tokens of a pass, in plain passes), or the path of a profile {_PROFILE}"
    values = _json_values(read_text("pass_cost", text, allowed), text)
    entries = values[0].get("sizes") if len(values) == 1 and isinstance(values[0], dict) else None
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{text} is no profile: needed is {_PROFILE}")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or "size" not in entry or "seconds" not in entry:
            raise UsageError(f"entry {index} of sizes in {text} is {json.dumps(entry)[:80]}: needed is {_PROFILE}")
        for name in ("sequences", "cached"):
            count = entry.get(name, 0)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise UsageError(f"entry {index} of sizes in {text}: {name} is {count!r}: allowed is an integer >= 0")
    single = [entry for entry in entries if entry.get("sequences", 1) == 1]
    if not single:
        raise UsageError(f"{text} has no entry with sequences 1: measure a single sequence")
    cached = min(entry.get("cached", 0) for entry in single)
    used = [entry for entry in single if entry.get("cached", 0) == cached]
    try:
        cost = MeasuredCost(tuple(entry["size"] for entry in used), tuple(entry["seconds"] for entry in used))
    except InvalidParameter as error:
        raise UsageError(f"{text}: {error}") from None
    note = f"of {len(entries)} measured passes the {len(used)} of one sequence at {cached} cached tokens were used"
    return cost, (note,) if len(used) < len(entries) else ()


# ---------------------------------------------------------------- files


def _json_values(text: str, path: str) -> list[Any]:
    """The JSON value of a file, or one for each of its lines. Raises UsageError."""
    if not text.strip():
        raise UsageError(f"{path} is empty: needed is JSON")
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError) as error:
        reason: object = error
    values: list[Any] = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            values += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            reason = f"line {number}: {error}" if values else reason  # where not even a line is JSON, lines are not meant
            raise UsageError(f"{path} is no JSON: {reason}") from None
    return values


# ---------------------------------------------------------------- a running server

_DRAFTS, _PROPOSED, _ACCEPTED, _BY_DEPTH = (
    f"vllm:spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)
_SAMPLE = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\S+)?")
_POSITION = re.compile(r'(?:^|,)\s*position="([0-9]{1,6})"')


def read_counters(url: str) -> Counters:
    """The acceptance counters of a vLLM server, summed over its engines. Raises RunError that names the URL."""
    return parse_counters(_get(url), url)


def _get(url: str) -> str:
    import httpx

    try:
        address = httpx.URL(url)
        if address.scheme not in ("http", "https") or not address.host:
            raise InvalidParameter("metrics", url, "an address as http://localhost:8000/metrics")
        if address.path in ("", "/"):
            address = address.copy_with(path="/metrics")
        start = time.monotonic()
        data = bytearray()
        with httpx.stream("GET", address, timeout=_TIMEOUT, follow_redirects=True) as response:
            if response.status_code != httpx.codes.OK:
                raise RunError(
                    f"{address} answers {response.status_code} {response.reason_phrase}: is it a vLLM server's address?"
                )
            for piece in response.iter_bytes():
                data += piece
                if len(data) > _MAX_BYTES or time.monotonic() - start > _TIMEOUT:
                    raise RunError(f"{address} sends no end: {len(data)} bytes in {time.monotonic() - start:.0f} s")
        return data.decode()
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise InvalidParameter("metrics", url, f"an address as http://localhost:8000/metrics ({error})") from None
    except httpx.TimeoutException:
        raise RunError(f"{url} did not answer within {_TIMEOUT:g} s") from None
    except httpx.HTTPError as error:
        raise RunError(f"{url} cannot be read: {error or type(error).__name__}") from None
    except UnicodeDecodeError:
        raise RunError(f"{url} answers with something that is no text: is it a vLLM server's /metrics?") from None


def parse_counters(text: str, url: str) -> Counters:
    """From the Prometheus text format."""
    totals: dict[str, int] = {}
    by_depth: dict[int, int] = {}
    for name, labels, count in _samples(text, url):
        if name == _BY_DEPTH:
            position = _POSITION.search(labels)
            if position is None:
                raise RunError(f"{url}: {name} has no label position, only {labels or 'none'}")
            by_depth[int(position[1])] = by_depth.get(int(position[1]), 0) + count
        else:
            totals[name] = totals.get(name, 0) + count
    missing = [name for name in (_DRAFTS, _PROPOSED, _ACCEPTED) if name not in totals] + ([] if by_depth else [_BY_DEPTH])
    if missing:
        raise RunError(f"{url} has no {missing[0]}: needed is a vLLM server that was started with a speculative config")
    drafts, proposed, accepted = totals[_DRAFTS], totals[_PROPOSED], totals[_ACCEPTED]
    if drafts == 0:
        raise RunError(f"{url}: no drafts were made yet: send the server some requests and ask again")
    depths = tuple(by_depth.get(depth, 0) for depth in range(max(by_depth) + 1)) if len(by_depth) == max(by_depth) + 1 else ()
    falling = all(deep <= shallow for shallow, deep in zip((drafts, *depths), depths, strict=False))
    if not depths or not falling or not accepted <= proposed <= drafts * len(depths):
        counts = f"{drafts} drafts, {proposed} tokens proposed, {accepted} accepted, by position {sorted(by_depth.items())}"
        raise RunError(f"{url}: counters that do not fit together, ask again: {counts}")
    return Counters(drafts, proposed, accepted, depths)


def _samples(text: str, url: str) -> Iterator[tuple[str, str, int]]:
    """name without _total, labels and value of each sample of the four counters."""
    for line in text.split("\n"):
        if not line.startswith("vllm:spec_decode_num_"):
            continue
        sample = _SAMPLE.fullmatch(line.rstrip())
        name = re.split(r"[{\s]", line, maxsplit=1)[0].removesuffix("_total")
        if name not in (_DRAFTS, _PROPOSED, _ACCEPTED, _BY_DEPTH):  # _created: a time, and counters of later versions
            continue
        try:
            value = float(sample["value"]) if sample else -1.0
            count = int(value)
        except (ValueError, OverflowError):
            value, count = -1.0, 0
        if sample is None or value < 0:
            raise RunError(f"{url}: {line.strip()[:120]!r} is no counter: is it a vLLM server's /metrics?")
        yield name, sample["labels"] or "", count
