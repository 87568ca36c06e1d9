"""POST /v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from quantkit.runtime.sampling.structured_output import GuideSpec
from quantkit.runtime.server.errors import ApiError, documented
from quantkit.runtime.server.logs import note
from quantkit.runtime.server.models.routing import Attempt, routed
from quantkit.runtime.server.routes.call import Call
from quantkit.runtime.server.routes.chat_writer import ChatWriter
from quantkit.runtime.server.routes.event_stream import start_stream
from quantkit.runtime.server.schemas.requests import ChatRequest
from quantkit.runtime.server.schemas.responses import ChatCompletion, answer_or_stream
from quantkit.runtime.server.schemas.sampling import chat_params, guide_of
from quantkit.runtime.server.tools.offered import OfferedTools, offered_tools

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    response_class=JSONResponse,
    responses={**answer_or_stream(ChatCompletion), **documented(400, 401, 404, 408, 413, 429, 500, 503, 504)},
)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation."""
    return await routed(request, body, lambda attempt: _answer(attempt, body, request))


async def _answer(attempt: Attempt, body: ChatRequest, request: Request) -> Response:
    model = attempt.model
    params = chat_params(body, model.settings.watermark_key)
    note(request.scope, stream=bool(body.stream))
    call = Call(attempt, request, "chatcmpl", params.n)
    try:
        guide, tools = await model.prompts.in_thread(lambda: _structure(attempt, body))
        encoding = model.prompts.encode_chat(body.messages, tools=tools, options=body.chat_template_kwargs)
        prompt = await call.watched(encoding)
        if model.settings.log_prompts:
            note(request.scope, prompt=await model.prompts.decode(prompt))
        call.submit([prompt], params, priority=body.priority or 0, guide=guide)
        writer = ChatWriter(call, body, tools)
        if body.stream:
            return await start_stream(call, writer.chunks())
        content = await call.watched(writer.whole())
    except BaseException as error:
        call.close(error)
        raise
    call.close()
    return JSONResponse(content)


def _structure(attempt: Attempt, body: ChatRequest) -> tuple[GuideSpec | None, OfferedTools | None]:
    """What the answer must look like, and which tools it may call."""
    guide, model = guide_of(body), attempt.model
    tools = offered_tools(body, model.settings.tool_parser, model.prompts.tokenizer)
    attempt.require(tools is None or tools.parser.syntax is not None, "calls no tools, by its tool_parser")
    if tools is None or tools.guide is None:
        return guide, tools
    if guide is not None:
        raise ApiError(400, "tool_choice asks for a call, another field for structure; give one", param="tool_choice")
    return tools.guide, tools
