"""quantkit train-medusa"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from quantkit.cli.common import device_option, json_option, print_json, print_table, progress_bar
from quantkit.wording import human_bytes

if TYPE_CHECKING:
    from quantkit.medusa.train import TrainReport
    from quantkit.runtime.drafters.medusa_tree import Tree


@click.command("train-medusa", short_help="Train heads that guess tokens ahead, for faster decoding.")
@click.argument("model")
@click.option("-o", "--output", metavar="DIR", help="Folder for the heads; default: beside the model's own files.")
@click.option("--heads", default=4, show_default=True, metavar="N", help="Tokens guessed ahead, 1 to 8.")
@click.option("--layers", default=1, show_default=True, metavar="N", help="Layers of a head, 1 to 4.")
@click.option("--nodes", default=15, show_default=True, metavar="N", help="Guesses verified in a step, 1 to 15.")
@click.option(
    "--text",
    multiple=True,
    metavar="SOURCE",
    help="Text or .jsonl file, or datasets:ORG/NAME; may be given several times.",
)
@click.option("--heldout", metavar="SOURCE", help="Measure on this text; default: a part that is not trained on.")
@click.option(
    "--self-generated", default=0, show_default=True, metavar="N", help="Train on N sampled answers of MODEL, too."
)
@click.option("--epochs", default=3, show_default=True, metavar="N", help="Passes over the text.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of samples and their order.")
@device_option
@json_option
def command(
    model: str,
    output: str | None,
    heads: int,
    layers: int,
    nodes: int,
    text: tuple[str, ...],
    heldout: str | None,
    self_generated: int,
    epochs: int,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Train Medusa heads for MODEL, quantized or not. The model itself stays as it is.

    \b
    quantkit train-medusa demo -o demo-heads
    quantkit train-medusa model-w4 --text my-domain.jsonl --self-generated 500
    quantkit train-medusa org/model -o heads --heads 3 --epochs 5 --device cuda --json

    Heads guess what MODEL will say, and one step verifies a tree of their guesses; what is said stays the same. Tokens
    per step are measured on answers to text that was not trained on.
    """
    from quantkit.devices import resolve_device
    from quantkit.medusa.train import TrainOptions, train_medusa

    options = TrainOptions(
        heads=heads, layers=layers, nodes=nodes, epochs=epochs, self_generated=self_generated, seed=seed
    )
    report = train_medusa(
        model,
        output,
        text=text,
        heldout=heldout,
        options=options,
        device=resolve_device(device),
        stage=progress_bar,
    )
    if as_json:
        print_json(report.to_dict())
    else:
        _print_report(report)


def _print_report(report: TrainReport) -> None:
    rows = [
        (f"{head + 1}", f"{head + 2}", f"{row[0]:.1%}", f"{sum(row[:3]):.1%}", f"{loss:.3f}", _used(report.tree, head))
        for head, (row, loss) in enumerate(zip(report.accuracies, report.heldout_losses, strict=True))
    ]
    step = report.tokens_per_step
    print_table(
        f"medusa heads for {report.model}",
        ("head", "tokens ahead", "top 1", "top 3", "held-out loss", "ranks in the tree"),
        rows,
        f"{report.output}: {human_bytes(report.bytes)}, trained on {report.tokens:,} tokens\n"
        f"{step.tree:.3f} tokens per step with the tree of {len(report.tree)} nodes ({step.tree_walk:.3f} from step to "
        f"step), {step.chain:.3f} with first guesses only ({step.chain_walk:.3f}); {step.positions:,} positions of "
        f"{step.answers} held-out answers, greedy",
    )


def _used(tree: Tree, head: int) -> str:
    """How many nodes of the tree each rank of a head has, such as `1x5 2x2 3x1`."""
    counts: dict[int, int] = {}
    for node in tree.nodes:
        if node.head == head:
            counts[node.rank + 1] = counts.get(node.rank + 1, 0) + 1
    return " ".join(f"{rank}x{count}" for rank, count in sorted(counts.items())) or "-"
