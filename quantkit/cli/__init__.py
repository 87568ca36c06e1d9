"""The command line: one file per command, imported when it is called, none of them importing torch at its top.

To add a command: a file here with a click command named `command`, and its name in COMMANDS.
"""

from __future__ import annotations

import importlib
import sys

import click

from quantkit.errors import QuantkitError

COMMANDS = (
    "quantize",
    "import",
    "convert",
    "inspect",
    "recipes",
    "plan",
    "advise",
    "generate",
    "chat",
    "detect-watermark",
    "serve",
    "warm-up",
    "deploy",
    "eval",
    "bench",
    "compare",
    "demo",
    "train-medusa",
)


class LazyGroup(click.Group):
    """Finds `quantkit NAME` in the module `quantkit.cli.NAME` (`import` and `eval` carry a trailing underscore)."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        suffix = "_" if name in ("import", "eval") else ""
        command = importlib.import_module(f"quantkit.cli.{name.replace('-', '_')}{suffix}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from quantkit.errors import did_you_mean

            raise click.UsageError(f"unknown command '{args[0]}'; {did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="quantkit", message="%(prog)s %(version)s")
def cli() -> None:
    """Make a language model small, run it, and see what was lost.

    \b
    quantkit quantize demo -r nf4 -o demo-nf4     quantize the bundled model
    quantkit inspect demo-nf4                     what is inside, and which engines load it
    quantkit eval demo-nf4                        perplexity on held-out text
    quantkit compare demo -o report               every format: quality, speed, memory; one page
    quantkit plan llama-3.1-8b                    what fits where, before anything runs
    quantkit generate demo-nf4 "The function"     text
    quantkit chat demo-nf4                        a conversation
    quantkit serve demo-nf4                       OpenAI's API over HTTP, and a page

    MODEL is a folder, a hub name such as org/model, or `demo`.
    """


def main(args: list[str] | None = None) -> None:
    """Entry point: errors made on purpose become one line on stderr and their exit code."""
    given = sys.argv[1:] if args is None else args
    try:
        cli.main(args=given or ["--help"], prog_name="quantkit", standalone_mode=False)
    except QuantkitError as error:
        click.echo(f"quantkit: {error}", err=True)
        sys.exit(error.exit_code)
    except click.UsageError as error:
        hint = f"{error.ctx.command_path} --help" if error.ctx else "quantkit --help"
        click.echo(f"quantkit: {error.format_message()} (see '{hint}')", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("quantkit: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
