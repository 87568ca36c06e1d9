"""Tokens become pieces of text: one event for all that came meanwhile, in order, and errors after what was said."""

import asyncio
from typing import Any

import pytest

from quantkit.errors import QuantkitError
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.token_output import TokenOutput
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.runtime.server.engine_process.pending import EngineDied, PendingRequest
from quantkit.runtime.server.models.answer_stream import AnswerStream, Piece
from quantkit.sources import model_folder

TEXT = "The function returns a list of words, and größer ones too."


class Recorder:
    """Stands for the engine's client and the metrics: both are only told things here."""

    def __init__(self) -> None:
        self.forgotten: list[tuple[int, int | None]] = []
        self.gaps = 0

    def forget(self, request: int, index: int | None = None) -> None:
        self.forgotten.append((request, index))

    def request_queued(self, seconds: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def token_gap(self, seconds: float) -> None:
        self.gaps += 1


def answers(n: int = 1, **params: Any) -> tuple[AnswerStream, Recorder, list[int]]:
    tokenizer = load_tokenizer(model_folder("demo"))
    assert tokenizer is not None
    recorder = Recorder()
    pending = PendingRequest(recorder, 7, n)  # type: ignore[arg-type]
    wanted = SamplingParams(n=n, **params)
    made = AnswerStream(pending, [1, 2], wanted, tokenizer, (), recorder, 0.0)  # type: ignore[arg-type]
    return made, recorder, tokenizer(TEXT, add_special_tokens=False)["input_ids"]


def output(token: int, index: int = 0, finished: Any = None) -> TokenOutput:
    return TokenOutput(7, index, token, -0.5, [], finished, None)


async def gathered(source: AnswerStream) -> list[Piece]:
    return [piece async for piece in source.pieces()]


def test_what_came_meanwhile_is_one_piece() -> None:
    source, recorder, ids = answers()
    for place, token in enumerate(ids):
        source.pending.put(output(token, finished="length" if place == len(ids) - 1 else None))
    (piece,) = asyncio.run(gathered(source))
    assert (piece.text, piece.finished) == (TEXT, "length")
    assert [scored.id for scored in piece.tokens] == ids
    assert source.generated == len(ids)
    assert recorder.gaps == len(ids) - 1


def test_a_reader_that_keeps_up_gets_every_token() -> None:
    async def run() -> list[Piece]:
        source, _, ids = answers()

        async def feed() -> None:
            for place, token in enumerate(ids):
                source.pending.put(output(token, finished="length" if place == len(ids) - 1 else None))
                for _ in range(3):
                    await asyncio.sleep(0)

        feeding = asyncio.create_task(feed())
        found = await gathered(source)
        await feeding
        assert len(found) == len(ids)
        return found

    assert "".join(piece.text for piece in asyncio.run(run())) == TEXT


def test_answers_to_one_prompt_stay_apart() -> None:
    source, _, ids = answers(n=2)
    for place, token in enumerate(ids):
        source.pending.put(output(token, 0, "length" if place == len(ids) - 1 else None))
        if place < 3:
            source.pending.put(output(token, 1, "stop" if place == 2 else None))
    first, second = sorted(asyncio.run(gathered(source)), key=lambda piece: piece.index)
    assert (first.text, first.finished) == (TEXT, "length")
    assert TEXT.startswith(second.text)
    assert (len(second.tokens), second.finished) == (3, "stop")


def test_tokens_behind_a_stop_string_are_dropped() -> None:
    source, recorder, ids = answers(stop=["list"])
    for token in ids:
        source.pending.put(output(token))
    (piece,) = asyncio.run(gathered(source))
    assert (piece.text, piece.finished) == ("The function returns a ", "stop")
    assert source.generated < len(ids)
    assert recorder.forgotten == [(7, 0), (7, None)]


@pytest.mark.parametrize("error", [EngineDied("gone"), QuantkitError("other")])
def test_an_error_comes_after_what_was_said(error: QuantkitError) -> None:
    source, _, ids = answers()
    for found in (output(ids[0]), output(ids[1]), error):
        source.pending.put(found)

    async def run() -> Piece:
        pieces = source.pieces()
        said = await anext(pieces)
        with pytest.raises(type(error), match=str(error)):
            await anext(pieces)
        return said

    piece = asyncio.run(run())
    assert TEXT.startswith(piece.text)
    assert len(piece.tokens) == 2
