"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from piecegraph.runner.pooling.params import PoolingParams
from piecegraph.tools.serve.endpoints.generation import CLIENT_CLOSED_REQUEST, exit_stack, until_disconnected
from piecegraph.tools.serve.endpoints.pooling_service import PoolingService
from piecegraph.tools.serve.protocol.embedding_body import EmbeddingBody
from piecegraph.tools.serve.protocol.error_replies import ApiError, bad_request, json_response

if TYPE_CHECKING:
    import torch

    from piecegraph.runner.pooling.engine import PooledOutput
    from piecegraph.runner.pooling.step import Text


async def embeddings(service: PoolingService, body: EmbeddingBody, request: Request) -> Response:
    """Embed one text or several."""
    model = service.check_model(body.model)
    if service.llm.pooling_task != "embed":
        raise bad_request(
            "embeddings are not available: the model was loaded to classify. Serve it with --convert embed."
        )
    params = PoolingParams(
        dimensions=body.dimensions, normalize=body.normalize, truncate_prompt_tokens=body.truncate_prompt_tokens
    )
    inputs = body.inputs()
    names = ["input"] if body.is_single else [f"input[{number}]" for number in range(len(inputs))]
    exit_stack(request).enter_context(service.places(service.num_places(len(inputs))))
    request_id = f"embd-{body.request_id or uuid4().hex}"

    async def pooled() -> tuple[list[Text], list[PooledOutput]]:
        options = None if body.add_special_tokens else {"add_special_tokens": False}
        texts = await service.texts(inputs, params, names=names, options=options)
        return texts, await service.pooled(request_id, texts, params)

    found = await until_disconnected(request, pooled())
    if found is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    texts, outputs = found
    rows = [output.outputs.data for output in outputs]
    num_tokens = sum(len(text.token_ids) for text in texts)
    head = {"id": request_id, "object": "list", "created": int(time.time()), "model": model}
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    is_base64 = body.encoding_format == "base64"

    def reply() -> Response:
        return json_response({**head, "data": embedding_data(rows, is_base64=is_base64), "usage": usage})

    return await asyncio.to_thread(reply)  # thousands of numbers take the time of many steps of the loop


def embedding_data(rows: Sequence[torch.Tensor], *, is_base64: bool) -> list[dict[str, Any]]:
    """Return the embeddings, each `[size]` float32, in the API's form: lists of numbers, or base64 of little-endian
    float32. Raises `ApiError` for one that is not finite, which JSON cannot say."""
    data = []
    for index, row in enumerate(rows):
        if not bool(row.isfinite().all()):
            raise ApiError(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"the model's embedding of text {index} has values that are not finite; a wider dtype may help.",
            )
        values = base64.b64encode(row.numpy().astype("<f4").tobytes()).decode() if is_base64 else row.tolist()
        data.append({"object": "embedding", "index": index, "embedding": values})
    return data
