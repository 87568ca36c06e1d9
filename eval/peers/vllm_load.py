"""Our checkpoints in vLLM: prompt log-probabilities against our reference, one row for each checkpoint.

    python -m quantkit.eval.peers.vllm_load checkpoints --make demo
    python -m quantkit.eval.peers.vllm_load checkpoints --only gptq-w4g128,fp8 --again

The first command makes what is missing in the folder and runs all of it; given again, it goes on where it was. Rows go
to eval/results/interop.csv, what vLLM prints to FOLDER/vLLM.log. docs/reference/interop.md says how to install vLLM.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.eval.interop.run import add_arguments, run
from quantkit.eval.interop.table import load_table
from quantkit.formats import CtPacked, dialect_of

# Read when vLLM is imported. In a process of its own, its engine would outlive this one and hold the GPU's memory.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_SPARE = 16  # tokens beyond a window
_MEMORY_SHARE = 0.2
_LEFT_BEHIND = 512 << 20  # bytes on the GPU after which the next checkpoint gets a new process
_MARLIN_BITS = (4, 8)  # other widths need Humming's kernels


class VllmAdapter:
    """vLLM in this process, eager: compiling would take longer than everything else."""

    engine = "vLLM"
    distribution = "vllm"
    excuses: tuple[str, ...] = (
        "Error in memory profiling",
    )  # another process gave back memory of the GPU while it started

    def __init__(self) -> None:
        self._llm: Any = None

    def packages(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """vLLM 0.26 reads bitsandbytes by itself, with that package; later versions want a plugin."""
        method = dialect_of(checkpoint.formats).quant_method if checkpoint.formats else ""
        needed: list[str] = [name for name in ("bitsandbytes", "compressed-tensors") if name == method]
        if any(isinstance(fmt, CtPacked) and fmt.bits not in _MARLIN_BITS for fmt in checkpoint.formats.values()):
            needed.append("humming-kernels")
        return tuple(needed)

    def load(self, checkpoint: Checkpoint, window: int) -> str:
        os.environ.update(ENVIRONMENT)
        from vllm import LLM

        arguments = load_arguments(checkpoint, window)
        self._llm = LLM(**arguments)
        return str(arguments["dtype"])

    def logprobs(self, ids: Tensor) -> Tensor:
        from vllm import SamplingParams

        answers = self._llm.generate(token_prompts(ids.tolist()), SamplingParams(**SCORING), use_tqdm=False)
        found = [
            [said[token].logprob for said, token in zip(answer.prompt_logprobs[1:], row[1:], strict=True)]
            for answer, row in zip(answers, ids.tolist(), strict=True)
        ]
        return torch.tensor(found, dtype=torch.float64)

    def forget(self) -> bool:
        self._llm = None
        gc.collect()
        if "vllm.distributed" not in sys.modules:
            return True
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        return torch.cuda.memory_allocated() < _LEFT_BEHIND


SCORING = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}


def load_arguments(checkpoint: Checkpoint, window: int) -> dict[str, Any]:
    """Of `vllm.LLM`. float16 where the layout has kernels for nothing else."""
    half = any(fmt.only_float16_elsewhere for fmt in checkpoint.formats.values()) or checkpoint.dtype == "float16"
    arguments = {
        "model": str(checkpoint.folder.absolute()),
        "dtype": "float16" if half else "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": window + _SPARE,
        "gpu_memory_utilization": _MEMORY_SHARE,
    }
    if checkpoint.formats and dialect_of(checkpoint.formats).quant_method == "bitsandbytes":
        arguments |= {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    return arguments


def token_prompts(rows: Sequence[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": row} for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    given = parser.parse_args(arguments)
    typed = ["python", "-m", "quantkit.eval.peers.vllm_load", *(sys.argv[1:] if arguments is None else arguments)]
    try:
        found = run("vLLM", given, typed, lambda line: print(line, flush=True))
    except QuantkitError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    print(load_table(found, found[0]["model"]) if found else "no rows")


if __name__ == "__main__":
    main()
