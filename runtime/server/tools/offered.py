"""Which tools a request offers to the model, and how their calls are found in its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.runtime.sampling.structured_output import GuideSpec
from quantkit.runtime.server.schemas.messages import NamedChoice
from quantkit.runtime.server.schemas.requests import ChatRequest
from quantkit.runtime.server.tools.definitions import check_tools, guide_for
from quantkit.runtime.server.tools.parsers import ToolParser, ToolStream, tool_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class OfferedTools:
    tools: Sequence[dict[str, Any]]  # as in the request
    parser: ToolParser
    guide: GuideSpec | None  # where a call is asked for

    @property
    def style(self) -> str:
        """How calls are written."""
        return self.parser.syntax.name if self.parser.syntax else "none"

    def stream(self) -> ToolStream:
        """Finds the calls of one answer."""
        return self.parser.stream(eager=self.guide is not None)


def offered_tools(body: ChatRequest, parser: str, tokenizer: PreTrainedTokenizerBase) -> OfferedTools | None:
    """None where the model is not to call anything."""
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedChoice) else body.tool_choice
    check_tools(tools, choice)
    if not tools or choice == "none":
        return None
    names = {tool["function"]["name"] for tool in tools}
    plan = OfferedTools(tools, tool_parser(parser, tokenizer, names), None)
    guide = guide_for(tools, choice, body.parallel_tool_calls is not False, plan.style)
    return plan if guide is None else OfferedTools(tools, plan.parser, guide)
