"""From texts and conversations to token ids. Tokenizing works in threads: a long prompt must not stall the others.

Tokenizers leave Python's lock alone while they work, so the event loop goes on (measured: 2.3 MB of text take 1.6 s,
and the loop never waits longer than 25 ms).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import TemplateError

from quantkit.errors import InputError
from quantkit.runtime.server.errors import ApiError, CannotAnswer
from quantkit.runtime.server.schemas.messages import AssistantMessage, Message, ToolMessage, text_of
from quantkit.runtime.server.tools.definitions import template_knows_tools, turns_with_tools
from quantkit.runtime.server.tools.offered import OfferedTools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORKERS = 4
_RESERVED = frozenset({"messages", "conversation", "tools", "documents", "chat_template", "tokenize", "padding",
                       "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
                       "add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"})  # fmt: skip
Result = TypeVar("Result")
Json = dict[str, Any]


class Prompts:
    """The tokenizer of the model that is served. A folder without one takes and gives token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="tokenize")
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="tokenize aside")

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise InputError("this model folder has no tokenizer")
        return self._tokenizer

    async def encode(self, text: str, *, special: bool = True, aside: bool = False) -> list[int]:
        return await self.in_thread(lambda: self._encode(text, special=special), aside=aside)

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: OfferedTools | None = None,
        options: Json | None = None,
        aside: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, through the model's chat template."""
        turns = [as_turn(message) for message in messages]
        return await self.in_thread(lambda: self._encode_chat(turns, tools, options or {}), aside=aside)

    async def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, aside: bool = False
    ) -> str:  # fmt: skip
        return await self.in_thread(lambda: self._decode(token_ids, skip_special_tokens), aside=aside)

    def close(self) -> None:
        for threads in (self._threads, self._aside):
            threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[[], Result], *, aside: bool = False) -> Result:
        """For work that takes milliseconds or more. Prompts never wait for what is done `aside`."""
        return await asyncio.get_running_loop().run_in_executor(self._aside if aside else self._threads, work)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _encode_chat(self, turns: list[Json], tools: OfferedTools | None, options: Json) -> list[int]:
        if not self.tokenizer.chat_template:
            raise CannotAnswer("this model has no chat template; use /v1/completions")
        wrong = _RESERVED & options.keys()
        if wrong:
            raise ApiError(400, f"chat_template_kwargs cannot set {sorted(wrong)[0]}", param="chat_template_kwargs")
        offered = None if tools is None else list(tools.tools)
        if tools is not None and not template_knows_tools(self.tokenizer):
            turns, offered = turns_with_tools(turns, tools.tools, tools.style), None
        try:
            text = self.tokenizer.apply_chat_template(
                turns, tools=offered, tokenize=False, add_generation_prompt=True, **options
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            message = f"the model's chat template refuses these messages: {reason}"
            raise CannotAnswer(message, param="messages") from error
        return self._encode(text, special=False)  # the template has written them

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def as_turn(message: Message) -> Json:
    """A message as chat templates know it: plain text, arguments of calls as objects, no `developer`."""
    role = "system" if message.role == "developer" else message.role
    turn: Json = {"role": role, "content": text_of(message.content)}
    if isinstance(message, AssistantMessage) and message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if not isinstance(message, ToolMessage) and message.name is not None:
        turn["name"] = message.name
    return turn


def _arguments(text: str) -> Any:
    """Templates write them with `tojson`; a text that is no JSON stays as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
