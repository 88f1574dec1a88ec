"""Clients that leave, clients that do not read, and too many of them."""

import asyncio
import contextlib
import json
import socket
import time
from collections import Counter

import httpx
import pytest
from wire import COMPLETIONS, PATIENCE, answers, connect, error_of, head, in_thread, is_well, nothing_open, number, post, until

from truedraw.runners.toy import ToyRunner, toy_language
from truedraw.server.access import Keys
from truedraw.server.connection import Connection

LONG = {"prompt": "the", "max_tokens": 4000, "ignore_eos": True}
SHORT = {"prompt": "the cat", "max_tokens": 30, "seed": 5, "ignore_eos": True}


class Slow(ToyRunner):
    """A pass takes 10 ms: LONG takes more than 40 s, longer than anything here is waited for."""

    def __init__(self, num_slots=2):
        super().__init__(toy_language(), 257, num_slots=num_slots)

    def forward(self, chunks):
        time.sleep(0.01)
        return super().forward(chunks)


@pytest.fixture(scope="module")
def client():
    with in_thread(runner=Slow(), max_queue=8) as client:
        yield client


def cancelled(client):
    return number(client, 'requests_total{reason="cancelled"}')


def text_of(client, **fields):
    return client.post(COMPLETIONS, json={**SHORT, **fields}).json()["choices"][0]["text"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_who_leaves_frees_the_slot_and_disturbs_nobody(client, stream):
    alone = text_of(client)
    before = cancelled(client)
    with connect(client.port) as leaving:
        leaving.sendall(post({**LONG, "stream": stream}))
        until(lambda: number(client, "choices_running") == 1)
        if stream:
            assert leaving.recv(2**16)
        with client.stream("POST", COMPLETIONS, json={**SHORT, "stream": True}) as neighbour:
            lines = neighbour.iter_lines()
            events = [next(lines)]
            leaving.close()
            events += list(lines)
    chunks = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone
    until(lambda: nothing_open(client))
    assert cancelled(client) == before + 1
    assert is_well(client)


def test_who_leaves_the_queue_frees_the_place(client):
    with connect(client.port) as first, connect(client.port) as second:
        for each in (first, second):
            each.sendall(post({**LONG, "stream": True}))
        until(lambda: number(client, "choices_running") == 2)
        for stream in (True, False):
            with connect(client.port) as leaving:
                leaving.sendall(post({**LONG, "stream": stream}))
                until(lambda: number(client, "choices_waiting") == 1)
            until(lambda: number(client, "choices_waiting") == 0)
        assert number(client, "choices_running") == 2
        assert client.service.worker.num_open == 2
    until(lambda: client.service.worker.num_open == 0)
    assert is_well(client)


def test_who_leaves_at_once_is_forgotten(client):
    """However early: no place in the queue stays taken."""
    for i in range(30):
        with connect(client.port) as leaving:
            leaving.sendall(post({**LONG, "stream": i % 3 > 0}))
            time.sleep(0.002 * (i % 5))
    until(lambda: client.service.worker.num_open == 0)
    assert is_well(client)


def test_who_reads_slowly_holds_up_nobody(client):
    with connect(client.port, receive_buffer=1024) as slow:
        slow.sendall(post({**SHORT, "stream": True, "speculation": {"trace": True, "alternatives": 20}}))
        for _ in range(3):
            assert slow.recv(1)
            assert is_well_beside(client)
    until(lambda: nothing_open(client))


def is_well_beside(client):
    return len(text_of(client, max_tokens=5)) > 0


class Narrow(Connection):
    """Of what is sent the system holds little."""

    def connection_made(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport)


class Strict(Narrow):
    stall_seconds = idle_seconds = 0.5


def unsent(client):
    """Bytes that the server holds for clients that do not take them."""
    return sum(each.transport.get_write_buffer_size() for each in list(client.server.server_state.connections))


def test_who_does_not_read_is_cut_off_and_costs_no_memory():
    """An answer of many MB, of which the client takes nothing: little of it is ever made."""
    prompts = [[65] * 4000] * 64
    asked = {"prompt": prompts, "max_tokens": 0, "stream": True, "return_token_ids": True}
    with in_thread(max_queue=80, http=Strict) as client:
        with connect(client.port, receive_buffer=1024) as deaf:
            deaf.sendall(post(asked))
            until(lambda: client.service.worker.num_open)
            waiting = []

            def cut():
                waiting.append(unsent(client))
                return client.service.worker.num_open == 0

            until(cut)
            assert 0 < max(waiting) < 2**18
            until(lambda: not unsent(client))
        assert is_well(client)


def test_what_was_sent_and_is_not_read_does_not_keep_the_connection():
    """A whole answer, to a client that asked to close after it and to one that did not."""
    asked = {"prompt": [[65] * 3000] * 16, "max_tokens": 0, "return_token_ids": True}
    with in_thread(max_queue=50, http=Strict) as client:
        for connection in ("close", "keep-alive"):
            with connect(client.port, receive_buffer=1024) as deaf:
                deaf.sendall(post(asked, connection=connection))
                until(lambda: unsent(client))
                until(lambda: not unsent(client))
        assert is_well(client)


def test_the_end_does_not_wait_for_who_does_not_read(caplog):
    asked = {"prompt": [[65] * 4000] * 64, "max_tokens": 0, "stream": True, "return_token_ids": True}
    with in_thread(max_queue=80, http=Narrow) as client:
        deaf = connect(client.port, receive_buffer=1024)
        deaf.sendall(post(asked))
        until(lambda: any(each.flow.write_paused for each in list(client.server.server_state.connections) if each.flow))
    with deaf:
        assert not [record for record in caplog.records if record.name == "uvicorn.error"]


def all_at_once(port, number, body, **headers):
    async def ask():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, limits=limits) as client:
            return await asyncio.gather(*(client.post(COMPLETIONS, json=body, headers=headers) for _ in range(number)))

    return asyncio.run(ask())


