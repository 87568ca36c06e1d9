"""The cache of a model if it had another kind of attention: what a designer chose, and what that saves.

MHA keeps keys and values of every head, GQA those of some KV heads, MQA of one. Latent attention (MLA) keeps a latent
of 4 heads' width and half a head's of a turned key for all of them, as DeepSeek-V2 has it (arXiv 2405.04434).
Only the cache is asked: such a model would have to be trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quantkit.eval.plan.model import Cache, Decoder
from quantkit.eval.plan.question import Question

_GROUP = 4  # query heads of a KV head, where the model itself has no groups


@dataclass(frozen=True)
class KindOfAttention:
    """One kind of cache; bytes and requests are those of a question."""

    cache: Cache
    own: bool  # whether the model is like this
    bytes_per_token: int
    requests: int  # of the question's context that fit into the room for the cache

    def to_dict(self) -> dict[str, object]:
        return {
            "kind": self.cache.kind,
            "own": self.own,
            "numbers_per_layer": self.cache.per_layer,
            "formula": self.cache.formula,
            "bytes_per_token": self.bytes_per_token,
            "requests": self.requests,
        }


def kinds_of_attention(decoder: Decoder, cache: Cache, question: Question, room: int) -> tuple[KindOfAttention, ...]:
    """`room` is what a GPU has left for the cache, in bytes. All in 16 bits, so that they compare."""
    plain = replace(question, kv_dtype="auto")
    found = []
    for one in _caches(decoder, cache):
        size = int(one.per_token * plain.itemsize(one))
        found.append(KindOfAttention(one, one.kind == cache.kind, size, max(0, room) // (size * question.context)))
    return tuple(found)


def _caches(decoder: Decoder, cache: Cache) -> Iterator[Cache]:
    config = decoder.config
    heads, width = config.heads, config.head_dim if config.latent is None else config.latent.value
    groups = config.kv_heads if cache.kind == "GQA" else max(1, heads // _GROUP)
    for kind, kept in (("MHA", heads), ("GQA", groups), ("MQA", 1)):
        formula = f"2 x {kept} kv heads x {width}"
        yield cache if kind == cache.kind else Cache(kind, 2 * kept * width, width, cache.windows, formula)
    latent = 4 * width + width // 2
    formula = f"a latent of {4 * width} and a key of {width // 2}"
    yield cache if cache.kind == "MLA" else Cache("MLA", latent, latent, cache.windows, formula)
