"""What a server says about itself before it is measured."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from quantkit.errors import InputError, QuantkitError
from quantkit.eval.serve.answers import Failure, error_message
from quantkit.eval.serve.client import Client

_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Facts:
    """Empty or None where the server does not say."""

    model: str
    server: str = ""  # name and version
    device: str = ""
    format: str = ""
    vocab: int | None = None
    max_context: int | None = None


async def ask_facts(client: Client, url: str, model: str | None) -> Facts:
    """Raises where nobody answers, or where the model is not known and cannot be found out."""
    found = await _first_model(client, url, model)
    about = await _optional(client, "/version")
    told = about.get("info", about) if isinstance(about.get("info", about), dict) else about
    if not told.get("vocab"):
        status = await _optional(client, "/page/status")
        told = told | (status["info"] if isinstance(status.get("info"), dict) else {})
    version = about.get("version")
    name = about.get("name") or ("quantkit" if "vocab" in told else "")
    return Facts(
        model=model or str(found["id"]),
        server=f"{name} {version}".strip() if isinstance(version, str) else "",
        device=str(told.get("device") or ""),
        format=str(told.get("format") or ""),
        vocab=_positive(told.get("vocab")),
        max_context=_positive(found.get("max_model_len")) or _positive(told.get("max_context")),
    )


async def wait_until_rehearsed(client: Client) -> None:
    """Where a server says that it still prepares kernels and graphs between requests."""
    while (await _optional(client, "/ready")).get("left"):
        await asyncio.sleep(_LOOK_SECONDS)


async def tokenize(client: Client, model: str, text: str) -> list[int] | None:
    """The text's token ids; None where the server has no /tokenize."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        status, found = await client.json("POST", "/tokenize", body)
    except Failure:
        return None
    tokens = found.get("tokens") if status == 200 and isinstance(found, dict) else None
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
        return None
    return tokens


async def _first_model(client: Client, url: str, model: str | None) -> dict[str, Any]:
    """The entry of /v1/models for `model`, or the first one; an empty one where a named model is not listed."""
    try:
        status, body = await client.json("GET", "/v1/models")
    except Failure as failure:
        raise QuantkitError(
            f"no server answers at {url}: {failure.message}; start one with 'quantkit serve MODEL', or give its --url"
        ) from None
    if status in (401, 403):
        raise QuantkitError(f"{url} refuses the request: {error_message(body) or status}; give --api-key")
    listed = body.get("data") if isinstance(body, dict) else None
    models = [entry for entry in listed if isinstance(entry, dict) and entry.get("id")] if listed else []
    if model is not None:
        return next((entry for entry in models if entry["id"] == model), {})
    if not models:
        raise InputError(f"{url} lists no models (/v1/models: status {status}); give --model")
    return models[0]


async def _optional(client: Client, path: str) -> dict[str, Any]:
    try:
        status, body = await client.json("GET", path)
    except Failure:
        return {}
    return body if status == 200 and isinstance(body, dict) else {}


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
