"""From prompts to what an engine is asked: token ids, and whether the answer is forced into its schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import InputError
from quantkit.eval.behaviour.prompts import BehaviourPrompt
from quantkit.eval.behaviour.thoughts import leaves_open, writes_thoughts
from quantkit.runtime.sampling.structured_output import GuideSpec
from quantkit.runtime.server.tools.definitions import template_knows_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Question:
    prompt: BehaviourPrompt
    tokens: list[int]
    forced: bool = False  # into the prompt's schema
    thinking: bool | None = None  # whether the prompt has begun a thought; None: the model writes none

    @property
    def guide(self) -> GuideSpec | None:
        return GuideSpec("json_schema", json.dumps(self.prompt.schema)) if self.forced else None


def questions_of(
    prompts: Sequence[BehaviourPrompt], tokenizer: PreTrainedTokenizerBase | None, *, need_template: bool = False
) -> list[Question]:
    """Prompts for JSON are asked twice, free and forced; those with tools only where the chat template knows tools.

    A model without a chat template is asked in plain text, unless `need_template` forbids that.
    """
    if tokenizer is None:
        raise InputError(
            "behaviour is measured on texts, and this model folder has no tokenizer; copy the original model's"
        )
    if need_template and not tokenizer.chat_template:
        raise InputError("this model has no chat template; without --chat-template it is asked in plain text")
    knows_tools = template_knows_tools(tokenizer)
    asked = [prompt for prompt in prompts if knows_tools or not prompt.tools]
    if not asked:
        raise InputError("all prompts have tools, which this model's chat template does not know; give others")
    questions = [_question(prompt, tokenizer) for prompt in asked]
    return questions + [Question(one.prompt, one.tokens, forced=True) for one in questions if one.prompt.kind == "json"]


def _question(prompt: BehaviourPrompt, tokenizer: PreTrainedTokenizerBase) -> Question:
    tokens = _tokens(prompt, tokenizer)
    thinking = leaves_open(str(tokenizer.decode(tokens))) if writes_thoughts(tokenizer) else None
    return Question(prompt, tokens, thinking=thinking)


def _tokens(prompt: BehaviourPrompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer(_plain_text(prompt))["input_ids"])
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(prompt.turns), tools=list(prompt.tools) or None, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"the chat template refuses the messages of line {prompt.line}: {reason}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _plain_text(prompt: BehaviourPrompt) -> str:
    """A conversation as a text that a model without a chat template may go on with."""
    turns = [f"{turn['role'].capitalize()}: {turn['content']}" for turn in prompt.turns]
    return "\n".join([*turns, "Assistant:"])
