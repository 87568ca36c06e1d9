"""Sizes from config.json, refused in one line where no model has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import InputError

Config = Mapping[str, Any]  # the contents of config.json
MOST_LAYERS = 10_000  # a file that says more would make lists that no memory holds


def size(config: Config, key: str, most: int | None = None, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: '{key}' is {value!r}, but must be a positive whole number")
    if most is not None and value > most:
        raise InputError(f"config.json: '{key}' is {value}, but no model has more than {most:,}")
    return value


@dataclass(frozen=True)
class LatentSizes:
    """Of latent attention: every head makes its key and value from one vector of a token, the latent.

    Beside the latent a token has one key that turns with its position, for all heads.
    """

    query_rank: int | None  # of the latent that queries are made from; None: they are made from hidden states
    rank: int  # of the latent that keys and values are made from
    plain: int  # of a head's query and key, what does not turn
    rope: int  # and what does
    value: int  # of a head
    interleaved: bool  # neighbours turn together; else each number with the one half a vector further

    @property
    def query(self) -> int:
        """Of one head."""
        return self.plain + self.rope

    @property
    def kept(self) -> int:
        """Of one token in a cache."""
        return self.rank + self.rope

    @property
    def expanded(self) -> int:
        """What a head's key and value, made of a latent, have together."""
        return self.plain + self.value

    @property
    def most_absorbed(self) -> float:
        """New tokens of a sequence up to which meeting latents takes fewer products than making keys and values of all
        of its context: rank x expanded for a token of that, against 2 rank - expanded more for each pair."""
        saved = 2 * self.rank - self.expanded
        return self.rank * self.expanded / saved if saved > 0 else float("inf")


def latent_sizes(config: Config) -> LatentSizes:
    """As config.json has them, or as transformers takes them where it is silent."""
    rope = size(config, "qk_rope_head_dim", default=64)
    if rope % 2:
        raise InputError(f"config.json: 'qk_rope_head_dim' is {rope}, but numbers turn in pairs")
    from_hidden = config.get("q_lora_rank", 1536) is None
    return LatentSizes(
        query_rank=None if from_hidden else size(config, "q_lora_rank", default=1536),
        rank=size(config, "kv_lora_rank", default=512),
        plain=size(config, "qk_nope_head_dim", default=128),
        rope=rope,
        value=size(config, "v_head_dim", default=128),
        interleaved=bool(config.get("rope_interleave", True)),
    )
