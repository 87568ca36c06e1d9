"""What a layer consists of, as data: stages of linears that read the same input, one after the other.

A family answers with the stages of each of its layers (`arch.Family.stages`), and everything else asks them: which
linears share a scheme, where calibration looks, where input scales go, what an engine runs as one matrix. A dense
layer has four stages, a layer with experts or with two projections in a row has others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Group = tuple[str, ...]  # names of linear layers that read the same input


@dataclass(frozen=True)
class Part:
    """A residual part of a layer: its body reads the normed hidden states, and what it computes is added to them."""

    kind: Literal["attention", "mlp"]  # the body of attention also takes positions and masks
    body: str
    norm: str  # before the body
    post_norm: str | None = None  # after the body, before the residual sum, where the family has one


@dataclass(frozen=True)
class Fold:
    """Where the input scales of a stage may go: the module before it, whose output feeds nothing but this stage.

    Only the last outputs of the producer matter (`Family.folded_outputs` says how many), which covers separate and
    fused layers alike. Dividing them by s and multiplying the input columns of the stage by s changes nothing.

        norm    an RMS norm; its effective weight, `weight + norm_offset`, is divided. Several stages may read it, and
                plain linears (`also`: routers and gates); they take the same scales
        value   the value rows; under grouped-query attention one KV head feeds several heads, which then share a scale
        up      the up rows, which meet the activated gate in a plain product
    """

    kind: Literal["norm", "value", "up"]
    producer: str
    also: Group = ()


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts by its logits, and how much each of the chosen counts.

    The meaning is `choose_experts` in `kernels/reference/experts.py`. Experts may stand in groups of equal size,
    neighbours together. A token then chooses groups first: each by its best expert under softmax, by the sum of its two
    best under sigmoid.
    """

    normalized: bool = True  # the scores of the chosen ones are divided by their sum
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # makes a score of each logit; softmax looks at all of them
    corrected: bool = False  # a stored bias is added to the scores to choose by, and counts for nothing else
    groups: int = 1
    groups_chosen: int = 1  # only their experts can be chosen
    scale: float = 1.0  # of what the chosen ones count
    float32: bool = False  # the logits are computed in it, whatever the model's dtype


@dataclass(frozen=True)
class Experts:
    """Copies of a stage's linears, of which a router chooses some for every token."""

    count: int
    per_token: int
    router: str  # the module that chooses; never quantized
    routing: Routing = Routing()
    router_biased: bool = False

    @property
    def correction(self) -> str | None:
        """The bias of a router whose choice is corrected; never quantized, always float32."""
        return f"{self.router}.e_score_correction_bias" if self.routing.corrected else None


@dataclass(frozen=True)
class Stage:
    """Linears of one layer that read the same input. They share one scheme, because engines run them as one matrix.

    A stage of experts has these linears once for every expert: `{}` in a name stands for the expert's number. An expert
    reads the tokens that the router sends it. All experts of a stage share the scheme.
    """

    # What an engine asks for: `qkv`, `output`, `gate_up` and `down` in a dense layer. Latent attention has `q_b` and
    # `kv_b` after its `qkv`, which are the linears that make queries and latents from hidden states.
    role: str
    names: Group
    part: Part
    fold: Fold | None = None
    experts: Experts | None = None
    width: int | None = None  # of what lies between gate_up and down; None: `intermediate_size` of config.json
    gate: str | None = None  # a linear of one output that says how much the sum of this stage's MLP counts

    @property
    def linears(self) -> Group:
        """The names of all linears, those of every expert included."""
        if self.experts is None:
            return self.names
        return tuple(name.format(number) for number in range(self.experts.count) for name in self.names)

    @property
    def routed(self) -> bool:
        """Whether it has experts."""
        return self.experts is not None

    @property
    def container(self) -> str:
        """Where the experts of a stage stand: the module that is called with tokens and with what a router chose."""
        return self.names[0].partition(".{}.")[0]

    @property
    def by_expert(self) -> tuple[Stage, ...]:
        """A stage for every expert alone; a stage without experts is the only one."""
        if self.experts is None:
            return (self,)
        return tuple(self._of_expert(number) for number in range(self.experts.count))

    def _of_expert(self, number: int) -> Stage:
        fold = self.fold and replace(self.fold, producer=self.fold.producer.format(number))
        names = tuple(name.format(number) for name in self.names)
        return replace(self, names=names, fold=fold, experts=None)


ATTENTION = Part("attention", "self_attn", "input_layernorm")
MLP = Part("mlp", "mlp", "post_attention_layernorm")


def dense_stages(
    attention: Part = ATTENTION,
    mlp: Part = MLP,
    qkv: Group = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    gate_up: Group = ("mlp.gate_proj", "mlp.up_proj"),
) -> tuple[Stage, ...]:
    """The four stages of a dense layer. Fused linears have their rows in the order q, k, v and gate, up."""
    return (
        Stage("qkv", qkv, attention, Fold("norm", attention.norm)),
        Stage("output", ("self_attn.o_proj",), attention, Fold("value", qkv[-1])),
        Stage("gate_up", gate_up, mlp, Fold("norm", mlp.norm)),
        Stage("down", ("mlp.down_proj",), mlp, Fold("up", gate_up[-1])),
    )


def latent_stages(*, from_hidden: bool, part: Part = ATTENTION) -> tuple[Stage, ...]:
    """Latent attention; `from_hidden`: queries are made from hidden states, without a latent of their own.

    What is kept of keys and values becomes them in kv_b, head by head: the rows of a head's key, then of its value. So
    no scales of the output projection go there.
    """
    kv_a, kv_b = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"
    queries = "self_attn.q_proj" if from_hidden else "self_attn.q_a_proj"
    q_b = Stage("q_b", ("self_attn.q_b_proj",), part, Fold("norm", "self_attn.q_a_layernorm"))
    return (
        Stage("qkv", (queries, kv_a), part, Fold("norm", part.norm)),
        *(() if from_hidden else (q_b,)),
        Stage("kv_b", (kv_b,), part, Fold("norm", "self_attn.kv_a_layernorm")),
        Stage("output", ("self_attn.o_proj",), part),
    )


def mlp_stages(
    folder: str,
    role: str = "",
    part: Part = MLP,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    experts: Experts | None = None,
    width: int | None = None,
    gate: str | None = None,
) -> tuple[Stage, ...]:
    """The two stages of an MLP beside others that read the same norm.

    `folder` is where its linears stand, with `{}` for an expert's number; `role` comes before the names of its roles.
    """
    gate_up, down = [f"{folder}.{name}" for name in names[:2]], f"{folder}.{names[2]}"
    also = tuple(name for name in (experts and experts.router, gate) if name)
    return (
        Stage(f"{role}gate_up", tuple(gate_up), part, Fold("norm", part.norm, also), experts, width, gate),
        Stage(f"{role}down", (down,), part, Fold("up", gate_up[1]), experts, width, gate),
    )
