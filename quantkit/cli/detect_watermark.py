"""quantkit detect-watermark"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from quantkit.cli.common import json_option, print_json
from quantkit.errors import InputError, StorageError


@click.command("detect-watermark", short_help="Whether a text has a watermark.")
@click.argument("model")
@click.argument("file", required=False, metavar="[FILE]")
@click.option("--text", metavar="TEXT", help="The text itself, instead of a file.")
@click.option("--key-file", required=True, metavar="FILE", help="File with the secret that answers were marked with.")
@click.option("--gamma", default=0.25, show_default=True, help="Share of green tokens that answers were marked with.")
@click.option(
    "--false-positives", default=1e-4, show_default=True, help="Share of plain texts that may be taken for marked ones."
)
@json_option
def command(
    model: str, file: str | None, text: str | None, key_file: str, gamma: float, false_positives: float, as_json: bool
) -> None:
    """Say whether the text of FILE (- for stdin) was written with a watermark. Of MODEL only the tokenizer is used.

    \b
    quantkit detect-watermark demo answer.txt --key-file secret.txt
    quantkit detect-watermark demo --text "The function returns" --key-file secret.txt --json

    Counted are the different pairs of neighbouring tokens. Without a watermark the share GAMMA of them is green; p is
    the probability that so many are. See docs/reference/serving.md.
    """
    from quantkit.runtime.server.config_file import read_watermark_key
    from quantkit.runtime.watermark_detector import detect_watermark

    if (file is None) == (text is None):
        raise InputError("give a FILE (- for stdin) or --text, one of the two")
    if not 0 < false_positives < 1:
        raise InputError(f"--false-positives is {false_positives}, but must be above 0 and below 1")
    key = read_watermark_key(key_file)
    given = text if text is not None else _read(str(file))
    score = detect_watermark(given, key, model=model, gamma=gamma)
    found = score.found(false_positives)
    if as_json:
        print_json({**asdict(score), "false_positives": false_positives, "watermarked": found})
        return
    click.echo(f"tokens counted  {score.tokens}")
    click.echo(f"green           {score.green} ({100 * score.green / score.tokens:.1f} %; {100 * gamma:g} % by chance)")
    click.echo(f"z               {score.z:.2f}")
    click.echo(f"p               {score.p_value:.2g}")
    click.echo(f"watermarked     {'yes' if found else 'no'} (p {'<=' if found else '>'} {false_positives:g})")


def _read(file: str) -> str:
    try:
        with click.open_file(file, encoding="utf-8") as opened:
            return str(opened.read())
    except UnicodeDecodeError as error:
        raise StorageError(f"{Path(file)}: not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise StorageError(f"cannot read {Path(file)}: {error.strerror or error}") from error
