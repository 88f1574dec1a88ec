"""Failures inside of requests, an end in good order, and a log that keeps secrets."""

import contextlib
import json
import signal
import threading

import httpx
import numpy as np
import pytest
from serving import serving, start
from wire import CHAT, COMPLETIONS, PATIENCE, answers, connect, error_of, in_thread, is_well, nothing_open, number, post, until

from truedraw.drafters.none import NoDrafter
from truedraw.errors import RunnerError
from truedraw.runners.toy import ToyRunner, toy_language

GOOD = {"prompt": "the cat", "max_tokens": 60, "seed": 3, "ignore_eos": True}


class Failing(ToyRunner):
    """A text with an N in it has rows of NaN; one with an R makes the runner raise once its tail is fed; with a B it raises
    what nobody foresaw."""

    def __init__(self):
        super().__init__(self._row, 257, num_slots=4)
        self._language = toy_language()

    def _row(self, context):
        return np.full(257, np.nan) if ord("N") in context else self._language(context)

    def forward(self, chunks):
        texts = [bytes(int(token) for token in chunk.tokens if token < 256) for chunk in chunks]
        if any(b"R" in text for text in texts):
            raise RunnerError("the device is gone")
        if any(b"B" in text for text in texts):
            raise KeyError(texts)
        return super().forward(chunks)


@pytest.fixture(scope="module")
def client():
    with in_thread(runner=Failing()) as client:
        yield client


