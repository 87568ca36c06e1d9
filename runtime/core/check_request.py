"""What an engine refuses of a request before it takes it; a server asks beforehand, without torch."""

from __future__ import annotations

from quantkit.errors import InputError
from quantkit.runtime.core.sampling_params import SamplingParams


def check_request(prompt: list[int], params: SamplingParams, max_context: int, vocab: int) -> None:
    """Refuses what an engine of these sizes cannot answer."""
    if not prompt:
        raise InputError("the prompt is empty; give at least one token")
    if len(prompt) >= max_context:
        raise InputError(
            f"the prompt has {len(prompt)} tokens, but contexts end at {max_context}, the answer included; shorten it"
        )
    for token in prompt:
        if type(token) is not int or not 0 <= token < vocab:
            raise InputError(f"token id {token!r} is not in the vocabulary of {vocab} tokens")
    params.check_vocabulary(vocab)
