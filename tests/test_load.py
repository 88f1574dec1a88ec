"""truedraw load against a server whose answers, delays and failures are known."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import stub_openai
from stub_openai import CHUNKS, GAP, PROMPT_TOKENS, TOKENS

from truedraw.bench import load_prompts
from truedraw.bench.load import Load, Run, measure, runs, warm_up
from truedraw.bench.load_client import Client, wait_seconds
from truedraw.bench.load_figures import Failure, Sample, Speculation, drafted, figures, percentiles, ratios
from truedraw.bench.load_stream import Answer, AnswerFailed, EventSplitter
from truedraw.bench.workloads import shipped
from truedraw.cli.main import run as truedraw
from truedraw.errors import InvalidParameter, PromptError, RunError

# ---------------------------------------------------------------- figures


def done(*arrivals, seconds=None, tokens=None, **options):
    return Sample("done", arrivals[-1] if seconds is None else seconds, arrivals, completion_tokens=tokens, **options)


def test_percentiles_lie_on_the_line_between_samples():
    told = percentiles([0.001 * i for i in range(1, 102)])
    assert (told.n, told.p50, told.p95, told.p99) == (101, pytest.approx(51), pytest.approx(96), pytest.approx(100))
    assert percentiles([0.25]).p50 == 250.0
    assert percentiles([]) == percentiles(()) and percentiles([]).p50 is None


@pytest.mark.parametrize(("n", "has"), [(99, False), (100, True)])
def test_few_samples_have_no_p99(n, has):
    assert (percentiles([0.1] * n).p99 is not None) is has


def test_figures_of_a_run_worked_by_hand():
    samples = [
        done(0.1, 0.2, 0.4, seconds=0.5, tokens=7, prompt_tokens=3),  # 0.3 s for 6 tokens after the first
        done(0.3, 0.4, seconds=0.5, tokens=3, prompt_tokens=4),  # 0.1 s for 2
        Sample("failed", 0.1, failure=Failure("429", "busy", 1.0)),
        Sample("failed", 9.0, (0.1,), failure=Failure("timeout", "late")),
        Sample("failed", 0.2, failure=Failure("429", "busier", 1.0)),
        Sample("abandoned", 0.1, (0.05, 0.06)),
    ]
    told = figures(samples, concurrency=2, wall_seconds=4.0, cpu_seconds=1.0)
    assert (told.done, told.failed, told.abandoned) == (2, 3, 1)
    assert [(each.kind, each.count, each.first) for each in told.failures] == [("429", 2, "busy"), ("timeout", 1, "late")]
    assert (told.unit, told.prompt_tokens, told.completion_tokens, told.chunks) == ("tokens", 7, 10, 5)
    assert (told.tokens_per_second, told.requests_per_second, told.tokens_per_chunk) == (2.5, 0.5, 2.0)
    assert (told.first_token_ms.n, told.first_token_ms.p50) == (2, pytest.approx(200))
    assert (told.between_chunks_ms.n, told.between_chunks_ms.p50) == (3, pytest.approx(100))
    assert (told.per_token_ms.n, told.per_token_ms.p50) == (2, pytest.approx(50))
    assert (told.whole_request_ms.n, told.whole_request_ms.p50) == (2, pytest.approx(500))
    assert told.speculation is None and told.client_cpu == 0.25


def test_chunks_are_counted_where_one_answer_tells_no_tokens():
    told = figures([done(0.1, 0.2, 0.3, tokens=50), done(0.1, 0.3)], concurrency=1, wall_seconds=1.0)
    assert (told.unit, told.completion_tokens, told.tokens_per_chunk) == ("chunks", 5, None)
    assert told.per_token_ms.p50 == pytest.approx((100 + 200) / 2)


def test_an_answer_without_content_is_done_and_has_no_first_token():
    told = figures([Sample("done", 0.1, completion_tokens=0)], concurrency=1, wall_seconds=1.0)
    assert (told.done, told.completion_tokens, told.first_token_ms.n, told.per_token_ms.n) == (1, 0, 0, 0)


def test_a_run_without_answers_has_figures():
    told = figures([Sample("failed", 1.0, failure=Failure("500", "x"))], concurrency=1, wall_seconds=1.0)
    assert told.tokens_per_second is None and told.whole_request_ms.n == 0 and told.prompt_tokens is None


def test_speculation_is_summed_before_it_is_divided():
    told = drafted([Speculation(10, 30, 20, 3.0, 1.0, 4.0), Speculation(30, 10, 0, 1.0, 3.0, 4.0)])
    assert told.tokens_per_step == 1.5 and told.acceptance_rate == 0.5 and told.estimated_speedup == 2.0
    partly = drafted([Speculation(10, 0, 0, None, 1.0, None), Speculation(10, 0, 0, 2.0, 2.0, 3.0)])
    assert (partly.tokens_per_step, partly.acceptance_rate, partly.estimated_speedup) == (2.0, None, 1.5)


def test_ratios_are_speculation_over_plain():
    fast, slow = (figures([done(t, 2 * t, tokens=10)], concurrency=4, wall_seconds=2 * t) for t in (0.1, 0.4))
    told = ratios(fast, slow)
    assert told.tokens_per_second == pytest.approx(4) and told.concurrency == 4
    assert [told.first_token, told.per_token, told.whole_request, told.between_chunks] == pytest.approx([0.25] * 4)
    nothing = figures([], concurrency=4, wall_seconds=1.0)
    assert ratios(fast, nothing).first_token is None and ratios(fast, nothing).tokens_per_second is None


# ---------------------------------------------------------------- events


STREAM = b'data: {"a": 1}\n\n: ping\n\ndata: two\r\ndata: lines\r\n\r\nevent: x\nid: 7\ndata:[DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_are_the_same_however_they_are_cut(size):
    splitter = EventSplitter()
    found = [event for i in range(0, len(STREAM), size) for event in splitter.feed(STREAM[i : i + size])]
    assert found == [b'{"a": 1}', b"two\nlines", b"[DONE]"]


def test_an_event_without_end_is_refused():
    with pytest.raises(AnswerFailed, match="larger than 8 MiB"):
        EventSplitter().feed(b"data: " + b"x" * (9 << 20))


@pytest.mark.parametrize(
    ("event", "counts"),
    [
        ({"choices": [{"delta": {"content": "a"}}]}, True),
        ({"choices": [{"delta": {"reasoning_content": "a"}}]}, True),
        ({"choices": [{"text": "a"}]}, True),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        ({"choices": [{"delta": None}]}, False),
        ({"choices": [], "usage": {"completion_tokens": 3}}, False),
        ({}, False),
    ],
)
def test_only_content_counts_as_a_chunk(event, counts):
    answer = Answer()
    answer.take(json.dumps(event).encode(), 0.5)
    assert answer.arrivals == ([0.5] if counts else []) and not answer.ended


@pytest.mark.parametrize(
    "event", [b"{", b"[]", b"3", b"null", b'{"choices": 3}', b'{"choices": [3]}', b'{"choices": [{"delta": "x"}]}', b"\xff"]
)
def test_garbage_is_named(event):
    with pytest.raises(AnswerFailed) as error:
        Answer().take(event, 0.0)
    assert error.value.failure.kind == "not JSON"


@pytest.mark.parametrize("end", [b"[DONE]", b'{"choices": [{"finish_reason": "stop"}]}'])
def test_an_answer_ends_and_keeps_counts_told_before(end):
    answer = Answer()
    answer.take(b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}', 0.1)
    assert not answer.ended
    answer.take(end, 0.2)
    answer.take(b'{"choices": [], "usage": null}', 0.3)
    assert answer.ended and (answer.prompt_tokens, answer.completion_tokens, answer.arrivals) == (2, 3, [0.1])


@pytest.mark.parametrize("error", [{"message": "broken"}, "broken", {"error": "x", "message": "broken"}])
def test_an_error_event_keeps_its_message(error):
    with pytest.raises(AnswerFailed) as raised:
        Answer().take(json.dumps({"error": error}).encode(), 0.0)
    assert raised.value.failure == Failure("error event", "broken")


@pytest.mark.parametrize("told", [{}, {"steps": 3}, {"steps": "3", "proposed": 1, "accepted": 1, "seconds": 1}, [], 7])
def test_half_told_speculation_is_none(told):
    answer = Answer()
    answer.take(json.dumps({"choices": [], "speculation": told}).encode(), 0.0)
    assert answer.speculation is None


@pytest.mark.parametrize(("header", "seconds"), [("3", 3.0), (None, 1.0), ("soon", 1.0), ("-1", 1.0), ("0", 0.0)])
def test_retry_after(header, seconds):
    assert wait_seconds(header) == seconds


# ---------------------------------------------------------------- what is sent


def test_bodies_of_chat_and_completions():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    asked = Load(["a", messages], "m", seed=5, max_tokens=9)
    assert asked.body(0, off=False) == {
        "model": "m", "max_tokens": 9, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}, "seed": 5,
        "messages": [{"role": "user", "content": "a"}],
    }  # fmt: skip
    assert asked.body(3, off=True)["messages"] == messages and asked.body(3, off=True)["seed"] == 8
    assert asked.body(3, off=True)["speculation"] == {"off": True}
    text = Load(["a", messages], "m", raw=True)
    assert [text.body(i, off=False)["prompt"] for i in range(3)] == ["a", "s\n\nu", "a"] and text.path == "/v1/completions"
    assert "messages" not in text.body(0, off=False) and "seed" not in text.body(0, off=False)


def test_cuts_are_that_share_and_repeat_with_the_seed():
    cuts = Load(["a"], "m", requests=40, abandon=0.25, seed=3).cuts()
    assert len(cuts) == 10 and all(0 <= number < 40 and 0 <= share < 1 for number, share in cuts.items())
    assert cuts == Load(["a"], "m", requests=40, abandon=0.25, seed=3).cuts()
    assert cuts != Load(["a"], "m", requests=40, abandon=0.25, seed=4).cuts()
    assert Load(["a"], "m").cuts() == {}


def test_each_way_comes_first_by_turns():
    assert [(run.concurrency, run.off) for run in runs([1, 4], off=False, compare=True)] == [
        (1, False), (1, True), (4, True), (4, False),
    ]  # fmt: skip
    assert [(run.concurrency, run.off) for run in runs([1, 4], off=True, compare=False)] == [(1, True), (4, True)]


def test_prompts_from_files():
    assert load_prompts.parse("one\n\n  two \r\n", "a.txt") == ["one", "two"]
    line = json.dumps({"messages": [{"role": "user", "content": "u\u2028v"}]}, ensure_ascii=False)
    found = load_prompts.parse(
        '{"prompt": "one\\ntwo"}\n' + line + '\n{"workload": "w", "prompt": [{"role": "user", "content": "c"}]}', "a.jsonl"
    )
    assert found == ["one\ntwo", [{"role": "user", "content": "u\u2028v"}], [{"role": "user", "content": "c"}]]
    assert load_prompts.as_text("x") == "x"
    with pytest.raises(PromptError, match="content is no text"):
        load_prompts.as_text([{"role": "user", "content": [{"type": "text", "text": "x"}]}])


@pytest.mark.parametrize(
    "line",
    ["{", "3", '"x"', "{}", '{"prompt": ""}', '{"prompt": 3}', '{"messages": []}', '{"messages": ["x"]}', '{"messages": "x"}'],
)
def test_bad_lines_are_named(line):
    with pytest.raises(PromptError, match=r"a\.jsonl, line 3: "):
        load_prompts.parse(f'{{"prompt": "fine"}}\n\n{line}\n', "a.jsonl")


def test_the_projects_prompts_come_by_turns():
    found = load_prompts.shipped()
    assert len(found) == len(shipped().read_text().splitlines()) and found[0] == "What is gravity?"
    assert "docstring" in found[1]


# ---------------------------------------------------------------- measuring


def measured(server, load, *, concurrency=1, off=False, timeout=5.0, usual_seconds=CHUNKS * GAP):
    run = Run(concurrency, off)

    async def go():
        async with Client(server.url, {}, connections=concurrency, timeout=timeout) as client:
            await measure(client, load, run, usual_seconds=usual_seconds)

    asyncio.run(go())
    return run.figures()


@pytest.mark.parametrize("raw", [False, True])
def test_known_delays_and_tokens_are_found(raw):
    with stub_openai.running() as server:
        told = measured(server, Load(["a ok"], "m", raw=raw, requests=12), concurrency=2)
    assert (told.done, told.failed, told.unit) == (12, 0, "tokens")
    assert (told.completion_tokens, told.prompt_tokens, told.chunks) == (12 * TOKENS, 12 * PROMPT_TOKENS, 12 * CHUNKS)
    gap = 1000 * GAP
    assert (told.between_chunks_ms.n, told.first_token_ms.n) == (12 * (CHUNKS - 1), 12)
    assert gap * 0.8 < told.between_chunks_ms.p50 < gap * 4
    assert gap <= told.first_token_ms.p50 < gap * 4
    per_token = gap * (CHUNKS - 1) / (TOKENS - 1)
    assert per_token * 0.9 < told.per_token_ms.p50 < per_token * 4
    assert CHUNKS * gap <= told.whole_request_ms.p50 < CHUNKS * gap * 4
    assert told.wall_seconds >= 6 * CHUNKS * GAP and told.tokens_per_second == 12 * TOKENS / told.wall_seconds
    assert told.speculation.tokens_per_step == 2.5 and told.speculation.estimated_speedup == 2.0
    assert {path for path, _ in server.bodies} == {"/v1/completions" if raw else "/v1/chat/completions"}


def test_so_many_requests_run_at_a_time_and_all_are_sent_once():
    with stub_openai.running() as server:
        told = measured(server, Load(["a ok", "b ok", "c ok"], "m", seed=100, requests=20), concurrency=5)
    assert told.done == 20 and server.most_running == 5
    assert sorted(body["seed"] for _, body in server.bodies) == list(range(100, 120))
    wanted = ["a ok", "b ok", "c ok"] * 6 + ["a ok", "b ok"]
    assert {body["seed"] - 100: body["messages"][0]["content"] for _, body in server.bodies} == dict(enumerate(wanted))


def test_failures_are_told_by_kind_and_do_not_stop_a_run():
    texts = ["ok", "429", "half", "short", "event", "garbage", "html", "500", "hang"]
    with stub_openai.running(retry_after="0") as server:
        told = measured(server, Load(texts, "m", requests=18), concurrency=3, timeout=1.0)
    assert (told.done, told.failed) == (2, 16) and told.completion_tokens == 2 * TOKENS
    kinds = {each.kind: each.count for each in told.failures}
    once = ("429", "error event", "not JSON", "no event stream", "500", "timeout")
    assert kinds == {**dict.fromkeys(once, 2), "stream cut": 4}
    firsts = {each.kind: each.first for each in told.failures}
    assert firsts["429"] == "the queue is full" and firsts["error event"] == "a row is NaN" and firsts["500"] == "it broke"


def test_a_refused_worker_waits_as_told_but_not_past_the_end():
    with stub_openai.running(retry_after="1") as server:
        assert measured(server, Load(["429", "ok"], "m", requests=2)).wall_seconds > 1.0
        server.retry_after = "3600"
        told = measured(server, Load(["429", "ok"], "m", requests=2, seconds=0.5))
    assert told.failed == 1 and told.done == 0 and 0.4 < told.wall_seconds < 1.5


def test_no_request_is_sent_after_the_time_and_those_under_way_end():
    with stub_openai.running() as server:
        told = measured(server, Load(["ok"], "m", requests=1000, seconds=0.35), concurrency=2)
    assert told.failed == 0 and 2 <= told.done == len(server.bodies) <= 8


def test_that_share_is_abandoned_and_the_server_sees_it():
    with stub_openai.running() as server:
        told = measured(server, Load(["ok"], "m", requests=20, abandon=0.5, seed=1), concurrency=2, usual_seconds=0.05)
        limit = time.monotonic() + 5
        while server.running and time.monotonic() < limit:
            time.sleep(0.01)
    assert told.abandoned + told.done == 20 and 5 <= told.abandoned <= 10 and told.failed == 0
    assert told.completion_tokens == told.done * TOKENS


def test_a_server_without_usage_or_speculation():
    with stub_openai.running(usage=False, speculation=False) as server:
        told = measured(server, Load(["ok"], "m", requests=2))
    assert (told.unit, told.completion_tokens, told.prompt_tokens, told.speculation) == ("chunks", 2 * CHUNKS, None, None)


def test_a_server_that_dies_leaves_what_was_measured():
    run = Run(2)

    async def go(server):
        async with Client(server.url, {}, connections=2, timeout=5.0) as client:
            await measure(client, Load(["ok", "ok", "ok", "die", "ok"], "m", requests=100), run, usual_seconds=0.1)

    with stub_openai.running() as server, pytest.raises(RunError, match="is there no longer"):
        asyncio.run(go(server))
    told = run.figures()
    assert 2 <= told.done < 5 and told.failed >= 1 and told.wall_seconds > 0


@pytest.mark.parametrize(
    ("behaviour", "message"), [("html", "no event stream"), ("garbage", "not JSON"), ("hang", "timeout"), ("half", "stream cut")]
)
def test_a_first_request_that_shows_a_wrong_server_stops_all(behaviour, message):
    async def go(server):
        async with Client(server.url, {}, connections=1, timeout=0.3) as client:
            await warm_up(client, Load([behaviour], "m"), off=False)

    with stub_openai.running() as server, pytest.raises(RunError, match=f"the first request failed, {message}"):
        asyncio.run(go(server))


@pytest.mark.parametrize("behaviour", ["429", "500", "event"])
def test_a_first_request_to_a_busy_server_may_fail(behaviour):
    async def go(server):
        async with Client(server.url, {}, connections=1, timeout=0.5) as client:
            return await warm_up(client, Load([behaviour], "m"), off=False)

    with stub_openai.running(retry_after="0") as server:
        assert asyncio.run(go(server)).outcome == "failed"


# ---------------------------------------------------------------- the command


@pytest.fixture
def run(capsys, monkeypatch):
    """run(arguments): status, standard output, standard error."""
    monkeypatch.delenv("TRUEDRAW_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def go(*arguments):
        monkeypatch.setattr(sys, "argv", ["truedraw", "load", *map(str, arguments)])
        status = truedraw()
        out, err = capsys.readouterr()
        return status, out, err

    return go


URL = "http://127.0.0.1:9"  # where nothing listens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://x"], "url is 'ftp://x': allowed is an address as http://localhost:8000"),
        (["localhost:8000"], "url is 'localhost:8000': allowed is an address as http"),
        (["http://"], "url is 'http://': allowed"),
        (["http://a:b@host"], "keys go into --api-key"),
        ([URL, "--concurrency", "0,x"], "concurrency is '0,x': allowed is numbers from 1 to 1024, as 1,4,16"),
        ([URL, "--concurrency", "1,,2"], "concurrency is '1,,2'"),
        ([URL, "--concurrency", "2000"], "concurrency is '2000'"),
        ([URL, "--concurrency", "9" * 5000], "allowed is numbers from 1 to 1024"),
        ([URL, "--concurrency", "4,4"], "allowed is each number once"),
        ([URL, "--requests", "8"], "requests is 8: allowed is an integer >= 16, the largest concurrency"),
        ([URL, "--seconds", "0"], "seconds is 0.0: allowed is a number > 0"),
        ([URL, "--timeout", "inf"], "timeout is inf"),
        ([URL, "--abandon", "1.5"], "abandon is 1.5: allowed is a share in [0, 1]"),
        ([URL, "--max-tokens", "0"], "max_tokens is 0"),
        ([URL, "--temperature", "nan"], "temperature is nan"),
        ([URL, "--off", "--compare"], "leave --off out"),
        ([URL, "--prompts", "missing.txt"], "prompts is 'missing.txt': allowed is a text or .jsonl file (there is no such file)"),
        ([URL, "--header", "nothing"], "header is 'nothing': allowed is 'Name: value'"),
        ([URL, "--api-key", "a\nb"], "api_key is '...': allowed is printable ASCII"),
        ([URL, "--save", "x.pdf"], "save is 'x.pdf': allowed is a file name that ends in .png, .svg or .json"),
        ([URL, "--save", "nowhere/x.json"], "there is no directory 'nowhere'"),
        ([], "url"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "") and message in err and err.startswith("truedraw: ") and err.count("\n") == 1


def test_nobody_there(run):
    status, out, err = run(URL)
    assert (status, out) == (1, "") and err == (
        f"truedraw: {URL} cannot be reached: connection refused: start the server, or correct URL\n"
    )


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"key": "k"}, [], "/v1/models answers 401: give a key of the server with --api-key"),
        ({"key": "k"}, ["--api-key", "wrong"], "answers 401"),
        ({"models": None}, [], "/v1/models answers 404: the address of an OpenAI-compatible server is needed"),
        ({"models": ()}, [], "lists no models: name one with --model"),
        ({"speculation": False}, ["--compare"], "tells nothing of speculation: leave --compare out"),
        ({"speculation": False}, ["--off"], "tells nothing of speculation: leave --off out"),
    ],
)
def test_servers_that_will_not_do(run, options, arguments, message):
    with stub_openai.running(**options) as server:
        status, out, err = run(server.url, *arguments)
    assert (status, out) == (1, "") and message in err and err.count("\n") == 1


def test_tables_for_a_person(run):
    with stub_openai.running() as server:
        status, out, err = run(f"{server.url}/v1/", "--concurrency", "1,2", "--requests", "4")
    assert (status, err) == (0, "")
    assert f"{server.url}, model stub: chats of 128 tokens at most, temperature 0\nWarm-up, not counted: one request, done" in out
    rows = [line.split() for line in out.splitlines()]
    assert "at a time  done  failed  seconds  prompt tokens  tokens  tokens/s  requests/s  tokens/chunk\n" in out
    assert [row[:3] for row in rows if row[3:4] and row[4:6] == ["28", "40"]] == [["1", "4", "0"], ["2", "4", "0"]]
    assert ["2", "16", "2.50", "48", "24", "50.0%", "2.00"] in rows
    assert sum(row[-4:-3] == ["4"] and "first" in row for row in rows) == 2 and "abandoned" not in out and "drafts" not in out


def test_json_is_one_object_and_holds_what_was_asked(run, tmp_path):
    file = tmp_path / "told.json"
    with stub_openai.running(key="secret") as server:
        arguments = ["--concurrency", "2", "--requests", "4", "--raw", "--seed", "9", "-t", "0.5", "--max-tokens", "11"]
        status, out, err = run(
            server.url, "--api-key", "secret", "--header", "X-Mine: yes", "--model", "other", "--json", "--save", file, *arguments
        )
    assert (status, err) == (0, "") and "secret" not in out
    told = json.loads(out)
    assert told == json.loads(file.read_text())
    asked = {"url": server.url, "model": "other", "raw": True, "max_tokens": 11, "temperature": 0.5, "seed": 9, "requests": 4}
    assert {name: told[name] for name in asked} == asked and told["stopped"] is None and told["ratios"] is None
    assert told["runs"][0]["completion_tokens"] == 4 * TOKENS and told["runs"][0]["between_chunks_ms"]["n"] == 4 * (CHUNKS - 1)
    assert all(headers["X-Mine"] == "yes" and headers["Authorization"] == "Bearer secret" for headers in server.headers_seen)
    path, body = server.bodies[0]
    assert path == "/v1/completions" and (body["model"], body["max_tokens"], body["temperature"]) == ("other", 11, 0.5)


def test_the_key_may_come_from_the_environment(run, monkeypatch):
    monkeypatch.setenv("TRUEDRAW_API_KEY", "k")
    with stub_openai.running(key="k") as server:
        assert run(server.url, "--concurrency", "1", "--requests", "1")[0] == 0


def test_compare_runs_both_ways_and_tells_ratios(run, tmp_path):
    with stub_openai.running() as server:
        picture = tmp_path / "load.svg"
        status, out, _ = run(server.url, "--concurrency", "1,2", "--requests", "4", "--compare", "--json", "--save", picture)
        told = json.loads(out)
        shown = run(server.url, "--concurrency", "1", "--requests", "4", "--compare")[1]
    assert status == 0 and "<svg" in picture.read_text()
    assert [(each["concurrency"], each["speculation_off"]) for each in told["runs"]] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert [each["speculation"]["tokens_per_step"] for each in told["runs"]] == [2.5, 1.0, 2.5, 1.0]
    for ratio, (on, off) in zip(told["ratios"], (told["runs"][:2], told["runs"][2:]), strict=True):
        assert ratio["tokens_per_second"] == pytest.approx(on["tokens_per_second"] / off["tokens_per_second"])
        assert ratio["whole_request"] == pytest.approx(on["whole_request_ms"]["p50"] / off["whole_request_ms"]["p50"])
    ways = Counter(json.dumps(body.get("speculation")) for _, body in server.bodies[:17])
    assert ways == {"null": 9, '{"off": true}': 8}  # the warm-up is as the first run
    assert "With speculation over without" in shown and "1      on" in shown and "1     off" in shown


def test_failures_and_a_time_that_was_over_are_told_below(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a ok\nb event\n")
    with stub_openai.running(usage=False) as server:
        status, out, _ = run(server.url, "--concurrency", "1", "--requests", "50", "--seconds", "0.6", "--prompts", file)
    assert status == 0 and re.search("1 at a time: [1-4] x error event: a row is NaN", out)
    assert "of 50 requests, then the 0.6 s were over" in out
    assert "the server does not tell its tokens (usage): chunks are counted" in out and "chunks/s" in out


def test_without_any_answer_the_status_is_1(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a event\n")
    with stub_openai.running() as server:
        status, out, err = run(server.url, "--concurrency", "2", "--requests", "4", "--prompts", file)
    assert status == 1 and "2 at a time: 4 x error event" in out and "no request was answered to its end" in err


def test_a_server_that_dies_is_told_behind_the_tables(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a ok\nb ok\nc die\n")
    with stub_openai.running() as server:
        status, out, err = run(server.url, "--concurrency", "1", "--requests", "9", "--prompts", file, "--json")
    told = json.loads(out)
    assert status == 1 and told["runs"][0]["done"] == 2 and "is there no longer" in told["stopped"] and told["stopped"] in err


def test_ctrl_c_prints_what_there_is():
    environment = {**os.environ, "COLUMNS": "120"}
    with stub_openai.running() as server:
        command = [sys.executable, "-m", "truedraw", "load", server.url, "--concurrency", "2", "--requests", "500", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
            limit = time.monotonic() + 30
            while len(server.bodies) < 8 and time.monotonic() < limit:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
    told = json.loads(out)
    assert process.returncode == 130 and err == "truedraw: interrupted\n"
    assert told["stopped"] == "interrupted" and 4 <= told["runs"][0]["done"] < 500


def test_pictures_need_matplotlib_before_anything_is_sent(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with stub_openai.running() as server:
        status, _, err = run(server.url, "--save", tmp_path / "x.png")
    assert status == 2 and "truedraw[audit]" in err and not server.bodies


def test_addresses():
    from truedraw.cli.load_inputs import address

    assert [address(f"http://host:8{end}") for end in ("", "/", "/v1", "/v1/")] == ["http://host:8"] * 4
    assert address("https://host/api/v1") == "https://host/api"
    with pytest.raises(InvalidParameter):
        address("http://host?x=1")
