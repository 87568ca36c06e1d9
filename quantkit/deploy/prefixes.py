"""Which replica should answer: the one that holds a request's beginning in its cache, unless it is much busier.

A request's text is cut into blocks, and each block's hash covers everything before it, so that equal hashes mean equal
beginnings. A table remembers which replica saw which block. It guesses what is in a replica's cache: a wrong guess
costs time, never an answer.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BLOCK_CHARACTERS = 128
MOST_BLOCKS = 256  # of one request: what comes later cannot change the choice much
MOST_REMEMBERED = 100_000  # blocks, of all requests
Prefix = tuple[int, ...]


def prefix_of(body: Mapping[str, Any]) -> Prefix:
    """The blocks of a request; none for one that is shorter than a block, or that has no text."""
    text = _text(body)
    digest, blocks = b"", []
    for start in range(0, min(len(text), BLOCK_CHARACTERS * MOST_BLOCKS) - BLOCK_CHARACTERS + 1, BLOCK_CHARACTERS):
        block = text[start : start + BLOCK_CHARACTERS].encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(digest + block, digest_size=8).digest()
        blocks.append(int.from_bytes(digest, "big"))
    return tuple(blocks)


def _text(body: Mapping[str, Any]) -> str:
    """What the model will read, in its order; only equality of beginnings matters."""
    messages = body.get("messages")
    if isinstance(messages, list):
        offered = json.dumps(body.get("tools"), sort_keys=True, default=str) if body.get("tools") else ""
        return offered + "".join(_turn(message) for message in messages)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # of several prompts, the first one decides
    if isinstance(prompt, list):
        return ",".join(map(str, prompt[: BLOCK_CHARACTERS * MOST_BLOCKS]))
    return prompt if isinstance(prompt, str) else ""


def _turn(message: Any) -> str:
    if not isinstance(message, dict):
        return ""
    content = message.get("content")
    if not isinstance(content, str):
        content = json.dumps(content, sort_keys=True, default=str)
    return f"\0{message.get('role')}\0{content}"


class PrefixTable:
    """Which replicas saw which blocks, the newest of them."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._seen: OrderedDict[int, dict[str, None]] = OrderedDict()

    def record(self, prefix: Prefix, replica: str) -> None:
        for block in prefix:
            self._seen.setdefault(block, {})[replica] = None
            self._seen.move_to_end(block)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def matched(self, prefix: Prefix, replica: str) -> int:
        """Leading blocks that the replica saw."""
        for number, block in enumerate(prefix):
            if replica not in self._seen.get(block, ()):
                return number
        return len(prefix)

    def keep_only(self, replicas: Iterable[str]) -> None:
        """Forgets replicas that are gone."""
        alive = set(replicas)
        for block in [block for block, holders in self._seen.items() if not holders.keys() <= alive]:
            left = {replica: None for replica in self._seen[block] if replica in alive}
            if left:
                self._seen[block] = left
            else:
                del self._seen[block]

    def __len__(self) -> int:
        return len(self._seen)


def preferred(
    table: PrefixTable, prefix: Prefix, loads: Mapping[str, float], margin: float, avoid: Sequence[str] = ()
) -> list[str]:
    """All replicas, the best first. `loads` are their open requests; those to `avoid` come last.

    Among equals, a hash of beginning and replica decides, so that several fronts choose alike without talking.
    """
    first = prefix[0] if prefix else None
    ranked = sorted(loads, key=lambda name: (name in avoid, loads[name], _draw(first, name)))
    if not ranked:
        return []
    usable = [name for name in ranked if name not in avoid]
    if not usable:
        return ranked
    holder = max(usable, key=lambda name: table.matched(prefix, name))  # the least busy of equals
    if table.matched(prefix, holder) and loads[holder] - loads[usable[0]] <= margin:
        ranked.remove(holder)
        ranked.insert(0, holder)
    return ranked


def _draw(first: int | None, replica: str) -> bytes:
    return hashlib.blake2b(f"{first}/{replica}".encode(), digest_size=8).digest()
