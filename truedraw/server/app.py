"""The HTTP interface: OpenAI's endpoints, the metrics, the playground."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from truedraw import __version__
from truedraw.engine import Engine
from truedraw.protocols import Constraint
from truedraw.server.access import check_host
from truedraw.server.errors import ApiError
from truedraw.server.schema import ChatRequest, CompletionRequest, ResponseFormat
from truedraw.server.service import Service, Settings

PLAYGROUND = Path(__file__).parent / "playground"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


def create_app(engine: Engine, settings: Settings, grammars: Callable[[ResponseFormat], Constraint | None]) -> FastAPI:
    """The application. Its engine runs from startup on, and is closed with it; `app.state.service` is the service."""
    service = Service(engine, settings, grammars)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.worker.stop)

    app = FastAPIOffline("/docs", None, title="truedraw", version=__version__, description=_ABOUT, lifespan=lifespan)
    app.state.service = service

    async def answered(
        request: Request, endpoint: str, handler: Callable[[str], Awaitable[Response]], *, open_: bool = False
    ) -> Response:
        try:
            check_host(request.headers.get("host", ""), settings.hosts)
            owner = "" if open_ else settings.keys.owner(request.headers.get("authorization"))
            response = await handler(owner)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            failure = service.told(error)
            response = Response(failure.data, failure.status, headers=failure.headers, media_type="application/json")
        service.metrics.responses.labels(endpoint, str(response.status_code)).inc()
        return response

    def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
        return {status: {"description": _ERRORS[status], "content": {"application/json": {}}} for status in statuses}

    def takes(kind: type[ChatRequest] | type[CompletionRequest]) -> dict[str, Any]:
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        definitions.update(schema.pop("$defs", {}))
        definitions[kind.__name__] = schema
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        return {"requestBody": {"required": True, "content": content}}

    definitions: dict[str, Any] = {}
    either: dict[int | str, dict[str, Any]] = {
        200: {"description": "The answer, or with stream its events.", "content": {"text/event-stream": {}}}
    }
    told = either | errors(400, 401, 404, 408, 413, 415, 421, 429, 500, 503, 504)

    @app.post("/v1/chat/completions", responses=told, openapi_extra=takes(ChatRequest), response_class=JSONResponse)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await answered(request, "chat", lambda owner: service.completion(request, owner, ChatRequest))

    @app.post("/v1/completions", responses=told, openapi_extra=takes(CompletionRequest), response_class=JSONResponse)
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await answered(request, "completions", lambda owner: service.completion(request, owner, CompletionRequest))

    @app.get("/v1/models", responses=errors(401, 421))
    async def models(request: Request) -> Response:
        """The one model, and what may be asked of it."""

        async def handler(owner: str) -> Response:
            return JSONResponse(service.models())

        return await answered(request, "models", handler)

    @app.get("/v1/models/{name:path}", responses=errors(401, 404, 421))
    async def model(request: Request, name: str) -> Response:
        """What may be asked of the model of that name."""

        async def handler(owner: str) -> Response:
            if name != settings.name:
                raise ApiError(
                    404, f"there is no model {name[:100]!r}: this server has {settings.name!r}", code="model_not_found"
                )
            return JSONResponse(service.models()["data"][0])

        return await answered(request, "models", handler)

    @app.get("/health", responses=errors(421))
    async def health(request: Request) -> Response:
        """Whether requests are taken."""

        async def handler(owner: str) -> Response:
            return JSONResponse({"status": "ok"})

        return await answered(request, "health", handler, open_=True)

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}

    @app.get("/metrics", responses=text | errors(401, 421), response_class=Response)
    async def metrics(request: Request) -> Response:
        """For Prometheus."""

        async def handler(owner: str) -> Response:
            return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

        return await answered(request, "metrics", handler)

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        return FileResponse(PLAYGROUND / "index.html", headers={"Content-Security-Policy": _POLICY})

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        failure = ApiError(
            error.status_code, f"{request.method} {request.scope['path'][:100]}: {error.detail}", headers=error.headers
        )
        return Response(failure.data, failure.status, headers=failure.headers, media_type="application/json")

    app.mount("/playground", StaticFiles(directory=PLAYGROUND), name="playground")
    built = app.openapi

    def openapi() -> dict[str, Any]:
        document = built()
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # the bodies are read here, not by the framework
    app.add_middleware(SafeHeaders)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


_ABOUT = "OpenAI's interface over one engine: the same law as plain decoding, and how fast it was made."
_ERRORS = {
    400: "What was asked for cannot be done.",
    401: "No API key, or a wrong one.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    421: "The server does not answer for this host.",
    429: "The queue is full.",
    500: "The request failed.",
    503: "The server is shutting down.",
    504: "The request took longer than it may.",
}


class SafeHeaders:
    """Adds what keeps browsers from guessing and storing."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = {name.lower() for name, _ in message["headers"]}
                extra = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *(item for item in extra if item[0] not in known)]
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)
