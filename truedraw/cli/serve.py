"""truedraw serve: an OpenAI-compatible server, with a playground."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from truedraw.cli import options as opt
from truedraw.cli.files import read_text
from truedraw.errors import InvalidParameter, MissingExtra, UsageError

_SERVER, _LIMITS, _PRIVACY = "Server", "Limits", "Access and privacy"


def _option(panel: str, text: str, *names: str, **more: Any) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, help=text, rich_help_panel=panel, **more)
    return option


def serve(
    model: opt.ModelName = "smollm2",
    draft_model: opt.DraftModel = None,
    drafter: opt.DrafterName = "auto",
    draft_length: opt.DraftLength = "auto",
    corpus: opt.CorpusPaths = None,
    corpus_size: opt.CorpusSize = None,
    mtp_modules: opt.MtpModules = None,
    rule: opt.RuleName = "auto",
    allow_lossy: opt.AllowLossy = False,
    context: opt.Context = None,
    slots: Annotated[int, _option("Model", "Choices at a time.")] = 4,
    threads: opt.Threads = None,
    kv_type: opt.KvType = "f16",
    device: opt.Device = "cpu",
    strict: opt.Strict = False,
    host: Annotated[str, _option(_SERVER, "Address to listen on; this machine only unless told otherwise.")] = "127.0.0.1",
    port: Annotated[int, _option(_SERVER, "0 takes a free one.", min=0, max=65535)] = 8000,
    served_name: Annotated[
        str | None, _option(_SERVER, "What clients call the model; default: as --model, without folders.")
    ] = None,
    grace: Annotated[float, _option(_SERVER, "Seconds that running requests have at the end.", min=0, max=86400)] = 20.0,
    log_level: Annotated[str, _option(_SERVER, "error, warning, info or debug. No prompt and no answer is logged.")] = "warning",
    access_log: Annotated[bool, _option(_SERVER, "A line for each request.", "--access-log")] = False,
    max_queue: Annotated[int, _option(_LIMITS, "Choices that may wait for a slot; beyond it 429.", min=0)] = 64,
    max_body: Annotated[int, _option(_LIMITS, "Bytes of a request.", min=1)] = 4 * 2**20,
    max_prompt: Annotated[int | None, _option(_LIMITS, "Tokens of a prompt; default: what the context holds.", min=1)] = None,
    max_n: Annotated[int, _option(_LIMITS, "Answers to a prompt.", min=1)] = 16,
    max_stop: Annotated[int, _option(_LIMITS, "Stop strings of a request.", min=0)] = 16,
    max_seconds: Annotated[float, _option(_LIMITS, "Of a request, queue included; 0: no bound.", min=0, max=10**9)] = 600.0,
    api_key: Annotated[
        list[str] | None,
        _option(
            _PRIVACY,
            "A key that lets clients in; may be repeated. Others can see a command line: better a file.",
            envvar="TRUEDRAW_API_KEY",
        ),
    ] = None,
    api_key_file: Annotated[str | None, _option(_PRIVACY, "A file with a key on each line.")] = None,
    allowed_host: Annotated[
        list[str] | None, _option(_PRIVACY, "A host name to answer for; default: any, or on this machine only its own.")
    ] = None,
    cors_origin: Annotated[list[str] | None, _option(_PRIVACY, "A site whose pages may ask; default: none.")] = None,
    share_caches: Annotated[
        bool,
        _option(
            _PRIVACY, "Caches and kept answers serve all keys alike; what was cached can then be found out.", "--share-caches"
        ),
    ] = False,
    steady_stream: Annotated[
        bool,
        _option(
            _PRIVACY,
            "Stream at an even pace and size: who watches the line sees how long it took, and no more.",
            "--steady-stream",
        ),
    ] = False,
) -> int:
    """Serve a model to any OpenAI client, with a playground for people."""
    try:
        from truedraw.server.access import LOOPBACK, Keys, Limits
        from truedraw.server.app import create_app
        from truedraw.server.grammars import Formats
        from truedraw.server.run import configure_log, listen
        from truedraw.server.run import serve as run
        from truedraw.server.service import Settings
        from truedraw.server.stream import SteadyPace
    except ImportError as error:
        raise MissingExtra(error.name or "fastapi", "server") from None
    if log_level not in ("error", "warning", "info", "debug"):
        raise InvalidParameter("log_level", log_level, "error, warning, info or debug")
    keys = Keys([*(api_key or ()), *_keys(api_key_file)])
    local = host in LOOPBACK
    settings = Settings(
        name=served_name or _served_name(model),
        keys=keys,
        limits=Limits(body_bytes=max_body, prompt_tokens=max_prompt, choices=max_n, stops=max_stop, seconds=max_seconds or None),
        hosts=tuple(name.lower() for name in allowed_host) if allowed_host else LOOPBACK if local else (),
        origins=tuple(cors_origin or ()),
        max_queue=max_queue,
        allow_lossy=allow_lossy,
        strict=strict,
        shared=share_caches,
        steady=SteadyPace() if steady_stream else None,
    )
    configure_log(log_level)
    sock = listen(host, port)  # before the model: what is wrong with it is told at once
    with sock:
        engine = opt.load_engine(
            model,
            drafter=drafter,
            draft_model=draft_model,
            draft_length=draft_length,
            corpus=corpus,
            corpus_size=corpus_size,
            mtp_modules=mtp_modules,
            owners=() if share_caches else keys.owners,
            choice=True,
            rule=rule,
            allow_lossy=allow_lossy,
            context=context,
            slots=slots,
            threads=threads,
            kv_type=kv_type,
            device=device,
            strict=strict,
        )
        app = create_app(engine, settings, Formats(engine.model).constraint)
        at = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"

        def on_ready() -> None:
            _say(f"{settings.name} at {at}  (playground at {at}/, OpenAI clients at {at}/v1, stop with Ctrl-C)")
            if not local and not (api_key or api_key_file):
                _say("anybody who reaches this address can use it: --api-key-file lets only some in")

        run(app, sock, grace=grace, say=_say, on_ready=on_ready, access_log=access_log)
    return 0


def _say(message: str) -> None:
    print(f"truedraw: {message}", file=sys.stderr, flush=True)


def _served_name(model: str) -> str:
    return Path(model).stem if os.sep in model or model.endswith(".gguf") else model


def _keys(path: str | None) -> list[str]:
    """Raises UsageError."""
    if path is None:
        return []
    keys = [line.strip() for line in read_text("api_key_file", path, "a file with an API key on each line").splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise UsageError(f"api_key_file: {path} holds no key: give at least one, on a line of its own")
    return keys
