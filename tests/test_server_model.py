"""The server with a real model: conversations, strict rows, a kill and a restart."""

import signal
import socket
import time

import httpx
import openai
import pytest
from serving import serving, start

from truedraw.engine import Engine
from truedraw.types import SamplingParams

pytestmark = pytest.mark.model

CHAT = [{"role": "user", "content": "Copy this list: red, green, blue, red, green, blue, red. Then write it once more."}]
GRAVITY = [{"role": "user", "content": "What is gravity?"}]


@pytest.fixture(scope="module")
def server():
    with serving("--slots", "4", "--context", "1024", "--strict", model="smollm2") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def engine():
    with Engine.load("smollm2", drafter="none", context=1024, strict=True) as made:
        yield made


def ask(client, messages=CHAT, **options):
    return client.chat.completions.create(
        model="smollm2", messages=messages, **{"seed": 4, "max_completion_tokens": 40, **options}
    )


def test_a_conversation_is_answered_as_the_engine_answers_it(client, engine):
    (expected,) = engine.generate([CHAT], SamplingParams(seed=4, max_tokens=40), top_logprobs=3)
    for extra in ({}, {"speculation": {"off": True}}):
        answer = ask(client, logprobs=True, top_logprobs=3, extra_body=extra)
        choice = answer.choices[0]
        assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
        assert [each.logprob for each in choice.logprobs.content] == pytest.approx(
            [record.logprob.logprob for record in expected.records]
        )
        assert b"".join(bytes(each.bytes) for each in choice.logprobs.content).decode() == expected.text
        assert all(len(each.top_logprobs) == 3 for each in choice.logprobs.content)
        assert answer.usage.completion_tokens == len(choice.logprobs.content) == len(expected.tokens)
    stream = ask(client, stream=True, logprobs=True, top_logprobs=3, stream_options={"include_usage": True})
    deltas = list(stream)
    assert deltas[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in deltas if part.choices) == expected.text
    told = [
        each.logprob for part in deltas if part.choices and part.choices[0].logprobs for each in part.choices[0].logprobs.content
    ]
    assert told == pytest.approx([record.logprob.logprob for record in expected.records])
    assert deltas[-1].usage.completion_tokens == len(expected.tokens)
    assert deltas[-2].choices[0].finish_reason == expected.finish_reason
    assert deltas[-2].speculation["estimated_plain_seconds"] > 0


def test_messages_in_every_form_that_clients_send(client):
    plain = ask(client, [{"role": "system", "content": "Be brief."}, *GRAVITY], max_completion_tokens=12)
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "gravity?"}]
    again = ask(
        client, [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}], max_completion_tokens=12
    )
    assert again.choices[0].message.content == plain.choices[0].message.content
    echoed = plain.choices[0].message.model_dump()  # as clients put an answer back into a conversation
    longer = ask(client, [*GRAVITY, echoed, {"role": "user", "content": "Shorter."}], max_completion_tokens=8)
    assert longer.choices[0].finish_reason == "length"
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="text parts are supported"):
        ask(client, [{"role": "user", "content": image}])
    with pytest.raises(openai.BadRequestError, match="differ"):
        ask(client, max_tokens=3)


def test_a_seeded_text_is_the_same_in_company(server, client):
    alone = ask(client, seed=9, temperature=0.8).choices[0].message.content
    with httpx.Client(base_url=server.url, timeout=120) as http:
        import concurrent.futures

        def other(i):
            body = {
                "messages": [{"role": "user", "content": f"Count to {i}."}],
                "max_tokens": 10 + i,
                "n": 2 if i % 4 == 0 else 1,
            }
            return http.post("/v1/chat/completions", json=body).status_code

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            others = [pool.submit(other, i) for i in range(11)]
            mine = [
                pool.submit(ask, client, seed=9, temperature=0.8, extra_body={"speculation": {"off": off}})
                for off in (False, True)
            ]
            assert all(future.result() == 200 for future in others)
            assert {future.result().choices[0].message.content for future in mine} == {alone}


def test_a_killed_server_is_back_soon_and_nothing_is_broken(tmp_path):
    """Clients get a clean error; the model is mapped, the profile and the caches are as they were."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--slots", "2", "--context", "512", "--corpus", str(tmp_path / "kept.corpus"))
    first = start(*options, model="smollm2", port=port)
    client = openai.OpenAI(base_url=f"{first.url}/v1", api_key="-", max_retries=0)
    before = ask(client, max_completion_tokens=10, temperature=0).choices[0].message.content
    stream = ask(client, max_completion_tokens=400, stream=True)
    next(iter(stream))
    first.process.kill()
    first.process.wait()
    with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError, httpx.ReadError)):
        list(stream)
    with pytest.raises(openai.APIConnectionError):
        ask(client)
    seconds = []
    for _ in range(3):  # the best of three: the machine may be busy
        started = time.monotonic()
        second = start(*options, model="smollm2", port=port)
        seconds.append(time.monotonic() - started)
        assert "measuring" not in second.lines and "compiling" not in second.lines
        assert ask(client, max_completion_tokens=10, temperature=0).choices[0].message.content == before
        assert second.stop(signal.SIGTERM) == 0
        second.close()
    client.close()
    first.close()
    print(f"back after {min(seconds):.2f} s")
    assert min(seconds) < 3


def test_the_clients_of_the_docs_run_as_pasted(server):
    import re
    import subprocess
    import sys
    from pathlib import Path

    page = (Path(__file__).parent.parent / "docs" / "server.md").read_text().replace("http://127.0.0.1:8000", server.url)
    (script,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "from openai" in block]
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and len(result.stdout) > 20, result.stderr
    (body,) = re.findall(r"-d '(\{.*?\})'", page, re.DOTALL)
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}, timeout=60
    )
    assert answer.json()["choices"][0]["message"]["content"]
