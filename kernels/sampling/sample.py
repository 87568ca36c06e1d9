"""The next token of every request, drawn on the GPU: greedy, temperature, top-k, top-p, min-p, a seed for each request.

Layout   logits [requests, vocab], rows of any stride; every parameter is a tensor [requests]:
         temperature float32, 0 for the largest logit (the first of equal ones), 1e-6 where it is between; top_k int32,
         0 for all; top_p float32, 1 for all; min_p float32, 0 for all; seed int64; step int64, the token's position
Returns  tokens int64 [requests] and their log-probabilities float32 [requests], those of the untruncated distribution
         at temperature 1; token -1 and NaN where a logit is NaN or +inf
Meaning  `reference.sampling`. Temperature first; then the k most probable tokens; of those, renormalised, the fewest
         whose mass reaches top_p; of those, the ones at least min_p times as probable as the most probable token. Of
         equally probable tokens at a cut-off the first ones stay, by index. At least one token always stays
Limits   those of `greedy.py`

A draw depends on nothing but the request's own logits, parameters, seed and step: probabilities are integers
(`weights.py`), so sums do not depend on their order, and the random number is Philox's on (seed, step). Seven launches:
two find the largest logit (`greedy.py`), three the cut-off (`cut_off.py`), two draw (`draw.py`).
"""

from __future__ import annotations

from torch import Tensor

from quantkit.kernels.sampling.cut_off import find_cut_off
from quantkit.kernels.sampling.draw import draw
from quantkit.kernels.sampling.greedy import check, choose_largest


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, step: Tensor,
    *, out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A token and its log-probability for every request; `out` holds both where they are given."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed, "step": step}
    result = check("sample", logits, out, given)
    if logits.shape[0]:
        tops, logsums = choose_largest(logits, result)
        cut_offs = find_cut_off(logits, tops, logsums, temperature, top_k, top_p)
        draw(logits, tops, logsums, temperature, min_p, seed, step, cut_offs, result)
    return result
