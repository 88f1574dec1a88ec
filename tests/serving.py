"""A real server process for tests, on a free port."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time


class Server:
    """A running `truedraw serve`. `lines` is what it has said on standard error so far."""

    def __init__(self, process, log):
        self.process, self._log = process, log
        deadline = time.monotonic() + 240  # the check of --strict, on a busy machine
        while not (found := re.search(r" at (http://\S+:(\d+)) ", self.lines)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {self.lines}")
            time.sleep(0.02)
        self.url, self.port = found[1], int(found[2])

    @property
    def lines(self):
        self._log.seek(0)
        return self._log.read()

    def close(self):
        self._log.close()

    def stop(self, sig=signal.SIGTERM, timeout=60):
        """Ends it, and answers its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait(timeout)


def start(*args, model="toy", port=0, env=None):
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # the server has it
    process = subprocess.Popen(
        [sys.executable, "-m", "truedraw", "serve", "--model", model, "--port", str(port), *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
        env={**os.environ, **(env or {})},
    )
    try:
        return Server(process, log)
    except BaseException:
        process.kill()
        process.wait()
        log.close()
        raise


@contextlib.contextmanager
def serving(*args, **options):
    """A server for as long as the block takes; it must end in good order."""
    server = start(*args, **options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGINT)
        try:
            status = server.process.wait(60)
            assert status in (0, -signal.SIGKILL) and "Traceback" not in server.lines, (status, server.lines)
        finally:
            server.process.kill()
            server.process.wait()
            server.close()
