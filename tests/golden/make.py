"""Makes the checkpoints of this folder again: the tiny model, and what one other tool makes of it.

    python tests/golden/make.py base
    python tests/golden/make.py bitsandbytes     in an environment that has it; so with gptqmodel and llmcompressor

Beside every checkpoint stand the logits that transformers computes when it loads it with the tool's own package.
"""

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
BASE = HERE / "base"
GROUP, VOCAB = 32, 128
IDS = torch.arange(2 * 24).reshape(2, 24) * 37 % 120 + 3


def calibration() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (64,), generator=generator) for _ in range(64)]


def make_base() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(BASE)
    words = Tokenizer(models.WordLevel({f"<{token}>": token for token in range(VOCAB)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<0>", bos_token="<1>", eos_token="<2>").save_pretrained(
        BASE
    )
    keep_logits(BASE)


def make_bitsandbytes() -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    kinds = {
        "nf4-double": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        "fp4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
    }
    for name, config in kinds.items():
        folder = HERE / f"bitsandbytes-{name}"
        loaded = AutoModelForCausalLM.from_pretrained(
            BASE, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
        )
        loaded.save_pretrained(folder)
        keep_logits(folder)


def make_gptqmodel() -> None:
    os.cpu_count = lambda: 8  # its pools of threads do not start on two cores
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization import QuantizeConfig

    for name, symmetric in (("gptq-sym", True), ("gptq-asym", False)):
        folder = HERE / f"gptqmodel-{name}"
        model = GPTQModel.load(
            str(BASE), QuantizeConfig(bits=4, group_size=GROUP, sym=symmetric, offload_to_disk=False), device="cpu"
        )
        rows = [{"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]} for ids in calibration()]
        model.quantize(rows, backend=BACKEND.GPTQ_TORCH)
        model.save(str(folder))
        keep_logits(folder)


def make_llmcompressor() -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers import AutoModelForCausalLM

    grouped = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
    scheme = QuantizationScheme(targets=["Linear"], weights=grouped)
    kinds = {
        "w4a16": GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]),
        "w8a8": GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
        "fp8": QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"]),
    }
    rows = [{"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)} for ids in calibration()]
    for name, modifier in kinds.items():
        folder = HERE / f"llmcompressor-{name}"
        model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16)
        oneshot(
            model=model, dataset=Dataset.from_list(rows), recipe=modifier, max_seq_length=64, num_calibration_samples=64
        )
        model.save_pretrained(folder, save_compressed=True)
        keep_logits(folder)


def keep_logits(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu").eval()
    with torch.no_grad():
        logits = loaded(IDS).logits.float().contiguous()
    save_file({"input_ids": IDS, "logits": logits}, folder / "expected.safetensors")
    print(folder.name, f"{sum(file.stat().st_size for file in folder.iterdir()):,} bytes")


MAKERS: dict[str, Callable[[], None]] = {
    "base": make_base,
    "bitsandbytes": make_bitsandbytes,
    "gptqmodel": make_gptqmodel,
    "llmcompressor": make_llmcompressor,
}

if __name__ == "__main__":
    tool = sys.argv[1]
    MAKERS[tool]()
    print(tool, "" if tool == "base" else version(tool), "transformers", version("transformers"))
