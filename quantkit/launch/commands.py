"""Commands that serve one checkpoint, one for each engine, or the reason why there is none."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.formats.engine_rules import EngineName
from quantkit.launch.ray_service import resource_name
from quantkit.launch.serve_commands import SERVE_COMMANDS, OllamaFile, ServeCommand, Words, fill
from quantkit.launch.target import Target

# Those that only serve come first, then ours.
ORDER: tuple[EngineName, ...] = (
    *("vLLM", "SGLang", "TensorRT-LLM", "TGI", "llama.cpp", "Ollama", "transformers", "quantkit"),
)
_NO_FLOAT16 = ("gemma2", "gemma3_text")  # vLLM refuses the dtype for them
_CUT_NOTHING_SMALL = ("vLLM", "SGLang")  # what `Dialect.cut_elsewhere` speaks about


@dataclass(frozen=True)
class Wishes:
    """What the user asks of a server beyond its model."""

    port: int | None = None
    kv_dtype: str | None = None
    chat_template: str | None = None  # a file, which other engines read


@dataclass(frozen=True)
class Launch:
    """One engine's command; without a command the remark says why it cannot."""

    engine: EngineName
    command: Words
    remark: str
    modelfile: str = ""  # Ollama's, which the command reads

    def to_dict(self) -> dict[str, Any]:
        line = shlex.join(self.command) if self.command else None
        said = {"engine": self.engine, "command": line, "arguments": list(self.command), "remark": self.remark}
        return said | ({"modelfile": self.modelfile} if self.modelfile else {})

    def lines(self) -> Iterator[str]:
        """As text for a shell."""
        if not self.command:
            yield f"# {self.engine} cannot: {self.remark}"
            return
        yield f"# {self.engine}" + (f" ({self.remark})" if self.remark else "")
        if self.modelfile:
            yield f"cat > Modelfile <<'END'\n{self.modelfile}END"
        yield shlex.join(self.command)


def launches(target: Target, wishes: Wishes = Wishes(), engines: Sequence[EngineName] = ORDER) -> tuple[Launch, ...]:
    """Each engine with its command, or the reason why there is none."""
    return tuple(_launch(target, wishes, engine) for engine in engines)


def _launch(target: Target, wishes: Wishes, engine: EngineName) -> Launch:
    verdict = target.verdicts[engine]
    refusal = verdict.remark if verdict.loads is False else _refusal(target, wishes, engine)
    if refusal:
        return Launch(engine, (), refusal)
    unknown = "" if verdict.loads else "not known whether it loads: "
    if engine == "Ollama":
        return _ollama(target, wishes, unknown + verdict.remark)
    return Launch(engine, _command(target, wishes, engine), unknown + verdict.remark)


def _refusal(target: Target, wishes: Wishes, engine: EngineName) -> str:
    """Why a checkpoint that the engine loads is not served by it as wished."""
    dialect, ranks = target.dialect, target.ranks
    if engine in _CUT_NOTHING_SMALL and ranks.tensor > 1 and dialect is not None and not dialect.cut_elsewhere:
        return (
            "it does not cut bitsandbytes checkpoints; use --pipeline-parallel "
            f"{ranks.world} instead, or another format"
        )
    kind = str(target.checkpoint.config.get("model_type"))
    if engine == "vLLM" and kind in _NO_FLOAT16 and _dtype(target) == "float16":
        return f"it refuses float16 for {kind}, and this layout or model asks for it; convert to compressed-tensors"
    if engine == "Ollama":
        divided = "it divides a model among GPUs by itself; leave the option away" if ranks.world > 1 else ""
        return divided or _no_cache(wishes, OllamaFile().kv)
    command = SERVE_COMMANDS[engine]
    if target.checkpoint.gguf is not None and not command.takes_files:
        return "its server takes no GGUF files; `quantkit import` makes a folder of one"
    return _without_flag(command, target, wishes) or _no_cache(wishes, command.kv)


def _without_flag(command: ServeCommand, target: Target, wishes: Wishes) -> str:
    asked = {
        "--tensor-parallel": (target.ranks.tensor > 1, command.tensor),
        "--pipeline-parallel": (target.ranks.pipeline > 1, command.pipeline),
        "--port": (wishes.port is not None, command.port),
        "--chat-template": (wishes.chat_template is not None, command.chat_template),
    }
    missing = [option for option, (wished, words) in asked.items() if wished and not words]
    return f"its command has no flag for {' and '.join(missing)}" if missing else ""


def _no_cache(wishes: Wishes, has: Collection[str]) -> str:
    if wishes.kv_dtype is None or wishes.kv_dtype in has:
        return ""
    return f"its command has no flag for a cache in {wishes.kv_dtype}" + (f", only {', '.join(has)}" if has else "")


def _command(target: Target, wishes: Wishes, engine: EngineName) -> Words:
    serve, dialect, ranks = SERVE_COMMANDS[engine], target.dialect, target.ranks
    words = (*serve.start, target.given if engine == "quantkit" else target.path)
    if target.checkpoint.gguf is not None and dialect is not None:  # no config.json says it
        words += tuple(dialect.serve_flags.get(engine, "").split())
    if serve.quantization and dialect is not None:
        words += fill(serve.quantization, dialect.quant_method)
    else:
        words += fill(serve.dtype, _dtype(target))
    words += fill(serve.context, target.max_context)
    words += fill(serve.tensor, ranks.tensor) if ranks.tensor > 1 else ()
    words += fill(serve.pipeline, ranks.pipeline) if ranks.pipeline > 1 else ()
    words += ("--expert-parallel",) if ranks.experts and engine == "quantkit" else ()
    words += serve.kv[wishes.kv_dtype] if wishes.kv_dtype is not None else ()
    words += fill(serve.port, wishes.port) if wishes.port is not None else ()
    return words + (fill(serve.chat_template, wishes.chat_template) if wishes.chat_template is not None else ())


def _dtype(target: Target) -> str:
    """Of activations: the checkpoint's own, and float16 where the kernels of a layout know nothing else."""
    if any(fmt.only_float16_elsewhere for fmt in target.formats):
        return "float16"
    return target.checkpoint.dtype if target.checkpoint.dtype == "float16" else "bfloat16"


def _ollama(target: Target, wishes: Wishes, remark: str) -> Launch:
    ollama, path = OllamaFile(), Path(target.path)
    lines = [ollama.source.format(path if path.is_absolute() else f"./{path}")]
    lines.append(ollama.context.format(target.max_context))
    if wishes.chat_template is not None:
        lines.append(ollama.chat_template.format(_read(wishes.chat_template)))
    environment = [ollama.kv[wishes.kv_dtype]] if wishes.kv_dtype is not None else []
    environment += [ollama.port.format(wishes.port)] if wishes.port is not None else []
    if environment:
        remark = "; ".join(filter(None, (remark, f"start its server with {' '.join(environment)}")))
    command = fill(ollama.create, resource_name(path.stem))
    return Launch("Ollama", command, remark, "".join(f"{line}\n" for line in lines))


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip("\n")
    except (OSError, UnicodeError) as error:
        raise InputError(f"--chat-template {file} cannot be read: {error}") from error
