"""Bytes that are no request, bodies that are no JSON, clients that stop in the middle."""

import concurrent.futures
import json

import httpx
import pytest
from serving import serving
from wire import CHAT, COMPLETIONS, PATIENCE, answers, connect, error_of, exchange, head, in_thread, is_well, post, until

from truedraw.server.access import Limits
from truedraw.server.connection import Connection

GOOD = {"prompt": "the", "max_tokens": 2}
GOOD_BYTES = json.dumps(GOOD).encode()


@pytest.fixture(scope="module")
def server():
    with serving("--slots", "2") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def field(json_text, name="x"):
    return f'{{"prompt": "the", "{name}": {json_text}}}'.encode()


CHUNKED = {"transfer_encoding": "chunked", "connection": "close"}
REQUESTS = {
    "no HTTP": (b"\x16\x03\x01\x00\xc8\x01 hello\r\n\r\n", 400, "HTTP"),
    "HTTP/9.9": (b"GET /health HTTP/9.9\r\n\r\n", 400, "HTTP"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "HTTP"),
    "a length that is no number": (head(content_length="abc"), 400, "HTTP"),
    "a negative length": (head(content_length="-5"), 400, "HTTP"),
    "a length beyond 64 bits": (head(content_length="9" * 30), 400, "HTTP"),
    "two ways to tell the length": (head(content_length="5", transfer_encoding="chunked") + b"0\r\n\r\n", 400, "HTTP"),
    "a chunk without a length": (head(**CHUNKED) + b"zz\r\n", 400, "HTTP"),
    "a chunk beyond 64 bits": (head(**CHUNKED) + b"f" * 30 + b"\r\n", 400, "HTTP"),
    "a NUL in a header": (head(x="\0"), 400, "HTTP"),
    "a long path": (head("/" + "a" * 10**6), 431, "head"),
    "a long header": (head(x="a" * 10**7), 431, "head"),
    "many headers": (head(x="\r\nx: ".join(["a"] * 10**5)), 431, "head"),
    "an unknown path": (head("/v1/none", "GET", connection="close"), 404, "/v1/none"),
    "a path that is no text": (head("/%ff%00%0a", "GET", connection="close"), 404, "GET"),
    "a host that is none": (head("/v1/none", "GET", host="[", connection="close"), 404, "/v1/none"),
    "a path upwards": (head("/playground/%2e%2e/app.py", "GET", connection="close"), 404, "playground"),
    "GET for POST": (head(COMPLETIONS, "GET", connection="close"), 405, "GET"),
    "POST for GET": (post(b"", "/v1/models", connection="close"), 405, "POST"),
    "another model": (head("/v1/models/none", "GET", connection="close"), 404, "none"),
    "an upgrade": (post(GOOD, upgrade="h2c", connection="Upgrade"), 400, "Upgrade"),
    "no content type": (post(GOOD, content_type=None, connection="close"), 415, "application/json"),
    "a form": (post(GOOD, content_type="application/x-www-form-urlencoded", connection="close"), 415, "application/json"),
    "a content type of noise": (post(GOOD, content_type="\xff" * 9999, connection="close"), 415, "application/json"),
    "a length too large": (head(content_length=2**40, connection="close"), 413, "4194304 bytes"),
    "a body shorter than it is": (head(content_length=5, connection="close") + GOOD_BYTES, 400, "JSON"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_no_request_is_told_why(server, name):
    data, status, word = REQUESTS[name]
    with connect(server.port) as client:
        client.sendall(data)
        (answered, body), *_ = answers(client)
    assert answered == status
    assert word in error_of(body)["message"]


BODIES = {
    "empty": (b"", "no JSON"),
    "half": (GOOD_BYTES[:-5], "no JSON"),
    "two": (GOOD_BYTES * 2, "no JSON"),
    "UTF-16": (GOOD_BYTES.decode().encode("utf-16"), "UTF-8"),
    "bytes that are no text": (b'{"prompt": "\xff"}', "0xff at offset 12"),
    "a byte order mark": (b"\xef\xbb\xbf" + GOOD_BYTES, "BOM"),
    "raw control characters": (b'{"prompt": "a\0b"}', "control character"),
    "a list": (b"[]", "object"),
    "a text": (b'"the"', "object"),
    "null": (b"null", "object"),
    "NaN": (field("NaN"), "NaN"),
    "Infinity": (field("-Infinity"), "-Infinity"),
    "a number beyond all": (field("1e999"), "1e999"),
    "5000 digits": (field("9" * 5000), "5000 digits"),
    "nested lists": (field("[" * 10**5 + "]" * 10**5), "nested"),
    "nested objects": (field('{"a":' * 10**5 + "1" + "}" * 10**5), "nested"),
    "a key twice": (b'{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
    "a key twice inside": (field('{"a": 1, "a": 2}', "metadata"), "'a' twice"),
    "an unknown key of noise": (b'{"prompt": "a", "\\n\\u001b[31m\\u0000": 1}', "not supported"),
    "a very long key": (b'{"prompt": "a", "%s": 1}' % (b"k" * 10**6), "not supported"),
    "a very long value": (field('"%s"' % ("v" * 10**6), "model"), "model"),
    "a list of a million wrong things": (b'{"prompt": [' + b"[]," * 10**6 + b"[]]}", "prompt.0"),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_no_json_object_is_told_why(client, name):
    body, word = BODIES[name]
    answer = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert word in error_of(answer)["message"]


SURROGATES = {
    "prompt": r'{"prompt": "\ud800"}',
    "model": r'{"prompt": "x", "model": "\ud800"}',
    "stop": r'{"prompt": "x", "stop": ["a", "\udfff"]}',
    "logit_bias": r'{"prompt": "x", "logit_bias": {"\ud800": 1}}',
    "response_format": r'{"prompt": "x", "response_format": {"type": "\ud800"}}',
    "user": r'{"prompt": "x", "user": "\ud83dx"}',
    "speculation": r'{"prompt": "x", "speculation": {"drafter": "\ud800"}}',
    "messages": r'{"messages": [{"role": "\ud800", "content": "x"}]}',
}


@pytest.mark.parametrize("name", SURROGATES)
def test_half_a_character_is_refused_wherever_it_is(client, name):
    path = CHAT if name == "messages" else COMPLETIONS
    answer = client.post(path, content=SURROGATES[name], headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == name and "surrogate" in error_of(answer)["message"]


def test_whole_characters_outside_the_first_plane_are_text(client):
    body = r'{"prompt": "\ud83d\ude00 \\ud800", "max_tokens": 1, "echo": true}'
    answer = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.json()["choices"][0]["text"].startswith("\N{GRINNING FACE} \\ud800")


def test_a_body_beyond_the_limit_is_refused_and_its_connection_goes_on(server):
    """Chunked or not: the client can send all of it, sees why, and its next request is answered."""
    size = 2**16
    with connect(server.port) as client:
        client.sendall(head(transfer_encoding="chunked") + (b"%x\r\n" % size + b" " * size + b"\r\n") * 100 + b"0\r\n\r\n")
        client.sendall(post(b" " * 10**7))
        client.sendall(post(GOOD, connection="close"))
        (first, why), (second, _), (third, _) = answers(client)
    assert (first, second, third) == (413, 413, 200)
    assert "larger than 4194304 bytes" in error_of(why)["message"]


def test_after_an_error_the_connection_goes_on_and_requests_may_be_sent_ahead(server):
    with connect(server.port) as client:
        client.sendall(post(b"{") + post(GOOD) + head("/none", "GET") + post(GOOD, "/v1/completions", connection="close"))
        assert [status for status, _ in answers(client)] == [400, 200, 404, 200]


def test_old_clients_are_answered(server):
    status, body = exchange(server.port, head("/health", "GET", host=None).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert (status, json.loads(body)) == (200, {"status": "ok"})
    assert exchange(server.port, post(GOOD).replace(b"HTTP/1.1", b"HTTP/1.0"))[0] == 200
    with connect(server.port) as client:
        client.sendall(head(content_length=len(GOOD_BYTES), expect="100-continue", connection="close"))
        assert client.recv(100).startswith(b"HTTP/1.1 100 Continue")
        client.sendall(GOOD_BYTES)
        assert answers(client)[0][0] == 200


def test_many_at_once_who_send_nothing_hold_up_nobody(server, client):
    held = [connect(server.port) for _ in range(300)]
    try:
        assert is_well(client)
        for each in held[::3]:
            each.sendall(b"POST /v1/comp")
        for each in held[1::3]:
            each.sendall(head(content_length=100) + b"{")
        until(lambda: client.get("/health").status_code == 200)
    finally:
        for each in held:
            each.close()
    assert is_well(client)


def test_the_server_is_well_after_all_that(server, client):
    assert is_well(client)
    assert "Traceback" not in server.lines


class Hasty(Connection):
    head_seconds = idle_seconds = 0.3


@pytest.fixture(scope="module")
def hasty():
    with in_thread(http=Hasty, limits=Limits(body_seconds=0.3)) as client:
        yield client


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/comp", head()[:-2], b"\r\n", post(GOOD) + b"\r\n", post(GOOD) + head()[:-2], head() + b"POST"],
    ids=["nothing", "half a line", "half a head", "an empty line", "one and a line", "one and a half", "an answer unread"],
)
def test_a_head_that_does_not_come_ends_the_connection(hasty, sent):
    with connect(hasty.port) as client:
        client.sendall(sent)
        assert [status for status, _ in answers(client)] in ([], [200], [400])
    assert is_well(hasty)


def test_a_head_that_trickles_ends_all_the_same(hasty):
    """Of the second request on a connection: each byte would stop the time that idle connections have."""
    with connect(hasty.port) as client:
        client.sendall(post(GOOD))
        assert client.recv(2**16)
        client.sendall(b"GET / HTTP/1.1\r\nx: ")
        client.settimeout(0.05)

        def ended():
            try:
                client.sendall(b"a")
                return client.recv(100) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        until(ended)


def test_a_body_that_does_not_come_is_a_408(hasty):
    with connect(hasty.port) as client:
        client.sendall(head(content_length=100) + b'{"prompt"')
        ((status, body),) = answers(client)
    assert status == 408 and "0.3 s" in error_of(body)["message"]
    assert is_well(hasty)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten(hasty):
    for _ in range(5):
        with connect(hasty.port) as client:
            client.sendall(head(content_length=100) + b'{"prompt"')
    assert is_well(hasty)
    until(lambda: not hasty.service._num_read.total())


def test_no_more_bodies_are_read_at_a_time_than_fit(hasty):
    with in_thread(limits=Limits(bodies=3)) as client:
        held = [connect(client.port) for _ in range(3)]
        for each in held:
            each.sendall(head(content_length=100) + b"{")
        until(lambda: client.service._num_read.total() == 3)
        answer = client.post(COMPLETIONS, json=GOOD)
        assert answer.status_code == 429 and error_of(answer)["code"] == "queue_full"
        for each in held:
            each.close()
        until(lambda: not client.service._num_read.total())
        assert is_well(client)


def test_long_bodies_do_not_take_the_server_away_from_others(client):
    """While wrong bodies of the largest size are looked at, short requests are answered."""
    large = [b'{"prompt": [' + b"-1," * 10**6 + b"-1]}"] * 6

    def send(body):
        headers = {"content-type": "application/json"}
        return httpx.post(f"{client.base_url}/v1/completions", content=body, headers=headers, timeout=PATIENCE)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        sent = [pool.submit(send, body) for body in large]
        assert is_well(client)
        assert [each.result().status_code for each in sent] == [400] * len(large)
