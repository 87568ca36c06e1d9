"""Sampling against its meaning by sorting, and draws against the exact distribution."""

import math
from collections.abc import Sequence

import pytest
import torch

from pairwise import cover
from quantkit.errors import InputError
from quantkit.kernels.reference import sampling as reference
from quantkit.kernels.sampling import cut_off, weights
from quantkit.kernels.sampling.greedy import LARGEST_VOCAB, choose_largest, greedy
from quantkit.kernels.sampling.sample import sample

pytestmark = pytest.mark.kernel

Parameters = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter, which takes as long for masked tokens, a quarter of the size suffices."""
    if device == "cpu":
        monkeypatch.setattr(weights, "PART", 1024)


def make(requests: int, vocab: int, device: str, *, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 10007 + vocab)
    return (spread * torch.randn(requests, vocab, generator=generator)).to(device)


def settings(
    requests: int,
    device: str,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    step: int | Sequence[int] | None = None,
) -> Parameters:
    def column(value: float | Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype).broadcast_to(requests).contiguous().to(device)

    return {
        "temperature": column(temperature, torch.float32),
        "top_k": column(top_k, torch.int32),
        "top_p": column(top_p, torch.float32),
        "min_p": column(min_p, torch.float32),
        "seed": column(seed, torch.int64),
        "step": column(range(requests) if step is None else step, torch.int64),
    }


def allowed(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """The tokens that the kernel may draw, from the cut-off that its search found."""
    shape = logits.shape[:1]
    temperature, top_k, top_p = (parameters[name] for name in ("temperature", "top_k", "top_p"))
    tokens = torch.empty(shape, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(shape, dtype=torch.float32, device=logits.device)
    largest = choose_largest(logits, (tokens, logprobs))
    state = cut_off.find_cut_off(logits, *largest, temperature, top_k, top_p).state
    cut, spare = state[:, cut_off.CUT.value, None], state[:, cut_off.SPARE.value, None]
    distance = reference.distances(logits, temperature)
    ties = distance == cut
    stays = (distance < cut) | (ties & (ties.cumsum(-1) <= spare))
    weight = reference.weights(distance)
    return stays & (weight > 0) & (weight >= (parameters["min_p"][:, None] * reference.ONE).long())


CASES = {
    "top-k": {"top_k": [1, 2, 7, 40, 1000]},
    "top-p": {"top_p": [1e-6, 0.1, 0.5, 0.9, 0.999]},
    "both": {"top_k": [1, 3, 50, 50, 100], "top_p": [0.9, 0.5, 0.95, 0.01, 0.999]},
    "min-p": {"min_p": [0.0, 0.01, 0.2, 1.0, 0.5], "top_k": [0, 0, 5, 9, 0], "top_p": [1.0, 0.9, 1.0, 0.8, 1.0]},
    "heat": {"temperature": [1e-4, 0.1, 0.7, 2.0, 100.0], "top_p": 0.8, "top_k": [0, 20, 0, 20, 0]},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vocab", [5, 777])
def test_allowed_tokens_as_by_sorting(vocab: int, case: str, device: str) -> None:
    logits, parameters = make(5, vocab, device), settings(5, device, **CASES[case])
    expected = reference.allowed(logits, *list(parameters.values())[:4])
    assert torch.equal(allowed(logits, parameters), expected)
    assert bool(expected.any(-1).all())


def test_several_parts_and_odd_rows(device: str) -> None:
    logits = make(3, 2 * weights.PART + 4, device)[:, 1:-2]  # an odd width, rows further apart than that
    parameters = settings(3, device, top_k=[0, 50, 1500], top_p=[0.7, 0.9, 0.99], temperature=[2.0, 1.0, 3.0])
    assert torch.equal(allowed(logits, parameters), reference.allowed(logits, *list(parameters.values())[:4]))
    assert_same_draws(logits, parameters)


@pytest.mark.parametrize("vocab", [262_208, LARGEST_VOCAB])
def test_large_vocabularies(vocab: int, device: str) -> None:
    """Gemma 3's, which no power of two divides, and the largest."""
    logits = make(1, vocab, device)
    logits[0, -1] = logits.max() + 1.0
    token, logprob = greedy(logits)
    assert int(token) == vocab - 1
    torch.testing.assert_close(logprob.double(), logits.double().log_softmax(-1)[:, -1], rtol=1e-5, atol=1e-5)
    if device == "cuda":  # under the interpreter it takes 12 s
        parameters = settings(1, device, top_p=0.9)
        assert torch.equal(allowed(logits, parameters), reference.allowed(logits, *list(parameters.values())[:4]))
        assert torch.equal(sample(logits, **parameters)[0], reference.sample(logits, **parameters)[0])


