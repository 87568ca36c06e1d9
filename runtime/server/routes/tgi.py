"""TGI's routes, for clients of text-generation-inference: /generate, /generate_stream, /info, and POST / for either."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from quantkit.runtime.server.errors import documented
from quantkit.runtime.server.logs import note
from quantkit.runtime.server.models.prompts import WORKERS
from quantkit.runtime.server.models.registry import find_model
from quantkit.runtime.server.models.routing import attempt_at
from quantkit.runtime.server.routes.call import Call
from quantkit.runtime.server.routes.event_stream import start_stream
from quantkit.runtime.server.routes.tgi_writer import TgiWriter
from quantkit.runtime.server.schemas.responses import answer_or_stream
from quantkit.runtime.server.schemas.tgi import (
    Generated,
    Info,
    StreamEvent,
    TgiEitherRequest,
    TgiRequest,
    tgi_guide,
    tgi_params,
)
from quantkit.runtime.server.version import package_version

router = APIRouter(tags=["TGI"])
_ERRORS = documented(401, 408, 413, 422, 429, 500, 503, 504, tgi=True)
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"model": StreamEvent, "description": "An event for each token", "content": {"text/event-stream": {}}}
}


@router.post("/generate", response_class=JSONResponse, responses={200: {"model": Generated}, **_ERRORS})
async def generate(body: TgiRequest, request: Request) -> Response:
    """Continues a text."""
    return await _answer(body, request, stream=False)


@router.post("/generate_stream", response_class=Response, responses={**_EVENTS, **_ERRORS})
async def generate_stream(body: TgiRequest, request: Request) -> Response:
    """Continues a text, token by token."""
    return await _answer(body, request, stream=True)


@router.post("/", response_class=JSONResponse, responses={**answer_or_stream(Generated), **_ERRORS})
async def generate_either(body: TgiEitherRequest, request: Request) -> Response:
    """Continues a text, as `stream` says; a whole answer is in a list."""
    return await _answer(body, request, stream=bool(body.stream), in_list=True)


@router.get("/info", responses=documented(401, 503, tgi=True))
async def info(request: Request) -> Info:
    """What is served, and its limits."""
    model, name = find_model(request, None)
    found, settings = model.info, model.settings
    return Info(
        model_id=name,
        model_dtype=f"torch.{found.dtype}",
        model_device_type=found.device.partition(":")[0],
        max_concurrent_requests=found.max_sequences + settings.max_queue,
        max_input_tokens=found.max_context - 1,
        max_total_tokens=found.max_context,
        max_batch_total_tokens=found.kv_tokens,
        validation_workers=WORKERS,
        version=package_version(),
    )


async def _answer(body: TgiRequest, request: Request, *, stream: bool, in_list: bool = False) -> Response:
    attempt = attempt_at(request, None)
    model = attempt.model
    params = tgi_params(body.parameters, model.settings.watermark_key, stream=stream)
    note(request.scope, stream=stream)
    call = Call(attempt, request, "tgi", params.n)
    try:
        guide = await model.prompts.in_thread(lambda: tgi_guide(body.parameters))
        prompt = (await call.watched(model.prompts.encode(body.inputs)))[-(body.parameters.truncate or 0) :]
        if model.settings.log_prompts:
            note(request.scope, prompt=await model.prompts.decode(prompt))
        call.submit([prompt], params, guide=guide, one_by_one=stream)
        writer = TgiWriter(call, body)
        if stream:
            return await start_stream(call, writer.chunks(), last=b"")
        await call.watched(writer.gather())
        found = await model.prompts.in_thread(writer.whole)  # long with a prompt's log-probabilities
    except BaseException as error:
        call.close(error)
        raise
    call.close()
    return JSONResponse([found] if in_list else found)
