"""Sixteen clients for a minute, a fifth of them cut off: nothing is lost, nothing leaks, nothing gets slower."""

import asyncio
import re
import statistics

import httpx
import pytest
from serving import serving

from truedraw.bench.load import Load, Run, measure, warm_up
from truedraw.bench.load_client import Client
from truedraw.bench.load_prompts import shipped

pytestmark = [pytest.mark.long, pytest.mark.model]


def resident(process):
    """MB."""
    with open(f"/proc/{process.pid}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) / 1024


def run(url, seconds, *, abandon=0.0, off=False, concurrency=16, seed=1, temperature=0.0):
    async def go():
        async with Client(url, {}, connections=concurrency, timeout=300) as client:
            load = Load(
                shipped(),
                "smollm2",
                max_tokens=96,
                requests=100_000,
                seconds=seconds,
                abandon=abandon,
                seed=seed,
                temperature=temperature,
            )
            sample = await warm_up(client, load, off=off)
            made = Run(concurrency, off)
            await measure(client, load, made, usual_seconds=20 * sample.seconds)
            return made.figures()

    return asyncio.run(go())


@pytest.fixture(scope="module")
def server():
    with serving("--slots", "16", "--context", "1024", model="smollm2") as running:
        yield running


def test_a_minute_with_a_fifth_of_the_clients_cut_off(server):
    run(server.url, 30, abandon=0.2)
    before = resident(server.process)
    figures = run(server.url, 60, abandon=0.2, seed=2)
    after = resident(server.process)
    print(f"\n{figures.done} done, {figures.abandoned} cut off, {figures.failed} failed; memory {before:.0f} to {after:.0f} MB")
    assert figures.failed == 0 and figures.abandoned > 0 and figures.done > 50
    assert after - before < 20
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "truedraw_choices_running 0.0" in metrics and "truedraw_choices_waiting 0.0" in metrics


def test_speculation_slows_nothing(server):
    """Rounds in turn; the machine may be shared, so that a single round says little."""
    ratios, firsts = [], []
    for number in range(4):
        order = (False, True) if number % 2 else (True, False)
        told = {off: run(server.url, 20, off=off, seed=10 + number) for off in order}
        ratios.append(told[False].tokens_per_second / told[True].tokens_per_second)
        firsts.append(told[False].first_token_ms.p50 / told[True].first_token_ms.p50)
    ratio, first = statistics.median(ratios), statistics.median(firsts)
    told = ", ".join(f"{each:.2f}" for each in ratios)
    print(f"\nthroughput {ratio:.3f} of plain ({told}), first token {first:.2f} times as late")
    assert ratio >= 0.98
    assert first <= 1.05