def events(lines):
    data = [line[6:] for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"], data[-1] == "[DONE]"


def beside(client, body, fields):
    """Answers to `body` while a neighbour with `fields` runs, and what the neighbour got."""
    with client.stream("POST", COMPLETIONS, json={**fields, "stream": True}) as neighbour:
        lines = neighbour.iter_lines()
        first = next(lines)
        answer = client.post(COMPLETIONS, json=body)
        return answer, *events([first, *lines])


def test_a_row_that_is_none_ends_its_own_request_alone(client):
    alone = client.post(COMPLETIONS, json=GOOD).json()["choices"][0]["text"]
    answer, chunks, done = beside(client, {"prompt": "N", "max_tokens": 5}, GOOD)
    assert answer.status_code == 500
    error = error_of(answer)
    assert (error["type"], error["code"]) == ("server_error", "RowError") and "nan" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert done and "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone
    assert number(client, 'errors_total{kind="RowError"}') == 1
    assert is_well(client)


def test_a_failure_in_a_stream_is_its_last_event(client):
    with client.stream("POST", COMPLETIONS, json={"prompt": ["N", "the"], "max_tokens": 5, "stream": True}) as answer:
        assert answer.status_code == 200
        chunks, done = events(answer.iter_lines())
    assert not done and error_of(json.dumps(chunks[-1]).encode())["code"] == "RowError"
    assert is_well(client)


def test_what_leaves_no_token_is_the_mistake_of_who_asked(client):
    alone = client.post(COMPLETIONS, json=GOOD).json()["choices"][0]["text"]
    answer, chunks, done = beside(client, {**GOOD, "repetition_penalty": 5e-324}, GOOD)
    assert answer.status_code == 400 and error_of(answer)["code"] == "no_token_left"
    assert done and "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone
    assert is_well(client)


def test_a_grammar_that_grows_beyond_its_bounds_is_the_mistake_of_who_asked(client):
    alone = client.post(COMPLETIONS, json=GOOD).json()["choices"][0]["text"]
    format = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(a*)*" * 500}}}
    answer, chunks, done = beside(client, {"prompt": "the", "response_format": format}, GOOD)
    assert answer.status_code == 400 and error_of(answer)["param"] == "response_format"
    assert done and "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone
    assert is_well(client)


@pytest.mark.parametrize(("mark", "code", "word"), [("R", "RunnerError", "device is gone"), ("B", "KeyError", "an error inside")])
def test_a_pass_that_fails_ends_its_requests_and_nothing_else(client, mark, code, word):
    answer, chunks, done = beside(client, {"prompt": f"secret{mark}", "max_tokens": 5}, {**GOOD, "max_tokens": 4000})
    assert answer.status_code == 500
    error = error_of(answer)
    assert error["code"] == code and word in error["message"] and "secret" not in error["message"]
    assert not done and chunks[-1]["error"]["code"] == code
    assert is_well(client)


class Forgetful(NoDrafter):
    """Fails when it is told of an end that is `of_a_kind`."""

    def __init__(self, of_a_kind):
        self._of_a_kind = of_a_kind

    def observe(self, outcomes):
        if any(outcome.finished and self._of_a_kind(outcome) for outcome in outcomes):
            raise RuntimeError("forgotten")


def test_a_drafter_that_fails_when_told_of_an_end_leaves_nobody_waiting():
    with in_thread(drafter=Forgetful(lambda outcome: outcome.verdict is not None)) as client:
        found = [client.post(COMPLETIONS, json={**GOOD, "n": 2, "stream": stream}) for stream in (False, True)]
        assert found[0].status_code == 500 and '"error"' in found[1].text
        until(lambda: nothing_open(client))
        assert client.service.worker.num_open == 0


def test_a_drafter_that_fails_when_told_of_who_left_disturbs_nobody():
    hurry, language = threading.Event(), toy_language()

    def slowly(context):  # at this pace the neighbour outlasts the wait for the other on any machine
        hurry.wait(0.02)
        return language(context)

    with in_thread(slowly, drafter=Forgetful(lambda outcome: outcome.verdict is None), slots=2) as client:
        with client.stream("POST", COMPLETIONS, json={**GOOD, "max_tokens": 3000, "stream": True}) as neighbour:
            lines = neighbour.iter_lines()
            first = next(lines)
            with connect(client.port) as leaving:
                leaving.sendall(post({**GOOD, "max_tokens": 4000}))
                until(lambda: number(client, "choices_running") == 2)
            until(lambda: number(client, "choices_running") == 1)
            hurry.set()
            chunks, done = events([first, *lines])
        alone = client.post(COMPLETIONS, json=GOOD).json()["choices"][0]["text"]
        assert done and "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith(alone)
        assert is_well(client)


# ---------------------------------------------------------------- the end

LONG = {"prompt": "the", "max_tokens": 4000, "ignore_eos": True, "speculation": {"off": True, "trace": True, "alternatives": 20}}


def refuses(server):
    try:
        connect(server.port).close()
    except ConnectionError:
        return True
    return False


def is_cut(connection):
    """Closed by the server; reset where it had not been accepted yet when the listening socket closed."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@contextlib.contextmanager
def to_be_ended(*args):
    server = start(*args)
    try:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            yield server, client
    finally:
        server.process.kill()
        server.process.wait()
        server.close()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_the_end_lets_finish_what_runs_and_refuses_what_waits(sig):
    with to_be_ended("--slots", "1", "--grace", "60") as (server, client), connect(server.port) as waiting:
        with client.stream("POST", COMPLETIONS, json={**GOOD, "max_tokens": 3000, "stream": True}) as running:
            lines = running.iter_lines()
            first = next(lines)
            waiting.sendall(post(GOOD))
            until(lambda: number(client, "choices_waiting") == 1)
            with connect(server.port) as idle:
                server.process.send_signal(sig)
                ((status, body),) = answers(waiting)
                assert status == 503 and error_of(body)["code"] == "shutting_down"
                assert is_cut(idle)
            assert refuses(server) and server.process.poll() is None
            chunks, done = events([first, *lines])
        assert done and chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(PATIENCE) == 0
        assert "Traceback" not in server.lines and len(server.lines.splitlines()) == 2


@pytest.mark.parametrize("again", [False, True], ids=["grace over", "second signal"])
def test_what_exceeds_the_grace_is_told(again):
    """Streams by an event, others by 503; who does not read is cut off."""
    with (
        to_be_ended("--slots", "3", "--grace", "60" if again else "0.2") as (server, client),
        connect(server.port) as whole,
        connect(server.port, receive_buffer=1024) as deaf,
    ):
        deaf.sendall(post({**LONG, "stream": True}))
        whole.sendall(post(LONG))
        with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as running:
            lines = running.iter_lines()
            first = next(lines)
            until(lambda: number(client, "choices_running") == 3)
            server.process.send_signal(signal.SIGTERM)
            if again:
                until(lambda: refuses(server))
                server.process.send_signal(signal.SIGTERM)
            chunks, done = events([first, *lines])
        ((status, body),) = answers(whole)
        assert server.process.wait(PATIENCE) == 0
        assert not done and chunks[-1]["error"]["code"] == "shutting_down"
        assert status == 503 and error_of(body)["code"] == "shutting_down"
        assert "Traceback" not in server.lines and "uvicorn" not in server.lines


# ---------------------------------------------------------------- the log

MARK = "Xyzzy"


def test_no_prompt_and_no_answer_is_logged_at_any_level():
    asked = [
        (COMPLETIONS, {"prompt": MARK, "max_tokens": 5, "echo": True}),
        (COMPLETIONS, {"prompt": MARK, "max_tokens": 5, "stream": True}),
        (COMPLETIONS, {"prompt": MARK, "stop": ["", MARK]}),
        (COMPLETIONS, {"prompt": [MARK, 5]}),
        (COMPLETIONS, {"prompt": MARK * 5000}),
        (COMPLETIONS, {"prompt": MARK, "user": MARK, "metadata": {MARK: MARK}, MARK: MARK}),
        (COMPLETIONS, {"prompt": MARK, "response_format": {"type": "json_schema", "json_schema": {"schema": {MARK: MARK}}}}),
        (CHAT, {"messages": [{"role": "user", "content": MARK}]}),
        (CHAT, {"messages": [{"role": MARK, "content": MARK}]}),
    ]
    with serving("--log-level", "debug", "--access-log") as server:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            statuses = [client.post(path, json=body).status_code for path, body in asked]
            statuses.append(client.post(COMPLETIONS, content=f'{{"prompt": "{MARK}').status_code)
        assert statuses[:2] == [200, 200] and set(statuses[2:]) <= {400, 415}
        lines = server.lines
    assert lines.count('"POST /v1/') == len(statuses)
    assert MARK not in lines and MARK.lower() not in lines.lower()


def test_an_unforeseen_failure_is_logged_with_its_place_and_without_what_it_says(caplog):
    caplog.set_level("DEBUG")
    with in_thread(runner=Failing()) as client:
        for fields in ({}, {"stream": True}):
            assert '"KeyError"' in client.post(COMPLETIONS, json={"prompt": f"{MARK}B", "max_tokens": 1, **fields}).text
    own = [record.getMessage() for record in caplog.records if record.name.startswith(("truedraw", "uvicorn", "asyncio"))]
    assert any("KeyError" in line and "in forward" in line for line in own)
    assert not any(MARK in line for line in own)


def test_a_template_that_fails_is_told_and_not_logged(caplog, monkeypatch):
    caplog.set_level("DEBUG")
    with in_thread() as client:
        monkeypatch.setattr("wire.ChatBytes.chat_template", "{{ raise_exception('no ' + messages[0].content) }}")
        answer = client.post(CHAT, json={"messages": [{"role": "user", "content": MARK}]})
    assert answer.status_code == 400 and "template" in error_of(answer)["message"]
    assert not any(MARK in record.getMessage() for record in caplog.records if not record.name.startswith("http"))
