"""Training of the bundled models: what it saves is what transformers computes, and experts are trained as experts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantkit.bundled.training import clean
from quantkit.bundled.training.experts import Experts, Routing, imbalance, split_experts, stack_experts
from quantkit.bundled.training.export import routing_of, save, verify
from quantkit.bundled.training.loss import Loss
from quantkit.bundled.training.model import SIZES, Decoder, make_config
from quantkit.bundled.training.muon import Muon
from quantkit.sources import model_folder

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
}
ROUTED = {"moe_intermediate_size": 16, "num_experts": 5, "num_experts_per_tok": 2}


@pytest.fixture(params=["dense", "experts"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    monkeypatch.setitem(SIZES, "tiny", TINY | (ROUTED if request.param == "experts" else {}))
    torch.manual_seed(0)
    made = Decoder(make_config("tiny", 4096, 0))
    for name, weight in made.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return made


def test_transformers_computes_what_was_trained(model: Decoder, tmp_path: Path) -> None:
    save(model, make_config("tiny", 4096, 0), model_folder("demo"), tmp_path, {})
    verify(model, tmp_path)
    found = stack_experts(load_file(tmp_path / "model.safetensors"))
    assert all(torch.equal(weight.bfloat16(), found.pop(name)) for name, weight in model.named_parameters())
    assert not found
    with torch.no_grad():
        next(model.model.layers[1].mlp.parameters()).mul_(-1)
    with pytest.raises(SystemExit, match="gives other logits"):
        verify(model, tmp_path)


def test_a_file_has_one_tensor_for_each_expert() -> None:
    stack, router = torch.randn(3, 4, 5), torch.randn(3, 5)
    files = split_experts({"mlp.experts.up_proj": stack, "mlp.gate.weight": router})
    assert list(files) == [*(f"mlp.experts.{expert}.up_proj.weight" for expert in range(3)), "mlp.gate.weight"]
    assert torch.equal(files["mlp.experts.2.up_proj.weight"], stack[2])
    back = stack_experts(dict(reversed(files.items())))
    assert torch.equal(back["mlp.experts.up_proj"], stack)
    assert torch.equal(back["mlp.gate.weight"], router)


def test_the_imbalance_of_routing() -> None:
    one = torch.zeros(2, 3, 4)
    one[..., 1] = 1
    even = torch.eye(4).repeat(2, 1, 1)
    assert imbalance(Routing(one, one)) == 4
    assert imbalance(Routing(even, even)) == 1
    assert imbalance(Routing(torch.full((2, 4, 4), 0.25), one.repeat(1, 2, 1)[:, :4])) == 1


def test_the_loss_spreads_tokens_over_all_experts() -> None:
    torch.manual_seed(0)
    layer, x = Experts(experts=6, chosen=2, hidden=16, width=8), torch.randn(4, 64, 16) + 1
    with torch.no_grad():
        layer.gate.weight[:2] += 1  # two experts get all tokens
    optimizer = torch.optim.AdamW(layer.gate.parameters(), lr=0.03)

    def shares() -> Tensor:
        return (layer.route(x).weights > 0).float().mean((0, 1)) / layer.chosen

    assert shares().min() == 0
    for _ in range(60):
        imbalance(layer.route(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert shares().min() > 0.05


def test_muon_takes_each_expert_alone() -> None:
    torch.manual_seed(0)
    stack = torch.randn(40, 6, 4).requires_grad_()
    alone = [expert.detach().clone().requires_grad_() for expert in stack]
    stack.grad = torch.randn_like(stack) * torch.logspace(-3, 3, 40).view(-1, 1, 1)
    for expert, gradient in zip(alone, stack.grad, strict=True):
        expert.grad = gradient.clone()
    Muon([stack]).step(0.1)
    Muon(alone).step(0.1)
    assert torch.allclose(stack, torch.stack(alone), rtol=0, atol=1e-6)


def test_training_learns_a_short_text(model: Decoder) -> None:
    """Every parameter gets a gradient, routers too, and the loss falls."""
    loss = Loss(model, teacher=None, balance=0.01)
    batch = torch.randint(4096, (2, 17), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(12):
        total, plain = loss(batch)
        total.backward()
        assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(plain.item())
    assert losses[-1] < 0.5 * losses[0]


def test_how_evenly_tokens_are_routed(model: Decoder, tmp_path: Path) -> None:
    save(model, make_config("tiny", 4096, 0), model_folder("demo"), tmp_path, {})
    text = tmp_path / "text.txt"
    text.write_text("The function returns a list of names. " * 20)
    found = routing_of(tmp_path, text, torch.device("cpu"), window=40)
    layers = [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, Experts)]
    assert len(found) == len(layers)
    for layer in found:
        assert 0 <= layer["smallest_share"] <= 1 / 5 <= layer["largest_share"] <= 1 / 2
        assert 1 < layer["entropy_bits"] <= layer["most_bits"] == pytest.approx(2.3219)


def test_paragraphs_of_a_shipped_text_stay_out_of_the_training_text() -> None:
    blocks = [
        ("h", "Lists"),
        ("p", "A list holds values in the order in which they were added, and may hold one of them twice. " * 5),
        ("li", "Numbers are compared by what they are worth, not by their type."),
        ("li", "Strings are compared letter by letter."),
        ("pre", "names = sorted(names)\nprint(names[0])"),
    ]
    other = ("p", "A set holds every value once, and does not remember the order in which they came. " * 5)
    shipped = clean.keys_of(clean.render([("p", "Something before."), *blocks]))
    assert clean.deduplicate(blocks, set(shipped)) == []
    assert clean.deduplicate([other, *blocks[2:]], set(shipped)) == [other]


def test_the_experts_that_ship_are_all_at_work() -> None:
    folder = model_folder("demo-experts")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8_000_000
    routing = json.loads((folder / "training.json").read_text())["heldout_routing"]
    assert len(routing) == 4
    for layer in routing:
        assert layer["entropy_bits"] > 0.9 * layer["most_bits"]
        assert layer["smallest_share"] > 0.01
