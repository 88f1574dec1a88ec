"""A server of the OpenAI kind whose answers are known beforehand; the last word of a prompt says how it behaves.

ok        5 chunks, GAP seconds apart, the first after GAP; two tokens each
429       refused, with Retry-After
500       an error of its own
half      the connection ends after 2 chunks
event     an error event after 2 chunks
garbage   an event that is no JSON
html      a page in the place of a stream
hang      2 chunks, then nothing
die       the server stops, and this request with it
"""

from __future__ import annotations

import http.server
import json
import threading
import time
from contextlib import contextmanager, suppress

CHUNKS, TOKENS, PROMPT_TOKENS, GAP = 5, 10, 7, 0.02


class Stub(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *, usage=True, speculation=True, key=None, models=("stub",), retry_after="1"):
        super().__init__(("127.0.0.1", 0), Handler)
        self.usage, self.speculation, self.key, self.models, self.retry_after = usage, speculation, key, models, retry_after
        self.bodies, self.headers_seen, self.cut = [], [], 0
        self.running, self.most_running = 0, 0
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.connections = set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request, client_address):
        self.connections.add(request)
        super().process_request(request, client_address)

    def handle_error(self, request, client_address):
        pass  # clients that go away are part of the tests

    def die(self):
        threading.Thread(target=self._die).start()

    def _die(self):
        self.shutdown()
        self.socket.close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(2)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a chunk waits for the acknowledgement of the one before, 40 ms

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if self.server.key is not None and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            return self.reply(401, {"error": {"message": "no such key"}})
        if self.path != "/v1/models" or self.server.models is None:
            return self.reply(404, {"error": {"message": "not here"}})
        self.reply(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append((self.path, body))
            server.headers_seen.append(dict(self.headers))
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        try:
            prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
            getattr(self, f"do_{prompt.split()[-1]}", self.do_ok)(body)
        except OSError:
            with server.lock:
                server.cut += 1
            raise
        finally:
            with server.lock:
                server.running -= 1

    # ------------------------------------------------------------ behaviours

    def do_ok(self, body):
        self.begin()
        self.chunks(body, CHUNKS)
        told = self.told(body)
        self.event({"choices": [self.choice(body, None, "stop")], **told})
        if self.server.usage:
            counts = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": TOKENS, "total_tokens": PROMPT_TOKENS + TOKENS}
            self.event({"choices": [], "usage": counts})
        self.write(b"data: [DONE]\n\n")
        self.write(b"")

    def do_429(self, body):
        self.reply(429, {"error": {"message": "the queue is full", "code": "busy"}}, {"Retry-After": self.server.retry_after})

    def do_500(self, body):
        self.reply(500, {"error": {"message": "it broke"}})

    def do_half(self, body):
        self.begin()
        self.chunks(body, 2)
        self.close_connection = True  # no last chunk of the transfer

    def do_short(self, body):
        self.begin()
        self.chunks(body, 2)
        self.write(b"")

    def do_event(self, body):
        self.begin()
        self.chunks(body, 2)
        self.event({"error": {"message": "a row is NaN", "type": "server_error"}})
        self.write(b"")

    def do_garbage(self, body):
        self.begin()
        self.write(b"data: {half a thought\n\n")
        self.write(b"")

    def do_html(self, body):
        self.reply(200, "<html>", {"Content-Type": "text/html"})

    def do_hang(self, body):
        self.begin()
        self.chunks(body, 2)
        self.server.released.wait(20)

    def do_die(self, body):
        self.server.die()
        self.server.released.wait(20)

    # ------------------------------------------------------------ pieces

    def choice(self, body, text, reason):
        if "prompt" in body:
            return {"index": 0, "text": text or "", "finish_reason": reason}
        return {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": reason}

    def chunks(self, body, count):
        if "messages" in body:
            self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for i in range(count):
            time.sleep(GAP)
            self.event({"choices": [self.choice(body, f"word {i} ", None)]})

    def told(self, body):
        if not self.server.speculation:
            return {}
        off = bool(body.get("speculation", {}).get("off"))
        return {
            "speculation": {
                "drafter": "suffix", "rule": "coupled", "steps": 10 if off else 4, "proposed": 0 if off else 12,
                "accepted": 0 if off else 6, "tokens_per_step": 1.0 if off else 2.5, "acceptance_by_depth": [], "seconds": 0.5,
                "estimated_plain_seconds": 0.5 if off else 1.0, "drift": None,
            }
        }  # fmt: skip

    def begin(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, value):
        self.write(f"data: {json.dumps(value)}\r\n\r\n".encode())

    def write(self, data):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def reply(self, status, value, headers=None):
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, told in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, told)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def running(**options):
    """A stub that listens until the block ends."""
    with Stub(**options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()
