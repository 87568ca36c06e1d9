"""Every formula of a plan with its numbers, for one format."""

from __future__ import annotations

import math
from collections.abc import Iterator

from quantkit.eval.plan.memory import LIBRARIES, PAGE, SEQUENCES, SHARE, STEP_TOKENS
from quantkit.eval.plan.model import Decoder
from quantkit.eval.plan.plan import FormatPlan, ServingPlan, Speed
from quantkit.eval.plan.question import Question
from quantkit.eval.plan.roofline import Ceiling
from quantkit.eval.plan.weights import KEPT_BYTES, UNQUANTIZED
from quantkit.kernels.attention.latent.pieces import EXPANDED_BYTES, PIECE_ROWS

Line = tuple[str, str]  # (what, formula with numbers)


def explain(plan: ServingPlan) -> list[Line]:
    """For the plan's focus, in the order in which one line builds on another; the largest batch stands for all."""
    lines, found = list(_cache(plan)), plan.focus
    if found is None or plan.model.decoder is None:
        return lines
    lines += _weights(plan.model.decoder, found)
    lines += _room(plan, plan.model.decoder, found)
    batch = max(plan.question.batches)
    lines += _decode(plan, found, batch)
    return lines + list(_limits(plan, found, batch))


def _cache(plan: ServingPlan) -> Iterator[Line]:
    cache, context = plan.model.cache, plan.question.context
    item = plan.question.itemsize(cache)
    yield "one layer, one token", f"{cache.formula} = {cache.per_layer:,} numbers ({cache.kind})"
    size = int(cache.per_token * item)
    yield "cache of a token", f"{cache.layers} layers x {cache.per_layer:,} x {float(item):g} bytes = {size:,} bytes"
    yield "cache of a request", f"{context:,} tokens x {size:,} = {_gb(context * size)}"
    if cache.slides(context):
        sees = f"{cache.seen(context):,} tokens seen, summed over layers"
        yield (
            "cache read for a token",
            f"{sees} x {cache.per_layer:,} x {float(item):g} = {_gb(int(cache.read(context) * item))}",
        )


def _weights(decoder: Decoder, found: FormatPlan) -> Iterator[Line]:
    weights = found.weights
    linear = decoder.linear_weights
    stored = f"{linear:,} weights x {weights.linear_bits:.4f} bits / 8 = {_gb(weights.linear_bytes)}"
    yield "linears of the blocks", f"{stored} ({weights.scheme})"
    embedding = f"{decoder.config.vocab:,} x {decoder.config.hidden:,} x {KEPT_BYTES}"
    if decoder.head:
        yield "embedding and lm_head", f"2 x {embedding} = {_gb(2 * KEPT_BYTES * decoder.embedding)}"
    else:
        yield "embedding, lm_head too", f"{embedding} = {_gb(KEPT_BYTES * decoder.embedding)} (one matrix)"
    yield decoder.others_title, f"{decoder.other:,} x {KEPT_BYTES} = {KEPT_BYTES * decoder.other:,} bytes"
    yield "weights", f"the sum of these = {_gb(weights.bytes)}, {weights.bits:.2f} bits a parameter"


def _room(plan: ServingPlan, decoder: Decoder, found: FormatPlan) -> Iterator[Line]:
    fit, reserve, config = found.fit, plan.reserve, decoder.config
    assert reserve is not None
    attention = config.attended
    others = config.attention_numbers - 2 * attention
    routed = f" + {config.routed_channels:,}" if config.routed_channels else ""
    wide = f"max(3 x {config.token_channels:,}{routed}, {others:,} + 2 x {attention:,}) + 3 x {config.hidden:,}"
    yield "activations of a step", f"{STEP_TOKENS:,} tokens x ({wide}) x 2 bytes = {_gb(reserve.hidden)}"
    channels = config.decoded_weights // (2 * config.hidden)  # of all experts of a layer, where it has some
    yield "a weight in 16 bit", f"{config.hidden:,} x {channels:,} x 2 x 2 bytes = {_gb(reserve.decoded)}"
    each = f"(512 rows x (2 + 12) bytes + {SEQUENCES} x 5 for penalties)"
    yield "logits", f"{config.vocab:,} x {each} = {_gb(reserve.logits)}"
    yield "CUDA and libraries", _gb(LIBRARIES)
    width = f"4 x ({config.token_channels:,} + {config.hidden:,} + {attention:,}){routed}"
    decoded = _gb(reserve.decoded)
    yield "CUDA graphs", f"{SEQUENCES} x {width} x 2 x 4 bytes + {decoded} + 64 MiB = {_gb(reserve.graphs)}"
    if config.latent is not None:
        rows = max(PIECE_ROWS, config.max_positions)
        made = max(EXPANDED_BYTES, rows * config.latent.expanded * KEPT_BYTES)
        gathered = f"{rows:,} tokens x {(reserve.expanded - made) // rows:,} bytes of their latents"
        yield "prompts over latents", f"{gathered} + {_gb(made)} of keys and values = {_gb(reserve.expanded)}"
    yield "engine", f"the sum of these {'five' if config.latent is None else 'six'} = {_gb(fit.reserve)}"
    yield (
        "memory to use",
        f"{SHARE:g} x {_gb(plan.gpu.memory)} ({plan.gpu.title}, {plan.gpu.source}) = {_gb(fit.available)}",
    )
    left = f"{_gb(fit.available)} - {_gb(fit.weights)} - {_gb(fit.reserve)} = {_gb(fit.cache)}"
    yield "left for the cache", left
    if fit.cache <= 0:
        return
    pages = f"{_gb(fit.cache)} / ({PAGE} tokens x {fit.page_bytes // PAGE:,} bytes) - 1 = {fit.pages:,} pages"
    yield "pages of the cache", pages
    requests = f"{fit.pages:,} / {fit.pages_per_request:,} pages of one = {fit.requests:,}"
    yield f"requests of {plan.question.context:,}", requests


