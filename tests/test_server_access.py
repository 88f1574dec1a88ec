"""Keys, hosts, other sites; and what `truedraw serve` is told wrongly."""

import sys

import httpx
import pytest
from serving import serving
from wire import CHAT, COMPLETIONS, PATIENCE, error_of, in_thread, is_well, until

from truedraw.cli.main import run
from truedraw.server.access import LOOPBACK, Keys
from truedraw.server.run import listen

ONE, TWO = "first-key-1", "second-key-2"
GOOD = {"prompt": "the", "max_tokens": 1}
CLOSED = [("GET", "/v1/models"), ("GET", "/v1/models/toy"), ("GET", "/metrics"), ("POST", COMPLETIONS), ("POST", CHAT)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One key in a file, with a comment and empty lines; one in the environment."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# the first\n\n  {ONE}  \n")
    with serving(
        "--api-key-file", str(keys), "--cors-origin", "https://one.example", "--access-log", env={"TRUEDRAW_API_KEY": TWO}
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


WRONG_KEYS = [
    None, "", ONE, "Bearer", "Bearer wrong-key-1", f"Basic {ONE}", f"Bearer {ONE}x", f"Bearer {ONE[:-1]}",
    f"Bearer {ONE} x", f"Bearer {ONE},{TWO}", f"Bearer {ONE.upper()}", f"Bearer \xff{ONE}", "Bearer " + "x" * 10_000,
]  # fmt: skip


@pytest.mark.parametrize("given", WRONG_KEYS, ids=lambda given: str(given)[:25])
def test_without_a_right_key_nothing_is_told_or_done(client, given):
    headers = {} if given is None else {"authorization": given.encode("latin-1")}
    for method, path in CLOSED:
        answer = client.request(method, path, headers=headers, json=GOOD if method == "POST" else None)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        error = error_of(answer)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert "Authorization: Bearer KEY" in error["message"] and ONE not in error["message"]


@pytest.mark.parametrize("given", [f"Bearer {ONE}", f"bearer {TWO}", f"BEARER   {ONE}"])
def test_each_key_opens_everything(client, given):
    headers = {"authorization": given}
    assert client.post(COMPLETIONS, json=GOOD, headers=headers).status_code == 200
    assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.get("/metrics", headers=headers).status_code == 200


def test_health_and_pages_need_no_key(client):
    assert client.get("/health").json() == {"status": "ok"}
    for path in ("/", "/docs", "/openapi.json"):
        assert client.get(path).status_code == 200


def test_the_access_log_has_a_line_for_each_answer_and_no_key(server, client):
    before = server.lines.count("\n")
    assert client.get("/v1/models", headers={"authorization": f"Bearer {ONE}"}).status_code == 200
    lines = until(lambda: server.lines.splitlines()[before:])
    assert len(lines) == 1 and '"GET /v1/models HTTP/1.1" 200' in lines[0]
    assert ONE not in server.lines and TWO not in server.lines


def test_the_key_is_looked_at_before_the_body(client):
    assert client.post(COMPLETIONS, content=b"{", headers={"content-type": "text/plain"}).status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "[", "[::2]", "127.0.0.1.evil.example", "a" * 999]
)
def test_names_of_other_sites_are_not_answered_for(client, host):
    for method, path in [*CLOSED, ("GET", "/health")]:
        answer = client.request(method, path, headers={"host": host, "authorization": f"Bearer {ONE}"})
        assert answer.status_code == 421 and error_of(answer)["code"] == "wrong_host"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:80"])
def test_names_of_this_machine_are(client, host):
    assert client.get("/health", headers={"host": host}).status_code == 200


def test_only_named_sites_may_ask_from_a_browser(client):
    for headers in ({"authorization": f"Bearer {ONE}"}, {}):
        answer = client.get("/v1/models", headers={"origin": "https://one.example", **headers})
        assert answer.headers["access-control-allow-origin"] == "https://one.example"
        answer = client.get("/v1/models", headers={"origin": "https://two.example", **headers})
        assert "access-control-allow-origin" not in answer.headers
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    answer = client.options(COMPLETIONS, headers={"origin": "https://one.example", **asked})
    assert answer.status_code == 200 and "POST" in answer.headers["access-control-allow-methods"]
    assert client.options(COMPLETIONS, headers={"origin": "https://two.example", **asked}).status_code == 400


def test_by_default_no_other_site_may():
    with in_thread(hosts=LOOPBACK) as client:
        for path in ("/v1/models", "/health", "/none", "/"):
            answer = client.get(path, headers={"origin": "https://one.example"})
            assert "access-control-allow-origin" not in answer.headers
        assert client.options(COMPLETIONS, headers={"origin": "https://one.example"}).status_code == 405
        assert is_well(client)


def test_the_same_key_twice_is_one_owner():
    assert len(Keys([ONE, TWO, ONE]).owners) == 2
    assert not {ONE, TWO} & set(Keys([ONE, TWO]).owners)


WRONG_OPTIONS = {
    "a short key": (["--api-key", "short"], "at least 8"),
    "a key with a space": (["--api-key", "two words here"], None),
    "no key file": (["--api-key-file", "{tmp}/none"], "none"),
    "a folder of keys": (["--api-key-file", "{tmp}"], "{tmp}"),
    "an empty key file": (["--api-key-file", "{tmp}/empty"], "holds no key"),
    "a binary key file": (["--api-key-file", "{tmp}/binary"], "binary"),
    "a taken port": (["--port", "{taken}"], "in use"),
    "a port beyond all": (["--port", "65536"], "65536"),
    "no port": (["--port", "http"], "http"),
    "an unknown host": (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    "a host that is none": (["--host", "a" * 300], "a" * 300),
    "another machine's address": (["--host", "192.0.2.1"], "192.0.2.1"),
    "no slots": (["--slots", "0"], "slots is 0"),
    "too few bytes": (["--max-body", "0"], "max-body"),
    "an unknown log level": (["--log-level", "loud"], "loud"),
    "an unknown model": (["--model", "{tmp}/none.gguf"], "none.gguf"),
    "an unknown drafter": (["--drafter", "nobody"], "nobody"),
    "a lossy rule": (["--rule", "typical"], "typical"),
    "no corpus": (["--corpus", "{tmp}/none"], "{tmp}/none"),
    "a negative grace": (["--grace", "-1"], "grace"),
    "a grace that is no number": (["--grace", "nan"], "grace"),
    "a grace without end": (["--grace", "inf"], "grace"),
    "seconds without end": (["--max-seconds", "inf"], "max-seconds"),
    "seconds that are no number": (["--max-seconds", "nan"], "max-seconds"),
    "an unknown option": (["--nothing"], "--nothing"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_what_serve_is_told_wrongly_is_one_line_and_status_2(name, tmp_path, monkeypatch, capsys):
    options, word = WRONG_OPTIONS[name]
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe" * 20)
    monkeypatch.delenv("TRUEDRAW_API_KEY", raising=False)
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        values = {"tmp": str(tmp_path), "taken": taken.getsockname()[1]}
        first = [] if "--model" in options else ["--model", "toy"]
        first += [] if "--port" in options else ["--port", "0"]
        monkeypatch.setattr(sys, "argv", ["truedraw", "serve", *first, *(option.format(**values) for option in options)])
        assert run() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("truedraw: ") and err.count("\n") == 1, err
    assert word is None or word.format(**values) in err
