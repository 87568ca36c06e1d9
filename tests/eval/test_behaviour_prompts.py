"""Files of prompts: what ships, what a user may write, and what is refused, with the number of the line."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from quantkit.errors import InputError
from quantkit.eval.behaviour.prompts import read_prompts
from quantkit.eval.behaviour.questions import questions_of
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.sources import model_folder

USER = {"role": "user", "content": "Hello"}
GOOD: dict[str, Any] = {"messages": [USER]}
TOOL = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}}


def written(folder: Path, *lines: object) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_the_prompts_that_ship() -> None:
    prompts = read_prompts()
    assert Counter(prompt.kind for prompt in prompts) == {"chat": 40, "json": 20, "tools": 20}
    texts = [prompt.turns[-1]["content"] for prompt in prompts]
    assert len(set(texts)) == len(texts)
    assert all(turn["role"] != "system" for prompt in prompts for turn in prompt.turns), "some templates refuse it"
    assert max(map(len, texts)) < 500
    for prompt in prompts:
        if prompt.schema is not None:
            assert json.dumps(prompt.schema) in prompt.turns[-1]["content"], "a model is told what it is judged by"


def test_lines_of_a_user(tmp_path: Path) -> None:
    told = [{"role": "developer", "content": "Be brief."}, USER]
    called = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "ping", "arguments": "{}"}}]}
    result = {"role": "tool", "content": "pong", "tool_call_id": "a"}
    after_call = {"messages": [USER, called, result], "tools": [TOOL]}
    file = written(tmp_path, {"messages": told}, "", GOOD | {"schema": {"type": "integer"}}, after_call)
    prompts = read_prompts(file)
    assert [(prompt.line, prompt.kind) for prompt in prompts] == [(1, "chat"), (3, "json"), (4, "tools")]
    assert prompts[0].turns[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": [', "no JSON"),
        ([GOOD], "is a JSON list, but must be an object"),
        ({"message": [USER]}, "no key 'message'; did you mean 'messages'"),
        ({"schema": {}}, "'messages' is missing"),
        ({"messages": []}, "must end with a message of the user"),
        ({"messages": "Hello"}, "'messages' is wrong"),
        ({"messages": [USER, {"role": "assistant", "content": "Hi"}]}, "must end with a message of the user"),
        ({"messages": [{"role": "user"}]}, r"'messages\[0\].user.content' is wrong: Field required"),
        ({"messages": [{"role": "bot", "content": "Hi"}]}, r"'messages\[0\]' is wrong"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
        (GOOD | {"schema": "integer"}, "'schema' is 'integer', but must be a JSON schema"),
        (GOOD | {"schema": {"type": "whole"}}, "'schema' is no JSON schema: 'whole'"),
        (GOOD | {"schema": {"$ref": "https://example.invalid/a"}}, "the JSON schema cannot be used"),
        (GOOD | {"tools": [{"type": "function"}]}, r"tools\[0\].function is None"),
        (GOOD | {"tools": [TOOL, TOOL]}, r"tools\[1\].function.name is 'ping', which is"),
        (GOOD | {"tools": [{"function": {"name": "f", "parameters": {"required": "a"}}}]},
         r"tools\[0\].function.parameters: 'schema' is no JSON schema"),
        (GOOD | {"tools": [TOOL], "schema": {}}, "'schema' and 'tools' ask for two kinds of answer"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(line: object, words: str, tmp_path: Path) -> None:
    file = written(tmp_path, GOOD, line)
    with pytest.raises(InputError, match=f"line 2 of .*prompts.jsonl: .*{words}") as error:
        read_prompts(file)
    assert "\n" not in str(error.value)


def test_a_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no prompts; a line is"):
        read_prompts(written(tmp_path, "", " "))
    with pytest.raises(InputError, match=r"cannot read the prompts in .*gone\.jsonl: No such file"):
        read_prompts(tmp_path / "gone.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9")
    with pytest.raises(InputError, match="no UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")


def test_questions_by_what_the_tokenizer_knows(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD, GOOD | {"schema": {"type": "integer"}}, GOOD | {"tools": [TOOL]})
    prompts, tokenizer = read_prompts(file), load_tokenizer(model_folder("demo-draft"))
    assert tokenizer is not None

    def asked(**how: bool) -> list[tuple[int, bool]]:
        return [(one.prompt.line, one.forced) for one in questions_of(prompts, tokenizer, **how)]

    def text() -> str:
        return str(tokenizer.decode(questions_of(prompts, tokenizer)[0].tokens))

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|system|> $A", special_tokens=[("<|system|>", 3)])
    assert asked(need_template=True) == [(1, False), (2, False), (2, True)]
    assert text() == "<|user|>\nHello<|end|>\n<|assistant|>\n"
    with pytest.raises(InputError, match="all prompts have tools"):
        questions_of(prompts[2:], tokenizer)
    tokenizer.chat_template = "{% if tools %}{{ tools[0].function.name }} {% endif %}{{ messages[0].content }}"
    assert asked() == [(1, False), (2, False), (3, False), (2, True)]
    assert tokenizer.decode(questions_of(prompts, tokenizer)[2].tokens) == "ping Hello"
    for template, thinking in (
        ("{{ messages[0].content }}", None),
        ("{{ messages[0].content.split('</think>')[-1] }}", False),
        ("{{ messages[0].content }}<think></think>", False),
        ("{{ messages[0].content.split('</think>')[-1] }}<think>\n", True),
    ):
        tokenizer.chat_template = template
        assert questions_of(prompts[:1], tokenizer)[0].thinking is thinking
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(InputError, match="the chat template refuses the messages of line 1: no users here"):
        asked()
    tokenizer.chat_template = None
    assert text() == "<|system|>User: Hello\nAssistant:", "with the first token of a text, which templates write"
    with pytest.raises(InputError, match="no chat template; without --chat-template it is asked in plain text"):
        asked(need_template=True)
    with pytest.raises(InputError, match="no tokenizer"):
        questions_of(prompts, None)
