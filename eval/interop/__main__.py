"""What other engines make of our checkpoints.

    python -m quantkit.eval.interop make demo checkpoints
    python -m quantkit.eval.interop run transformers checkpoints
    python -m quantkit.eval.interop table --write

`make` quantizes and converts, `run` gives every checkpoint to an engine and appends rows to eval/results/interop.csv,
`table` shows the newest ones. vLLM has a command of its own: python -m quantkit.eval.peers.vllm_load.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from quantkit.devices import on_device, resolve_device
from quantkit.errors import QuantkitError
from quantkit.eval.interop import rows, speed_rows
from quantkit.eval.interop.checkpoints import chosen, make
from quantkit.eval.interop.run import add_arguments, run
from quantkit.eval.interop.table import PAGE, load_tables, with_table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="quantize and convert what is not there yet")
    maker.add_argument("model", help="a folder, a hub name or `demo`")
    maker.add_argument("folder", type=Path)
    maker.add_argument("--only", default="", metavar="NAME,...", help="these, and what they are made from")
    maker.add_argument("--device", default="auto")
    runner = commands.add_parser("run", help="give every checkpoint to an engine")
    runner.add_argument("engine", choices=["transformers"])
    add_arguments(runner)
    shower = commands.add_parser("table", help="the newest rows as a table")
    shower.add_argument("--write", action="store_true", help=f"into {PAGE}")
    given = parser.parse_args(arguments)
    typed = ["python", "-m", "quantkit.eval.interop", *(sys.argv[1:] if arguments is None else arguments)]
    try:
        if given.command == "make":
            device = resolve_device(given.device)
            with on_device(device):
                make(given.model, given.folder, chosen([name for name in given.only.split(",") if name]), device, print)
        elif given.command == "run":
            run(given.engine, given, typed, lambda line: print(line, flush=True))
        else:
            _tables(write=given.write)
    except QuantkitError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")


def _tables(*, write: bool) -> None:
    tables = load_tables(rows.read(rows.FILE))
    tables["side by side"] = speed_rows.speed_table(speed_rows.read(speed_rows.FILE))
    if not write:
        print("\n\n".join(tables.values()))
        return
    page = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        page = with_table(page, name, table)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