def test_meaning_as_in_float64(device: str) -> None:
    """The meaning itself, against a plain reading of its words."""
    logits, parameters = (
        make(6, 500, "cpu"),
        settings(6, "cpu", top_k=[0, 30, 0, 30, 0, 0], min_p=[0, 0, 0, 0, 0.02, 0.1]),
    )
    parameters["top_p"] = torch.tensor([0.9, 1.0, 0.3, 0.9, 1.0, 0.95])
    parameters["temperature"] = torch.tensor([1.0, 0.5, 2.0, 0.8, 1.0, 1.3])
    result = reference.allowed(logits, *list(parameters.values())[:4])
    for i in range(6):
        k, p, least, heat = (float(parameters[name][i]) for name in ("top_k", "top_p", "min_p", "temperature"))
        probability, order = (logits[i].double() / heat).softmax(-1).sort(descending=True)
        kept = probability[: int(k) or None]
        kept = kept / kept.sum()
        kept = kept[: int((kept.cumsum(0) - kept < p).sum())]
        kept = kept[kept >= least * kept[0]]
        assert result[i].nonzero()[:, 0].tolist() == sorted(order[: len(kept)].tolist())


@pytest.mark.long
def test_many_tokens_in_the_list(device: str) -> None:
    """More than settling and weighing take at a time, from several parts; float32's neighbours, ties, all equal."""
    logits = make(5, 5 * weights.PART + 300, device, spread=0.01)
    logits[1] = logits[1].mul(300).round() / 300
    logits[2, ::7] = 0.02
    logits[4] = 0.0
    cuts = {"top_p": [0.5, 0.3, 1.0, 0.9, 0.7], "top_k": [0, 0, 4000, 4500, 0]}
    parameters = settings(5, device, **cuts, temperature=[1.0, 1.0, 3.0, 0.01, 1.0])
    assert torch.equal(allowed(logits, parameters), reference.allowed(logits, *list(parameters.values())[:4]))
    assert_same_draws(logits, parameters)
    assert_same_draws(logits, parameters | {"min_p": torch.full_like(parameters["min_p"], 0.99)})


def test_window_holds_the_cut_off(device: str) -> None:
    """A row for every pair of spread, top-p and temperature."""
    rows = cover((0.0, 0.5, 8.0), (1e-7, 0.3, 0.9, 0.9999, 1 - 2.0**-24), (0.01, 0.7, 1.0, 50.0))
    logits = torch.cat([make(1, 900, device, spread=row[0], seed=number) for number, row in enumerate(rows)])
    parameters = settings(len(rows), device, top_p=[row[1] for row in rows], temperature=[row[2] for row in rows])
    assert torch.equal(allowed(logits, parameters), reference.allowed(logits, *list(parameters.values())[:4]))


def test_ties_stay_in_the_order_of_indices(device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 2.0, 1.0, 1.0]] * 4, device=device)
    parameters = settings(4, device, top_k=[1, 4, 0, 4], top_p=[1.0, 1.0, 0.75, 0.9])
    result = allowed(logits, parameters)
    assert result[0].nonzero()[:, 0].tolist() == [1]
    assert result[1].nonzero()[:, 0].tolist() == [1, 2, 3, 4]
    # masses 1, 1, then e**-1 four times and e**-2: 75% of 3.6 are 2.7 and need two of the four
    assert result[2].nonzero()[:, 0].tolist() == [1, 2, 3, 4]
    assert result[3].nonzero()[:, 0].tolist() == [1, 2, 3, 4]
    assert torch.equal(result, reference.allowed(logits, *list(parameters.values())[:4]))


def test_search_ends_on_hard_rows(device: str) -> None:
    """All equal; two values; neighbours in float32; all but few tokens banned."""
    logits = torch.zeros(4, 300, device=device)
    logits[1, ::3] = 1.0
    logits[2] = 1.0 + torch.arange(300, device=device) * 2.0**-23
    logits[3] = -math.inf
    logits[3, [17, 200]] = torch.tensor([1.0, 0.5], device=device)
    parameters = settings(4, device, top_k=[100, 150, 7, 9], top_p=[0.5, 0.99, 0.6, 0.99])
    assert torch.equal(allowed(logits, parameters), reference.allowed(logits, *list(parameters.values())[:4]))


