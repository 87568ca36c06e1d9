"""/tokenize and /detokenize: texts and token ids, as the model sees them."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request

from quantkit.runtime.server.errors import ApiError, documented
from quantkit.runtime.server.models.registry import find_model
from quantkit.runtime.server.models.served_model import ServedModel
from quantkit.runtime.server.routes.call import while_connected
from quantkit.runtime.server.schemas.requests import DetokenizeRequest, TokenizeChat, TokenizeText
from quantkit.runtime.server.schemas.responses import DetokenizedText, Tokens

router = APIRouter()
Result = TypeVar("Result")


@router.post("/tokenize", tags=["tokens"], responses=documented(400, 401, 404, 408, 413, 429, 503))
async def tokenize(body: TokenizeText | TokenizeChat, request: Request) -> Tokens:
    """Token ids of a text, or of a conversation as the model sees it."""
    model, _ = find_model(request, body.model)
    if isinstance(body, TokenizeChat):
        work = model.prompts.encode_chat(body.messages, aside=True)
    else:
        work = model.prompts.encode(body.prompt, special=body.add_special_tokens is not False, aside=True)
    tokens = await _admitted(model, request, work)
    return Tokens(tokens=tokens, count=len(tokens), max_model_len=model.info.max_context)


@router.post("/detokenize", tags=["tokens"], responses=documented(400, 401, 404, 408, 413, 429, 503))
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizedText:
    """The text of token ids, special tokens included."""
    model, _ = find_model(request, body.model)
    outside = [token for token in body.tokens if token >= model.info.vocab]
    if outside:
        message = f"tokens names {outside[0]}, but this model's go from 0 to {model.info.vocab - 1}"
        raise ApiError(400, message, param="tokens", code="invalid_value")
    work = model.prompts.decode(body.tokens, aside=True)
    return DetokenizedText(prompt=await _admitted(model, request, work))


async def _admitted(model: ServedModel, request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Waits in a queue of its own, as long as the client does."""
    try:
        ticket = model.tokenizing.enter(1)
    except ApiError:
        work.close()
        raise
    try:
        return await while_connected(request, work)
    finally:
        ticket.leave()
