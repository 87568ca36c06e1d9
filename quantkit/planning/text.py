"""A plan in words: one (label, text) a line."""

from __future__ import annotations

from quantkit.engines import Verdict
from quantkit.formats import Gguf
from quantkit.planning.plan import Need, OutputFacts, QuantizePlan
from quantkit.wording import human_bytes, human_count, human_duration

_SCALES = {"tensor": "one for the keys of a layer and one for its values", "attn_head": "one for each head"}
_NAMED = 3  # kept layers by name, before they are only counted


def describe(plan: QuantizePlan) -> list[tuple[str, str]]:
    """What `--dry-run` shows. Labels repeat where there are several schemes, engines or warnings."""
    model, output, needs = plan.model, plan.output, plan.needs
    lines = [
        ("model", f"{model.name}: {model.model_type}, {model.blocks} blocks, {model.dtype}"),
        ("", f"{human_count(model.parameters)} parameters in {human_bytes(model.bytes)}"),
        ("recipe", _method(plan)),
        *(("layers", f"{s.scheme}: {s.layers} layers, {human_count(s.weights)} weights") for s in output.schemes),
        ("kept", _kept(output)),
        *(("cache", f"scales for FP8, {_SCALES[how]}") for how in filter(None, [output.kv_scales])),
        ("output", _output(plan)),
        ("disk", _need(needs.disk, "free")),
        ("memory", f"about {_need(needs.ram, 'available')}"),
    ]
    if needs.gpu is not None:
        lines.append(("GPU memory", f"about {_need(needs.gpu, 'free')}"))
    lines.append(("time", f"about {human_duration(needs.seconds)} on {needs.device}"))
    for label, answer in (("loads in", "yes"), ("not in", "no"), ("perhaps in", "unknown")):
        said = [verdict for verdict in plan.engines if verdict.answer == answer]
        lines += [(label, _with_evidence(_named(verdict), verdict)) for verdict in said]
    return lines + [("warning", warning) for warning in plan.warnings]


def _named(verdict: Verdict) -> str:
    colon = "" if verdict.loads else ":"
    return f"{verdict.engine}{colon} {verdict.remark}".strip()


def _with_evidence(text: str, verdict: Verdict) -> str:
    return f"{text} ({verdict.evidence})" if verdict.evidence else text


def _method(plan: QuantizePlan) -> str:
    method = plan.method
    options = ", ".join(f"{name} {value}" for name, value in method.options.items())
    data = f"{method.samples} sequences of {method.seq_len} tokens" if method.calibrated else "no calibration data"
    if method.mix:
        data += f" ({', '.join(f'{count} x {source}' for source, count in method.mix.items())})"
    return f"{method.recipe}: method {method.name}{f' ({options})' if options else ''}, {data}"


def _kept(output: OutputFacts) -> str:
    always = "norms" if output.format == Gguf.name else "lm_head, embeddings and norms"
    if not output.kept:
        return always
    more = len(output.kept) - _NAMED
    named = ", ".join(output.kept[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{always}; {len(output.kept)} layers: {named}"


def _output(plan: QuantizePlan) -> str:
    output = plan.output
    share = 100 * output.bytes / plan.model.bytes
    return (
        f"{human_bytes(output.bytes)} in format {output.format}, {share:.0f} % of the model; "
        f"{output.bits_per_weight:.2f} bits per weight in quantized layers"
    )


def _need(need: Need, word: str) -> str:
    known = "" if need.available is None else f", {human_bytes(need.available)} {word}"
    return f"{human_bytes(need.needed)}{known}"