def _decode(plan: ServingPlan, found: FormatPlan, batch: int) -> Iterator[Line]:
    ceiling, context, gpu = found.ceiling, plan.question.context, plan.gpu
    step = ceiling.decode(batch, context)
    for part in found.weights.routed:
        chosen = f"{_gb(part.bytes)} x (1 - (1 - {part.per_token} / {part.count})^{batch})"
        yield "experts that are read", f"{chosen} = {_gb(part.read(batch))}, where all are chosen equally often"
    read = f"{_gb(found.weights.read_for(batch))} + {batch} x {_gb(ceiling.cache_bytes(context))} = {_gb(step.bytes)}"
    yield "bytes of a step", f"weights read once + batch x cache read: {read}"
    moved = f"{_gb(step.bytes)} / {gpu.bandwidth / 1e12:.3g} TB/s = {1e3 * step.memory_seconds:.3f} ms"
    yield "time to move them", moved
    yield from _operations(ceiling, context)
    yield (
        "time to compute",
        f"{batch} x {1e6 * ceiling.token_seconds(context):.2f} us = {1e3 * step.compute_seconds:.3f} ms",
    )
    speed = f"{batch} / max of the two = {step.tokens_per_second:,.0f} tokens/s (bound by {step.bound})"
    yield f"decode, batch {batch}", speed


def _operations(ceiling: Ceiling, context: int) -> Iterator[Line]:
    gpu = ceiling.gpu
    for name, count in ceiling.weights.operations.items():
        what = f"2 x weights multiplied in {name} = {count / 1e9:.2f} G"
        took = f"{1e6 * count / gpu.rate(name):.2f} us"
        yield f"linears in {name}", f"{what} / {gpu.rate(name) / 1e12:,.0f} T/s = {took} a token"
    seen = ceiling.cache.seen(context)
    count = ceiling.attention_operations(seen)
    what = f"4 x {ceiling.attention_width:,} x {seen:,} = {count / 1e9:.2f} G"
    yield "attention", f"{what} / {gpu.bf16 / 1e12:,.0f} T/s = {1e6 * count / gpu.bf16:.2f} us a token"


def _limits(plan: ServingPlan, found: FormatPlan, batch: int) -> Iterator[Line]:
    ceiling, context = found.ceiling, plan.question.context
    prefill = f"{context:,} tokens / {1e3 * ceiling.prefill_seconds(context):.2f} ms"
    yield "prefill", f"{prefill} = {found.prefill_tokens_per_second:,.0f} tokens/s"
    rule = "weights / bandwidth / (time to compute a token - its cache / bandwidth)"
    limit = found.bandwidth_bound_up_to
    always = "never reached: the cache of a request takes longer to read than the request to compute"
    yield "bandwidth-bound up to", f"{rule} = {always if math.isinf(limit) else f'batch {limit:,.0f}'}"
    if found.name != UNQUANTIZED:
        at = "never up to 4,096" if found.stops_helping is None else f"batch {found.stops_helping:,}"
        yield "bf16 within 10 %", f"first batch with time of bf16 / time of {found.name} below 1.1: {at}"
    speed = next(speed for speed in found.speeds if speed.step.batch == batch)
    if speed.cost is not None:
        yield from _cost(plan.question, ceiling, speed)


def _cost(question: Question, ceiling: Ceiling, speed: Speed) -> Iterator[Line]:
    batch, prompt, new = speed.step.batch, question.prompt, question.new
    yield "mean context", f"{prompt:,} of the prompt + half of {new - 1:,} = {question.mean_context:,} tokens"
    prefill = f"{batch} prompts {1e3 * ceiling.prefill_seconds(prompt, batch):,.1f} ms"
    steps = f"{new - 1:,} steps x {1e3 * ceiling.decode(batch, question.mean_context).seconds:.3f} ms"
    rate = f"{speed.answers_per_second:,.0f} tokens/s"
    yield f"answers, batch {batch}", f"{batch} x {new:,} tokens / ({prefill} + {steps}) = {rate}"
    price, share = question.price_per_hour, question.efficiency
    yield "a million tokens out", f"{price:g} / (3600 x {rate} x {share:g}) x 10^6 = {speed.cost:.3f} (estimate)"


def _gb(count: float) -> str:
    return f"{count / 1e9:.3f} GB"
