"""Clients that do as they like, and servers inside the test's own process."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import threading
import time

import httpx

from truedraw.engine import Engine
from truedraw.policy import FixedLength
from truedraw.registry import Model
from truedraw.runners.toy import ByteTokenizer, ToyRunner, toy_language
from truedraw.server.app import create_app
from truedraw.server.connection import Connection
from truedraw.server.grammars import Formats
from truedraw.server.run import Server, listen
from truedraw.server.service import Settings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATIENCE = 30.0
"""Seconds until something that must happen is taken not to: the machine may be busy."""


def until(happened):
    """Polls, and answers what was not false."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := happened()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return answer


def connect(port, receive_buffer=None):
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(PATIENCE)
    try:
        client.connect(("127.0.0.1", port))
    except BaseException:
        client.close()
        raise
    return client


def head(path=COMPLETIONS, method="POST", **headers):
    """The head of a request; headers: with _ for -, None leaves one out."""
    lines = {"host": "localhost", "content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"{method} {path} HTTP/1.1\r\n{text}\r\n".encode("latin-1")


def post(body, path=COMPLETIONS, **headers):
    """A whole request; body: bytes, or what is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, content_length=len(data), **headers) + data


def answers(client):
    """Statuses and bodies of all that comes until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := client.recv(2**16):
            data += chunk
    return parsed(data)


def parsed(data):
    found = []
    while data:
        top, _, rest = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", top)
        size = int(length[1]) if length else len(rest)
        found.append((int(top.split()[1]), rest[:size]))
        data = rest[size:]
    return found


def exchange(port, data):
    """Sends it as it is on a connection of its own; the status and body of the one answer."""
    with connect(port) as client:
        client.sendall(data)
        (answer,) = answers(client)
        return answer


def error_of(body):
    """The error that an answer holds, in OpenAI's shape: a line of ASCII that says something."""
    text = body if isinstance(body, bytes) else body.content
    assert text.isascii()
    error = json.loads(text)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and error["message"].isprintable() and len(error["message"]) < 1000
    return error


def number(client, name):
    """A value of /metrics, 0 where there is none yet."""
    found = re.search(rf"^truedraw_{re.escape(name)} (\S+)$", client.get("/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def nothing_open(client):
    return number(client, "choices_running") == number(client, "choices_waiting") == 0


def is_well(client):
    """An ordinary request is answered, and nothing is left of those before it."""
    until(lambda: nothing_open(client))
    answer = client.post(COMPLETIONS, json={"prompt": "the cat", "max_tokens": 3, "seed": 1})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
    assert nothing_open(client)
    return True


class ChatBytes(ByteTokenizer):
    chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@contextlib.contextmanager
def in_thread(next_logits=None, *, runner=None, slots=2, drafter=None, draft_length=0, http=Connection, **settings):
    """A server in a thread, over a toy of one's own; a client of it."""
    tokenizer = ChatBytes()
    runner = runner or ToyRunner(next_logits or toy_language(), tokenizer.vocab_size, num_slots=slots)
    model = Model("toy", runner, tokenizer)
    app = create_app(
        Engine(model, drafter, FixedLength(draft_length)), Settings(name="toy", **settings), Formats(model).constraint
    )
    with listen("127.0.0.1", 0) as sock:
        server = Server(app, grace=0.2, say=lambda message: None, http=http)
        port, loops = sock.getsockname()[1], []

        async def run():
            loops.append(asyncio.get_running_loop())
            await server.serve(sockets=[sock])

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        try:
            until(lambda: server.started)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
                client.port, client.service, client.server = port, app.state.service, server
                yield client
        finally:
            loops[0].call_soon_threadsafe(server.handle_exit, signal.SIGTERM, None)
            thread.join(PATIENCE)
            assert not thread.is_alive()
