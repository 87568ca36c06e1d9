"""What is run: which tool, which method, how many bits; ours beside theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Tool:
    """A project's quantizer, and what its environment needs."""

    package: str  # whose version a row gives
    script: str = ""  # of tools/; none: the command line of quantkit
    requirements: tuple[str, ...] = ()


TOOLS = {
    "quantkit": Tool("quantkit"),
    "llm-compressor": Tool("llmcompressor", "by_llm_compressor", ("llmcompressor==0.14.0.1",)),
    "GPTQModel": Tool("gptqmodel", "by_gptqmodel", ("gptqmodel==7.6.0",)),
    "auto-round": Tool("auto-round", "by_auto_round", ("auto-round==0.16.1",)),
    "bitsandbytes": Tool(
        "bitsandbytes", "by_bitsandbytes", ("bitsandbytes==0.50.2", "transformers>=5.17", "accelerate>=1.10")
    ),
    "llama.cpp": Tool("gguf", "by_llama_cpp", ("gguf==0.19.0", "transformers>=5.17", "sentencepiece>=0.2")),
}


@dataclass(frozen=True)
class Job:
    """One checkpoint to make."""

    tool: str
    method: str
    bits: int = 4
    group: int | None = None  # None: the usual one of the model
    steps: int | None = None  # of learned rounding; None: the tool's own number
    calibrated: bool = True
    model: str | None = None  # None: every model

    def recipe(self, usual_group: int) -> str:
        """As quantkit names it."""
        if self.method in ("nf4", "llm-int8"):
            return self.method
        method, _, kind = self.method.partition(" ")
        return f"{method}-w{self.bits}g{self.group or usual_group}" + (f"-{kind}" if kind else "")


JOBS = (
    Job("quantkit", "rtn", calibrated=False),
    Job("quantkit", "nf4", calibrated=False),
    Job("quantkit", "llm-int8", 8),
    Job("quantkit", "gptq"),
    Job("quantkit", "gptq asym", model="smollm2"),
    Job("quantkit", "awq"),
    Job("quantkit", "best"),
    Job("quantkit", "gptq", 3),
    Job("bitsandbytes", "nf4", calibrated=False),
    Job("bitsandbytes", "llm-int8", 8, calibrated=False),
    Job("GPTQModel", "gptq"),
    Job("GPTQModel", "gptq", 3),
    Job("llm-compressor", "gptq"),
    Job("llm-compressor", "awq"),
    Job("auto-round", "auto-round"),
    Job("auto-round", "auto-round", steps=1000, model="smollm2"),  # an hour of two cores for the bundled model
    Job("auto-round", "auto-round", 3),
    Job("auto-round", "auto-round asym", 3, model="smollm2"),
    Job("auto-round", "auto-round asym", 3, steps=1000, model="smollm2"),
    Job("auto-round", "auto-round asym", 2, model="smollm2"),
    Job("auto-round", "auto-round asym", 2, steps=1000, model="smollm2"),
    Job("quantkit", "tuned", model="smollm2"),
    Job("quantkit", "tuned", 3, model="smollm2"),
    Job("quantkit", "tuned", 2, model="smollm2"),
    # Groups of 32 and of 16 within blocks of 256: rows of 576 do not divide, and a file that was 4 bits in groups of 32
    # before would come back as it was.
    Job("quantkit", "gptq", group=32, model="demo"),
    Job("quantkit", "awq", group=32, model="demo"),
    Job("llama.cpp", "Q4_K_S", group=32, model="demo"),
    Job("llama.cpp", "Q3_K_S", 3, group=16, model="demo"),
)


def chosen(model: str, tools: tuple[str, ...], methods: tuple[str, ...]) -> Iterator[Job]:
    """Jobs of a model; none named means all."""
    for job in JOBS:
        if job.model in (None, model) and (not tools or job.tool in tools) and (not methods or job.method in methods):
            yield job
