"""What is sent at a server, when, and what counts as a good answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantkit.errors import InputError, did_you_mean
from quantkit.eval.serve.answers import Answer
from quantkit.eval.serve.percentiles import percentile

_REQUESTS_PER_STREAM = 4  # so that most of a run has all streams busy
_SECONDS_OF_ARRIVALS = 30


@dataclass(frozen=True)
class Load:
    """Either so many streams at once, each of which asks again when it is answered, or requests at random times.

    It ends after `requests`, or begins no new one after `seconds`.
    """

    concurrency: int | None = None
    rate: float | None = None  # requests per second
    requests: int | None = None
    seconds: float | None = None
    ramp_up: float = 0.0  # seconds over which the streams begin, one by one; answers that begin meanwhile do not count

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise InputError("give --concurrency or --rate, not both")
        if self.requests is not None and self.seconds is not None:
            raise InputError("give --requests or --seconds, not both")
        if self.ramp_up and self.rate is not None:
            raise InputError("--ramp-up is for --concurrency; requests of a --rate come one by one anyway")
        if self.requests is None and self.seconds is None:
            object.__setattr__(self, "requests", self._usual_requests())

    def _usual_requests(self) -> int:
        if self.concurrency is not None:
            return max(8, _REQUESTS_PER_STREAM * self.concurrency)
        assert self.rate is not None
        return max(8, round(_SECONDS_OF_ARRIVALS * self.rate))

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once" if self.concurrency is not None else f"{self.rate:g} per second"

    @property
    def streams(self) -> int:
        """How many may be open at once, as far as one knows beforehand."""
        return self.concurrency or 8

    def arrivals(self, seed: int) -> Iterator[float]:
        """Seconds from the start at which requests arrive: a Poisson process of the rate."""
        assert self.rate is not None
        generator = random.Random(seed)
        times = itertools.accumulate(generator.expovariate(self.rate) for _ in itertools.count())
        if self.requests is not None:
            return itertools.islice(times, self.requests)
        assert self.seconds is not None
        end = self.seconds
        return itertools.takewhile(lambda at: at < end, times)


@dataclass(frozen=True)
class Limits:
    """What a good answer keeps, in milliseconds. `itl` is for the 95th percentile of an answer's own gaps."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None

    NAMES = ("ttft", "tpot", "itl", "e2e")

    @classmethod
    def parse(cls, text: str) -> Limits:
        """From `ttft=250,itl=50,e2e=10000`."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name not in cls.NAMES:
                raise InputError(f"--goodput has '{part.strip()}'; {did_you_mean(name, cls.NAMES)}")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = 0.0
            if not 0 < found[name] < float("inf"):
                raise InputError(f"--goodput {name} is '{value}', but must be milliseconds such as {name}=250")
        return cls(**found)

    def keeps(self, answer: Answer) -> bool:
        """Whether an answer came whole and within every limit; one that it has no time for does not bind."""
        if answer.error is not None:
            return False
        gaps = answer.gaps if self.itl is not None else []
        seen = (answer.ttft, answer.tpot, percentile(sorted(gaps), 95) if gaps else None, answer.e2e)
        limits = (self.ttft, self.tpot, self.itl, self.e2e)
        return all(
            limit is None or time is None or time * 1e3 <= limit for limit, time in zip(limits, seen, strict=True)
        )


def make_loads(
    concurrency: Sequence[int],
    rates: Sequence[float],
    requests: int | None,
    seconds: float | None,
    ramp_up: float = 0.0,
) -> list[Load]:
    """One load for each number of streams or rate."""
    if concurrency and rates:
        raise InputError("give --concurrency or --rate, not both")
    for name, numbers in (("--concurrency", concurrency), ("--rate", rates)):
        if any(not 0 < number < float("inf") for number in numbers):
            raise InputError(f"{name} has a number that is not above 0")
    return [
        *(Load(concurrency=number, requests=requests, seconds=seconds, ramp_up=ramp_up) for number in concurrency),
        *(Load(rate=rate, requests=requests, seconds=seconds, ramp_up=ramp_up) for rate in rates),
    ]
