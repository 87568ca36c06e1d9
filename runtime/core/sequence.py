"""One continuation of one prompt, from its arrival to its last token: the value that travels through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal, Protocol

from quantkit.runtime.core.pages import Digest, page_digest
from quantkit.runtime.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]


class Guide(Protocol):
    """What structured output asks of a sequence; `sampling/structured_output.py` has the real ones."""

    @property
    def finished(self) -> bool:
        """Whether only an end token may follow."""

    def mask(self) -> Tensor:
        """Which tokens may come next, bool [vocab], on the CPU."""

    def mask_behind(self, guesses: tuple[int, ...]) -> Tensor:
        """The same if these tokens came first; an error where they may not. The guide stays as it is."""

    def advance(self, token: int) -> None:
        """The token that came."""


class Status(Enum):
    """Where a sequence stands. A preempted one waits again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass
class Swapped:
    """Pages in host memory, where those who compute keep them."""

    num_pages: int
    num_computed: int


@dataclass(eq=False)
class Sequence:
    """Each field has one writer, named in front of it; everybody else reads.

    `num_computed` counts tokens whose keys and values are in the cache, or will be when the steps that were launched
    have run. `num_pending` counts tokens that were sampled but have not come back from the device.
    """

    # The engine, when the request comes; nobody changes them.
    id: int
    prompt: list[int]
    params: SamplingParams
    rank: float  # lower goes first: the time of arrival, later for lower priority
    seed: int
    max_new: int  # most tokens of its answer, the context considered
    end_tokens: tuple[int, ...] = ()  # that end it, the model's own included
    leader: Sequence | None = None  # whose prompt pages to share, for n > 1
    needs_all_logits: bool = False  # logprobs of the prompt
    guide: Guide | None = None  # structured output: which tokens may come next
    waits: bool = False  # its last token must be seen before its next step, as where steps go through several stages

    # The engine, as steps are launched and tokens come back.
    tokens: list[int] = field(default_factory=list)  # prompt and answer, as far as known
    started: float | None = None  # when it was first scheduled, by the clock of its arrival

    # The scheduler.
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None  # set together with FINISHED
    row: int = -1  # of the device's state (`device/device_rows.py`), while it runs
    pages: list[int] = field(default_factory=list)
    num_replaced: int = 0  # times that some of these were taken away or replaced: else they only become more
    digests: list[Digest] = field(default_factory=list)  # of full pages, as far as tokens are known
    num_computed: int = 0
    num_published: int = 0  # pages offered to others
    num_pending: int = 0
    num_reused: int = 0  # prompt tokens that were found in the cache
    num_preemptions: int = 0
    swapped: Swapped | None = None  # its pages in host memory, where it was preempted that way

    # Speculation.
    speculates: bool = False  # drafts are guessed for it, which needs to know its last token
    draft: list[int] = field(default_factory=list)  # guessed tokens, to be verified by the next step
    ahead: int = 0  # tokens behind those computed that get pages too where there are some: next guesses need them early
    tree: tuple[int, ...] = ()  # where guesses are a tree: the parents of its nodes, see `Scheduled`
    num_guessed: int = 0  # tokens in drafts that were verified
    num_accepted: int = 0  # of these

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.prompt)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def length(self) -> int:
        """Tokens that exist, those on their way back included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_missing(self) -> int:
        """Tokens that exist and are not computed."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def num_answered(self) -> int:
        """Tokens of the answer, as far as known."""
        return len(self.tokens) - len(self.prompt)

    @property
    def at_limit(self) -> bool:
        """Whether its last token was sampled already."""
        return self.length - len(self.prompt) >= self.max_new

    @property
    def must_wait(self) -> bool:
        """Whether nothing of it can be computed now: its last token was sampled, or somebody must see one first.

        What was computed reaches beyond the tokens that exist while guesses are being verified.
        """
        pending = self.num_pending
        length = len(self.tokens) + pending
        if length - len(self.prompt) >= self.max_new:
            return True
        must_see = self.waits or self.guide is not None or self.speculates or self.num_computed >= length
        return pending > 0 and must_see

    def digest_of(self, page: int, page_size: int) -> Digest:
        """Of its page with this number, which must be full of known tokens."""
        while len(self.digests) <= page:
            start = len(self.digests) * page_size
            before = self.digests[-1] if self.digests else b""
            self.digests.append(page_digest(before, self.tokens[start : start + page_size]))
        return self.digests[page]
