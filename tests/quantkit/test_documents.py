"""Collections of documents: folders of source code, and chats that offer tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from quantkit.calibration import Calibration
from quantkit.documents import document_ids
from quantkit.errors import InputError
from quantkit.eval.quality.windows import read_windows
from quantkit.reference import load_tokenizer

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}"
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}"
    "{% for call in turn.tool_calls or [] %}<call>{{ call.function.name }}{% endfor %}{% endfor %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("demo-draft")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three texts, and what is none or not for everybody."""
    texts = {f"part{number}.py": f"value = {number}\n" * 20 for number in range(3)}
    texts |= {"empty.py": "", ".hidden.py": "secret", ".git/config": "secret"}
    for name, text in texts.items():
        file = tmp_path / "src" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    (tmp_path / "src" / "model.bin").write_bytes(b"text\0" * 100)
    (tmp_path / "src" / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "src" / "again.py").symlink_to(tmp_path / "src" / "part0.py")
    (tmp_path / "src" / "around").symlink_to(tmp_path / "src")
    return tmp_path / "src"


def test_a_folder_is_its_texts_each_closed(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    shown = tokenizer.decode(document_ids(tokenizer, str(folder)))
    documents = [part for part in shown.split("<|endoftext|>") if part]
    assert sorted(documents) == [f"value = {number}\n" * 20 for number in range(3)]
    orders = {tuple(document_ids(tokenizer, str(folder), seed=seed).tolist()) for seed in range(8)}
    assert len(orders) > 1, "the seed orders the files"


def test_windows_of_a_folder_come_from_many_files(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Of more than is needed, not all is read."""
    for number in range(200):
        (folder / f"more{number}.py").write_text(f"more = {number}\n" * 20)
    data = Calibration(folder, samples=8, seq_len=32)
    tokens = data.tokens(tokenizer, 64)
    assert tokens.shape == (8, 32)
    named = {word for window in tokens for word in tokenizer.decode(window).split() if word.isdigit()}
    assert len(named) >= 5
    assert data.record(tokens)["source"] == "src"
    assert tokens.tolist() == data.tokens(tokenizer, 64).tolist()


def test_a_folder_without_texts_and_one_that_is_gone(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    for name, words in (("bare", "has 0 tokens, less than one window"), ("gone", "no text '")):
        with pytest.raises(InputError, match=words):
            Calibration(tmp_path / name, seq_len=8).tokens(tokenizer, 64)


def test_chats_bring_their_tools(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.chat_template = TEMPLATE
    turns = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "", "tool_calls": CALLS}]
    file = tmp_path / "calls.jsonl"
    file.write_text(json.dumps({"messages": turns, "tools": TOOLS}) + "\n" + json.dumps({"messages": turns[:1]}))
    shown = tokenizer.decode(document_ids(tokenizer, str(file)))
    assert shown == "<tool>weather<user>Rain?<assistant><call>weather<user>Rain?"
    file.write_text(json.dumps({"messages": turns, "tools": "weather"}))
    with pytest.raises(InputError, match="line 1: 'tools' is 'weather', but must be a list of objects"):
        document_ids(tokenizer, str(file))


def test_quality_is_measured_on_them_too(tokenizer: PreTrainedTokenizerBase, folder: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "One."}]}) * 1 + "\n")
    ids = tokenizer("<|user|>\nOne.<|end|>\n", add_special_tokens=False)["input_ids"]
    windows = read_windows(tokenizer, chats, window=len(ids))
    assert windows.ids.tolist() == [ids]
    assert windows.protocol.startswith(f"chats.jsonl: windows 1, window {len(ids)} tokens")
    assert "documents packed end to end with their own special tokens" in windows.protocol
    some = read_windows(tokenizer, folder, window=16, max_windows=2)
    assert some.ids.tolist() == read_windows(tokenizer, folder, window=16).ids[:2].tolist()
    assert some.text == "src"