def test_too_many_at_once_are_told_to_come_again(client):
    found = all_at_once(client.port, 200, {"prompt": "the", "max_tokens": 20, "ignore_eos": True})
    counts = Counter(answer.status_code for answer in found)
    assert set(counts) == {200, 429} and counts[200] >= 10
    for answer in found:
        if answer.status_code == 429:
            error = error_of(answer)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        else:
            assert answer.json()["usage"]["completion_tokens"] == 20
    assert number(client, "requests_refused_total") >= counts[429]
    assert is_well(client)


def test_as_many_wait_as_was_said_and_a_place_that_is_left_is_free_again(client):
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(client.port)) for _ in range(10)]
        for each in held:
            each.sendall(post({**LONG, "stream": True}))
        until(lambda: number(client, "choices_waiting") == 8)
        assert client.post(COMPLETIONS, json=SHORT).status_code == 429
        held[-1].close()
        until(lambda: number(client, "choices_waiting") == 7)
        assert client.post(COMPLETIONS, json={**SHORT, "n": 2}).status_code == 429
        stack.enter_context(connect(client.port)).sendall(post({**LONG, "stream": True}))
        until(lambda: number(client, "choices_waiting") == 8)
    assert is_well(client)


def test_more_answers_than_can_ever_wait_are_a_mistake_and_not_a_full_queue(client):
    answer = client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"], "n": 4, "max_tokens": 1})
    assert answer.status_code == 400 and "10 at most" in error_of(answer)["message"]


def test_the_flood_of_one_key_leaves_room_for_another():
    keys = [{"authorization": f"Bearer {name * 8}"} for name in "ab"]
    with in_thread(runner=Slow(), max_queue=8, keys=Keys(["a" * 8, "b" * 8])) as client:
        client.headers.update(keys[1])
        with contextlib.ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(connect(client.port)).sendall(post({**LONG, "stream": True}, **keys[0]))
            until(lambda: number(client, "requests_refused_total") == 40 - 2 - 4)
            other = connect(client.port)
            other.sendall(post({**LONG, "stream": True}, **keys[1]))
            until(lambda: number(client, "choices_waiting") == 5)
        with other:
            assert other.recv(2**10).startswith(b"HTTP/1.1 200")
        until(lambda: nothing_open(client))
        assert is_well(client)


def test_heads_and_answers_of_many_are_kept_apart(client):
    """Requests sent ahead on one connection are answered in their order, each with its own text."""
    texts = {seed: text_of(client, seed=seed, max_tokens=5) for seed in range(6)}
    with connect(client.port) as ahead:
        sent = [post({**SHORT, "max_tokens": 5, "seed": seed}) for seed in range(6)]
        ahead.sendall(b"".join(sent) + head("/health", "GET", connection="close"))
        found = [json.loads(body) for _, body in answers(ahead)][:-1]
    assert [answer["choices"][0]["text"] for answer in found] == list(texts.values())