def assert_same_draws(logits: torch.Tensor, parameters: Parameters) -> None:
    tokens, logprobs = sample(logits, **parameters)
    expected_tokens, expected_logprobs = reference.sample(logits, **parameters)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_draws_as_in_torch(dtype: torch.dtype, device: str) -> None:
    logits = make(8, 333, device).to(dtype)
    seeds = [0, 1, -1, 2**62, 5, 6, 7, 8]
    parameters = settings(
        8,
        device,
        temperature=[0.0, 0.3, 0.7, 1.0, 1.0, 1.5, 1.0, 1.0],
        top_k=[5, 0, 20, 0, 40, 0, 0, 400],
        top_p=[0.5, 1.0, 0.95, 0.9, 0.8, 0.9, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.05, 0.1, 0.02, 0.0],
        seed=seeds,
        step=[0, 1, 2, 3, 2**33, 5, 6, 7],
    )
    assert_same_draws(logits, parameters)


def chi_square(tokens: torch.Tensor, probability: torch.Tensor) -> None:
    """Fails for one right sampler in ten thousand; the seeds are fixed."""
    counts = torch.bincount(tokens.cpu(), minlength=len(probability)).double()
    expected = probability.double().cpu() * len(tokens)
    assert bool((counts[expected == 0] == 0).all())
    seen = expected > 0
    statistic = float(((counts - expected)[seen].square() / expected[seen]).sum())
    freedom = int(seen.sum()) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty
    assert statistic < bound, f"{statistic:.1f} with {freedom} degrees of freedom"


@pytest.mark.parametrize("case", [{}, {"top_k": 6}, {"top_p": 0.8}, {"temperature": 1.7, "top_k": 9, "top_p": 0.9}])
def test_draws_follow_the_distribution(case: dict[str, float], device: str) -> None:
    """20,000 draws: by the kernel on a GPU, by its meaning on a CPU, where a few show that both draw the same."""
    logits = make(1, 12, device, spread=1.0)
    one = settings(1, device, **case)
    stays = reference.allowed(logits, *list(one.values())[:4])
    scaled = logits.double() / one["temperature"].double()
    probability = torch.where(stays, scaled, -math.inf).softmax(-1)[0]
    for steps, seeds in ((20000, 1), (1, 20000)):  # one request's tokens, and the first tokens of many requests
        count = steps * seeds
        numbers = list(range(count))
        parameters = settings(count, device, **case, seed=numbers if seeds > 1 else 7, step=numbers if steps > 1 else 7)
        rows = logits.expand(count, -1)
        draw = sample if device == "cuda" else reference.sample
        chi_square(draw(rows, **parameters)[0], probability)
        few = {name: value[:4] for name, value in parameters.items()}
        assert_same_draws(rows[:4], few)


def test_the_rest_of_the_batch_does_not_matter(device: str) -> None:
    row = make(1, 200, device)
    alone = settings(1, device, top_p=0.95, temperature=1.3, seed=11, step=5)
    token, logprob = sample(row, **alone)
    others = make(4, 200, device, seed=1)
    others[2] = row[0]
    batch = settings(
        4,
        device,
        temperature=[0.0, 2.0, 1.3, 0.5],
        top_k=[3, 0, 0, 9],
        top_p=[0.3, 1.0, 0.95, 0.8],
        seed=[1, 2, 11, 4],
        step=[9, 9, 5, 9],
    )
    tokens, logprobs = sample(others, **batch)
    assert int(tokens[2]) == int(token)
    assert float(logprobs[2]) == float(logprob)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 100, 4099])
def test_greedy_is_the_first_largest(vocab: int, dtype: torch.dtype, device: str) -> None:
    logits = make(3, vocab, device).to(dtype)
    logits[1, vocab // 3 :: 7] = 50.0  # ties, also between the parts of a row
    tokens, logprobs = greedy(logits)
    assert tokens.tolist() == [int(row.float().argmax()) for row in logits.cpu().float()]
    expected = logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(sample(logits, **settings(3, device, temperature=0.0, top_p=0.5))[0], tokens)


@pytest.mark.parametrize("case", [{"temperature": 1e-9}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"min_p": 2.0}])
def test_where_only_the_largest_stays(case: dict[str, float], device: str) -> None:
    logits = make(3, 150, device)
    assert torch.equal(sample(logits, **settings(3, device, **case))[0], logits.argmax(-1))


