"""The detector: its arithmetic against exact fractions, what it counts, and its command."""

import json
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any

import pytest

from quantkit import LLM, SamplingParams, Watermark, detect_watermark
from quantkit.errors import InputError
from quantkit.eval.watermark import least_green
from quantkit.runtime.watermark_detector import binomial_tail, score

KEY = "a secret of sixteen letters"


@pytest.mark.parametrize(("trials", "least"), [(1, 1), (10, 0), (10, 3), (10, 10), (199, 50), (199, 74), (199, 199)])
@pytest.mark.parametrize("chance", [0.25, 0.5])
def test_tails_are_exact(trials: int, least: int, chance: float) -> None:
    share = Fraction(chance)
    exact = sum(comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(least, trials + 1))
    assert binomial_tail(trials, least, chance) == pytest.approx(float(exact), rel=1e-9, abs=1e-14)


def test_the_bound_is_the_exact_one() -> None:
    """One green token fewer would be too many false positives. A normal z would allow more than it says."""
    for tokens in (50, 175, 199):
        bound = least_green(tokens, 0.25)
        assert score(tokens, bound, 0.25).p_value <= 1e-4 < score(tokens, bound - 1, 0.25).p_value
    assert score(199, least_green(199, 0.25), 0.25).z > 3.72  # where the normal tail is 1e-4


def test_a_pair_counts_once() -> None:
    once = detect_watermark([5, 6, 7, 8, 9], KEY)
    assert once.tokens == 4
    again = detect_watermark([5, 6, 7, 8, 9] * 50, KEY)
    assert again.tokens == 5  # and the pair from one to the next
    assert again.p_value > 1e-4


@pytest.mark.parametrize("text", ["", "a", [3]])
def test_too_short_a_text_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match="at least two"):
        detect_watermark(text, KEY, model="demo-draft")


def test_a_text_needs_a_tokenizer() -> None:
    with pytest.raises(InputError, match="give model or tokenizer"):
        detect_watermark("some text", KEY)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A marked answer, and its key."""
    folder = tmp_path_factory.mktemp("marked")
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=1, ignore_eos=True, watermark=Watermark(KEY))
    llm = LLM("demo-draft", device="cpu", max_context=256, kv_tokens=512)
    (folder / "answer.txt").write_text(llm.generate("The function returns", params)[0].text)
    (folder / "key").write_text(KEY + "\n")
    (folder / "key").chmod(0o600)
    return folder / "answer.txt", folder / "key"


def test_the_command(files: tuple[Path, Path], run_cli: Any) -> None:
    answer, key = files
    code, out, _ = run_cli("detect-watermark", "demo-draft", answer, "--key-file", key, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["watermarked"] is True
    assert found["p_value"] < 1e-6
    assert found["green"] <= found["tokens"] < 125
    _, out, _ = run_cli("detect-watermark", "demo-draft", "--text", "The function returns words.", "--key-file", key)
    assert "watermarked     no (p > 0.0001)" in out


def test_wrong_input_of_the_command(files: tuple[Path, Path], run_cli: Any, tmp_path: Path) -> None:
    answer, key = files
    short, open_to_all = tmp_path / "short", tmp_path / "open"
    short.write_text("short")
    short.chmod(0o600)
    open_to_all.write_text(KEY)
    open_to_all.chmod(0o644)
    for arguments, words in (
        ((answer, "--text", "x", "--key-file", key), "one of the two"),
        (("--key-file", key), "one of the two"),
        ((tmp_path / "none", "--key-file", key), "cannot read"),
        ((answer, "--key-file", short), "needs 16"),
        ((answer, "--key-file", open_to_all), "chmod 600"),
        ((answer, "--key-file", key, "--gamma", "2"), "from 0.01 to 0.99"),
        ((answer, "--key-file", key, "--false-positives", "0"), "above 0 and below 1"),
    ):
        code, _, err = run_cli("detect-watermark", "demo-draft", *arguments)
        assert code == 2
        assert words in err
        assert KEY not in err


def test_generate_marks(files: tuple[Path, Path], run_cli: Any) -> None:
    _, key = files
    asked = ("generate", "demo-draft", "The function returns", "--temperature", "1", "--max-tokens", "100", "--json")
    found = json.loads(run_cli(*asked, "--watermark-key-file", key)[1])
    assert detect_watermark(found["answers"][0]["token_ids"], KEY).found()
