"""Gemma 3: output layers of 262,144 and 262,208 rows, heads of 256, windows; against transformers on the same GPU."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.pipeline.run import quantize
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.llm import LLM
from tiny_models import save_model

pytestmark = pytest.mark.gpu

GEMMA_3_1B: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32768,
}
PATTERN = ["sliding_attention"] * 5 + ["full_attention"]


@pytest.mark.parametrize(("vocab", "layers"), [(262_144, 26), (262_208, 6)])
def test_generating(vocab: int, layers: int, tmp_path: Path) -> None:
    kinds = (PATTERN * layers)[:layers]
    changes = {"num_hidden_layers": layers, "layer_types": kinds, "vocab_size": vocab}
    model = save_model("gemma3_text", tmp_path / "gemma", "bfloat16", **GEMMA_3_1B | changes).cuda()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocab, (length,), generator=generator).tolist() for length in (1, 60, 700)]
    for prompt in prompts[1:]:
        prompt[7] = vocab - 1  # its row is the last one of all
    params = SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    llm = LLM(tmp_path / "gemma", device="cuda", max_context=1024)
    exact = copy.deepcopy(model).float()
    for prompt, found in zip(prompts, llm.generate(prompts, params), strict=True):
        answer = found.answers[0].token_ids
        ids = torch.tensor([[*prompt, *answer]], device="cuda")
        with torch.no_grad():
            right, theirs = (one(ids).logits[0].float().log_softmax(-1) for one in (exact, model))
        noise = float((right - theirs).abs().mean())  # what bfloat16 costs transformers
        for place, token in enumerate(answer, start=len(prompt) - 1):
            assert float(right[place].max() - right[place, token]) < 0.1 + 5 * noise, (len(prompt), place)
        if found.prompt_logprobs is not None and len(prompt) > 1:
            ours = torch.tensor(found.prompt_logprobs[1:], device="cuda")
            expected = right[: len(prompt) - 1].gather(1, ids[0, 1 : len(prompt), None])[:, 0]
            assert float((ours - expected).abs().mean()) < 1.5 * noise + 0.01
    del llm, model, exact
    quantize(tmp_path / "gemma", "rtn-w4g128", tmp_path / "w4", device="cuda", quality_windows=0)
    llm = LLM(tmp_path / "w4", device="cuda", max_context=1024, head_bits=4)
    drawn = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, top_p=0.9, seed=1)
    assert [one.answers[0].token_ids for one in llm.generate(prompts, drawn)] == [
        one.answers[0].token_ids for one in llm.generate(prompts, drawn)
    ]