def test_banned_tokens(device: str) -> None:
    logits = make(4, 120, device)
    logits[0, ::2] = -math.inf
    logits[1] = -math.inf
    logits[1, 77] = -3.0
    logits[2, 1:] = -math.inf
    logits[3] = -math.inf  # all: the first token, of log-probability -inf
    for parameters in (settings(4, device, top_k=90, top_p=0.999), settings(4, device), settings(4, device, min_p=0.1)):
        tokens, logprobs = sample(logits, **parameters)
        assert int(tokens[0]) % 2 == 1
        assert tokens[1:].tolist() == [77, 0, 0]
        torch.testing.assert_close(logprobs[1:].cpu(), torch.tensor([0.0, 0.0, -math.inf]))
        assert not bool(logprobs.isnan().any())
    assert greedy(logits)[0][1:].tolist() == [77, 0, 0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, with which the interpreter computes
def test_logits_that_are_not_finite_give_no_token(device: str) -> None:
    """Whatever the parameters: their rows have -1 and NaN, and the rows beside them what they always have."""
    logits = make(6, 2 * weights.PART + 3, device)
    logits[0, 5], logits[1, -1], logits[2] = math.nan, math.inf, math.nan
    logits[3] = -math.inf  # as a guide bans all but one
    logits[3, 70] = math.nan
    cases = {"top_k": [0, 40, 7, 0, 0, 9], "top_p": [1.0, 0.9, 0.5, 0.9, 0.8, 1.0]}
    for parameters in (settings(6, device), settings(6, device, **cases), settings(6, device, min_p=0.1)):
        tokens, logprobs = sample(logits, **parameters)
        assert tokens[:4].tolist() == [-1] * 4
        assert logprobs.isnan().tolist() == [True] * 4 + [False] * 2
        expected = reference.sample(logits, **parameters)
        assert torch.equal(tokens, expected[0])
        torch.testing.assert_close(logprobs, expected[1], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert greedy(logits)[0][:4].tolist() == reference.greedy(logits)[0][:4].tolist() == [-1] * 4


def test_given_buffers_and_nothing_to_do(device: str) -> None:
    logits, parameters = make(2, 50, device), settings(2, device)
    out = (torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, device=device))
    tokens, logprobs = sample(logits, **parameters, out=out)
    assert tokens is out[0]
    assert logprobs is out[1]
    assert greedy(logits, out=out)[0] is out[0]
    assert greedy(logits[:0])[0].shape == (0,)
    assert sample(logits[:0], **{name: value[:0] for name, value in parameters.items()})[0].shape == (0,)


def test_refuses_what_it_cannot_take(device: str) -> None:
    logits, good = make(2, 50, device), settings(2, device)
    out = (torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, device=device))
    refused = [
        ("logits is float64", logits.double(), {}),
        (r"logits has shape \[50\]", logits[0], {}),
        ("last dimension of logits", logits.t().contiguous().t(), {}),
        ("1 to 524288", logits[:, :0], {}),
        ("1 to 524288", logits.new_zeros(1).expand(2, 524289).contiguous(), {}),
        ("temperature is float64", logits, {"temperature": good["temperature"].double()}),
        ("top_k is int64", logits, {"top_k": good["top_k"].long()}),
        (r"top_p has shape \[1\]", logits, {"top_p": good["top_p"][:1]}),
        ("seed is int32", logits, {"seed": good["seed"].int()}),
        ("step must be contiguous", logits, {"step": torch.zeros(4, dtype=torch.int64, device=device)[::2]}),
        ("one device", logits, {"min_p": good["min_p"].to("meta")}),
        ("tokens is int32", logits, {"out": (out[0].int(), out[1])}),
        (r"logprobs has shape \[1\]", logits, {"out": (out[0], out[1][:1])}),
    ]
    for words, given, change in refused:
        with pytest.raises(InputError, match=words):
            sample(given, **(good | change))
    with pytest.raises(InputError, match="greedy: logits is int64"):
        greedy(logits.long())


def test_more_than_a_thousand_requests(device: str) -> None:
    requests = 1_030
    logits = make(requests, 70, device)
    tokens, logprobs = greedy(logits)
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(logprobs.cpu(), logits.log_softmax(-1).amax(-1).cpu(), atol=1e-4)
    parameters = settings(requests, device, temperature=0.8, top_k=5, top_p=0.9)
    if device == "cpu":  # the interpreter runs one program after the other
        return
    drawn, _ = sample(logits, **parameters)
    for row in (0, 511, 512, 1_023, 1_024, requests - 1):
        alone = {name: value[row : row + 1] for name, value in parameters.items()}
        assert torch.equal(sample(logits[row : row + 1], **alone)[0], drawn[row : row + 1])
