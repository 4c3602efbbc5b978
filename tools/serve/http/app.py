"""The FastAPI application: its routes, and errors in the API's shape."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from piecegraph import __version__
from piecegraph.errors import RequestError
from piecegraph.tools.serve.endpoints.chat_completions import chat_completions
from piecegraph.tools.serve.endpoints.completions import completions
from piecegraph.tools.serve.endpoints.embeddings import embeddings
from piecegraph.tools.serve.endpoints.generation import as_api_error
from piecegraph.tools.serve.endpoints.generation_service import GenerationService
from piecegraph.tools.serve.endpoints.pooling_service import PoolingService
from piecegraph.tools.serve.endpoints.service import Service
from piecegraph.tools.serve.endpoints.tokenizing import detokenize_reply, tokenize_reply
from piecegraph.tools.serve.http.gate import Gate
from piecegraph.tools.serve.http.sleep_routes import add_sleep
from piecegraph.tools.serve.protocol.embedding_body import EmbeddingBody
from piecegraph.tools.serve.protocol.error_replies import ApiError, bad_request, invalid_body, json_response
from piecegraph.tools.serve.protocol.request_models import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadLoraBody,
    TokenizeBody,
    UnloadLoraBody,
)

logger = logging.getLogger(__name__)


def make_app(service: Service) -> ASGIApp:
    """Return the application that serves `service`'s model."""
    app = FastAPI(title="piecegraph", version=__version__, docs_url=None, redoc_url=None)
    if isinstance(service, PoolingService):
        _add_pooling(app, service)
    else:
        assert isinstance(service, GenerationService), service
        _add_generation(app, service)
    _add_information(app, service)
    if service.settings.enable_sleep_mode:
        add_sleep(app, service)

    async def refuse(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def refuse_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), error
        return invalid_body(error.errors()).response()

    async def refuse_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), error
        where = f"{request.method} {request.url.path}"
        reasons = {404: f"there is no {where}.", 405: f"there is no {where}; the path takes other methods."}
        return ApiError(HTTPStatus(error.status_code), reasons.get(error.status_code, str(error.detail))).response()

    app.add_exception_handler(ApiError, refuse)
    app.add_exception_handler(RequestError, refuse)
    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(HTTPException, refuse_route)
    app.add_exception_handler(Exception, refuse)
    return Gate(_Quiet(app), service)


class _Quiet:
    """An ASGI application around one that raises an unexpected error again after it has answered and logged it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except TimeoutError:
            raise
        except Exception as error:
            logger.debug("a request has ended with an error", exc_info=error)


def _add_generation(app: FastAPI, service: GenerationService) -> None:
    """Add the routes that run a model that generates."""

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        return await chat_completions(service, body, request)

    @app.post("/v1/completions", response_model=None)
    async def text(body: CompletionBody, request: Request) -> Response:
        return await completions(service, body, request)

    @app.post("/v1/load_lora_adapter", response_model=None)
    async def load(body: LoadLoraBody) -> Response:
        await service.adapters.load(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", response_model=None)
    async def unload(body: UnloadLoraBody) -> Response:
        service.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @app.post("/v1/embeddings", response_model=None)
    async def embeddings() -> Response:
        raise bad_request("embeddings are not available: the model generates text. Serve it with --runner pooling.")


def _add_pooling(app: FastAPI, service: PoolingService) -> None:
    """Add the routes that run a model that pools."""

    @app.post("/v1/embeddings", response_model=None)
    async def embed(body: EmbeddingBody, request: Request) -> Response:
        return await embeddings(service, body, request)

    @app.post("/v1/chat/completions", response_model=None)
    @app.post("/v1/completions", response_model=None)
    async def generate() -> Response:
        raise bad_request(
            "completions are not available: the model turns texts into vectors or classes and generates nothing. If it "
            "can generate, serve it with --runner generate."
        )


def _add_information(app: FastAPI, service: Service) -> None:
    """Add the routes that tell of the model and the server."""

    adapters = service.adapters if isinstance(service, GenerationService) else None

    def card(name: str) -> dict[str, Any]:
        adapter = None if adapters is None else adapters.find(name)
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "piecegraph",
            "root": service.llm.model_name if adapter is None else adapter.lora_path,
            "parent": None if adapter is None else service.model_names[0],
            "max_model_len": service.llm.max_model_len,
        }

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return json_response({"object": "list", "data": [card(name) for name in service.known_models()]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        return json_response(card(service.check_model(name)))

    @app.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeBody) -> Response:
        return json_response(await tokenize_reply(service, body))

    @app.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody) -> Response:
        return json_response(await detokenize_reply(service, body))

    @app.get("/health", response_model=None)
    async def health() -> Response:
        return Response(status_code=HTTPStatus.OK if service.thread.is_alive else HTTPStatus.SERVICE_UNAVAILABLE)

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        if not service.thread.is_alive:
            return json_response({"status": "failed"}, HTTPStatus.SERVICE_UNAVAILABLE)
        if service.is_draining:
            return json_response({"status": "shutting down"}, HTTPStatus.SERVICE_UNAVAILABLE)
        if service.is_asleep:
            return json_response({"status": "sleeping"}, HTTPStatus.SERVICE_UNAVAILABLE)
        return json_response({"status": "serving", "start": str(service.llm.start_progress)})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=1.0.0; charset=utf-8")

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return json_response({"version": __version__})
