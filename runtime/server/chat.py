"""POST /v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from quantkit.runtime.sampling.structured_output import GuideSpec
from quantkit.runtime.server.calls import Call, Service
from quantkit.runtime.server.chat_writer import ChatWriter
from quantkit.runtime.server.errors import ApiError, documented
from quantkit.runtime.server.event_stream import start_stream
from quantkit.runtime.server.protocol import ChatRequest
from quantkit.runtime.server.protocol_answers import ChatCompletion, answer_or_stream
from quantkit.runtime.server.protocol_sampling import chat_params, guide_of
from quantkit.runtime.server.request_log import note
from quantkit.runtime.server.services import service_for
from quantkit.runtime.server.tool_plan import ToolPlan, plan_tools

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    response_class=JSONResponse,
    responses={**answer_or_stream(ChatCompletion), **documented(400, 401, 404, 408, 413, 429, 500, 503, 504)},
)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation."""
    service, model = service_for(request, body.model)
    params = chat_params(body)
    note(request.scope, stream=bool(body.stream))
    call = Call(service, request, "chatcmpl", model, params.n)
    try:
        guide, tools = await service.prompts.in_thread(lambda: _structure(service, body))
        encoding = service.prompts.encode_chat(body.messages, tools=tools, options=body.chat_template_kwargs)
        prompt = await call.watched(encoding)
        if service.settings.log_prompts:
            note(request.scope, prompt=await service.prompts.decode(prompt))
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


def _structure(service: Service, body: ChatRequest) -> tuple[GuideSpec | None, ToolPlan | None]:
    """What the answer must look like, and which tools it may call."""
    guide = guide_of(body)
    tools = plan_tools(body, service.settings.tool_parser, service.prompts.tokenizer)
    if tools is None or tools.guide is None:
        return guide, tools
    if guide is not None:
        raise ApiError(400, "tool_choice asks for a call, another field for structure; give one", param="tool_choice")
    return tools.guide, tools
