"""Everything that can be set about a server: the flags of `quantkit serve` and the keys of its configuration file.

    command line  >  environment (QUANTKIT_API_KEYS)  >  configuration file  >  defaults

A field's description is its help text; `docs/reference/serving.md` explains them for operators.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from quantkit.devices import NAMES, is_device_name
from quantkit.errors import InputError, did_you_mean
from quantkit.runtime.server.config_file import (
    KEYS_VARIABLE,
    ApiKey,
    matching_key,
    parse_api_keys,
    read_api_keys,
    read_config,
    read_watermark_key,
)
from quantkit.runtime.server.hosts import is_loopback
from quantkit.runtime.server.virtual_models import VirtualModel

ENGINE_OPTIONS = (
    "device",
    "dtype",
    "max_context",
    "max_sequences",
    "step_tokens",
    "kv_dtype",
    "arithmetic",
    "head_bits",
    "kv_tokens",
    "memory_share",
    "swap_gib",
    "share_prefixes",
    "warm_up",
    "tensor_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "micro_batches",
    "speculative",
)
_SECRETS = {"api_keys": "api_keys_file", "watermark_key": "watermark_key_file"}  # and what names a file of them
_ORIGIN = re.compile(r"https?://[^/\s]+|\*")
_COLLECTOR = re.compile(r"https?://[^\s?#]+")
_AMOUNT = re.compile(r"\d{1,9}(\.\d{1,9})?")
_MUST_BE = {  # by pydantic's kind of error
    "bool_type": "true or false",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "string_type": "text",
    "string_too_short": "text",
}


class ServerSettings(BaseModel):
    """One server. None means: no limit, not used, or (for the engine) chosen for the model and the device."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    model: str = Field(min_length=1, description="A folder, a hub name such as org/model, or `demo`.")
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0: all interfaces.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    served_model_name: list[str] = Field(
        default_factory=list, description="Name of the model in the API; default: the hub name, or that of the folder."
    )
    api_keys_file: str | None = Field(
        None, description="File with one `name: key` per line; without it (and QUANTKIT_API_KEYS) anybody may ask."
    )
    rate_limit_requests_per_minute: int | None = Field(
        None, ge=1, description="Requests per minute for each API key, or each address where there are no keys."
    )
    max_queue: int = Field(256, ge=1, description="Requests that may wait for the engine; more are refused with 429.")
    max_request_bytes: int = Field(8 << 20, ge=1024, description="Largest body of a request.")
    request_timeout_seconds: float = Field(600.0, gt=0, description="A request that takes longer is ended.")
    cors_origins: list[str] = Field(
        default_factory=list,
        description="Origin of web pages that may call the API, such as https://chat.example.org; * for all.",
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Name under which a server without API keys on a loopback address may be asked, besides localhost,"
        " such as that of a proxy; * for all.",
    )
    max_connections: int = Field(2048, ge=1, description="Open connections; more are refused with 503.")
    log_prompts: bool = Field(False, description="Write prompts into the log; they may hold private text.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level to log.")
    tls_certfile: str | None = Field(None, description="Certificate chain (PEM), to serve https.")
    tls_keyfile: str | None = Field(None, description="Private key of the certificate (PEM).")
    drain_seconds: float = Field(
        30.0,
        ge=0,
        description="Time for accepted requests to finish after SIGTERM or Ctrl-C; a second signal ends at once.",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="Send a trace of every request to this OpenTelemetry collector, such as http://127.0.0.1:4318.",
    )
    vllm_metric_names: bool = Field(False, description="Expose metrics under the names of vLLM too.")
    shadow: str | None = Field(None, min_length=1, description="A second model that answers a sample, to compare.")
    shadow_rate: float = Field(0.05, gt=0, le=1, description="Share of requests that the shadow answers too.")
    page: bool = Field(True, description="Serve the web page at /.")
    tgi_routes: bool = Field(False, description="Answer /generate, /generate_stream, /info and POST / as TGI does.")
    watermark_key_file: str | None = Field(
        None, description="File with the secret of watermarks; without it requests for one are refused."
    )
    tool_parser: Literal["auto", "hermes", "llama3", "none"] = Field(
        "auto", description="How the model writes tool calls; auto: from its chat template."
    )
    device: str = Field("auto", description=f"{NAMES}.")
    dtype: Literal["float16", "bfloat16", "float32"] | None = Field(
        None, description="Dtype of activations; default: the checkpoint's, on a CPU float32."
    )
    max_context: int | None = Field(None, ge=1, description="Tokens of prompt and answer; default: the model's.")
    max_sequences: int | None = Field(None, ge=1, description="Most concurrent answers; default: 256, on a CPU 16.")
    step_tokens: int | None = Field(None, ge=1, description="Most tokens in one step; default: 8192, on a CPU 512.")
    kv_dtype: Literal["auto", "bf16", "fp8", "int8", "int4"] = Field(
        "auto", description="KV cache: auto (as activations), bf16, fp8, int8 or int4."
    )
    arithmetic: Literal["16-bit", "fp8", "fp8-copy"] | None = Field(
        None, description="Of packed weights where a step has many tokens; default: as the checkpoint says."
    )
    head_bits: Literal[8, 4] | None = Field(None, description="Round the output layer to this many bits while loading.")
    kv_tokens: int | None = Field(None, ge=1, description="Tokens in the cache; default: what memory allows.")
    memory_share: float = Field(0.9, ge=0.05, le=0.98, description="Share of the GPU's memory to use.")
    cache_split: str | None = Field(
        None, description="How several models divide what memory is left for caches, as a=60,b=40; default: evenly."
    )
    swap_gib: float = Field(
        0.0, ge=0, lt=1e6, description="Host memory in GiB for requests that are preempted; 0: none."
    )
    share_prefixes: bool = Field(True, description="Requests with the same beginning share its cache pages.")
    tensor_parallel: int = Field(1, ge=1, le=1024, description="GPUs among which every layer is divided.")
    expert_parallel: bool = Field(
        False, description="With tensor_parallel: divide the experts of a layer among the GPUs."
    )
    pipeline_parallel: int = Field(
        1, ge=1, le=1024, description="Stages of consecutive blocks, each on GPUs of its own."
    )
    micro_batches: int | None = Field(
        None, ge=1, description="Steps in flight through the stages; default: one for each stage."
    )
    speculative: str | None = Field(
        None,
        min_length=1,
        description="Speculative decoding: ngram,k=8, draft=PATH,k=4, self=RECIPE, medusa=PATH or eagle=PATH,k=4.",
    )
    warm_up: Literal["all", "background", "none"] = Field(
        "all",
        description="Kernels and graphs for every load: all before the first request, in the background while requests "
        "are answered, or none before it is needed.",
    )
    virtual_models: tuple[VirtualModel, ...] = Field((), description="Of several models; written in the file alone.")
    api_keys: tuple[ApiKey, ...] = Field((), repr=False, exclude=True, description="Read from file or environment.")
    watermark_key: str | None = Field(None, repr=False, exclude=True, description="Read from the file.")

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not is_device_name(device):
            raise ValueError(NAMES)
        return device

    @field_validator("warm_up", mode="before")
    @classmethod
    def _warm_up(cls, given: Any) -> Any:
        """Files of earlier versions have true or false."""
        return {True: "all", False: "none"}[given] if isinstance(given, bool) else given

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: list[str]) -> list[str]:
        if not all(_ORIGIN.fullmatch(origin) for origin in origins):
            raise ValueError("origins such as https://chat.example.org (no path), or *")
        return origins

    @field_validator("otlp_endpoint")
    @classmethod
    def _collector(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not _COLLECTOR.fullmatch(endpoint):
            raise ValueError("the address of a collector for OTLP over HTTP, such as http://127.0.0.1:4318")
        return endpoint

    @field_validator("served_model_name")
    @classmethod
    def _names(cls, names: list[str]) -> list[str]:
        if not all(names) or len(set(names)) < len(names):
            raise ValueError("different names that are not empty")
        return names

    @field_validator("cache_split")
    @classmethod
    def _parts(cls, split: str | None) -> str | None:
        parse_parts(split or "")
        return split

    @model_validator(mode="after")
    def _consistent(self) -> ServerSettings:
        if (self.tls_certfile is None) != (self.tls_keyfile is None):
            raise InputError("tls_certfile and tls_keyfile belong together; give both or none")
        if self.api_keys_file is not None and not self.api_keys:
            object.__setattr__(self, "api_keys", read_api_keys(self.api_keys_file))
        if self.watermark_key_file is not None and self.watermark_key is None:
            object.__setattr__(self, "watermark_key", read_watermark_key(self.watermark_key_file))
        return self

    @property
    def names(self) -> list[str]:
        """Of the model, as clients ask for it; the first is in answers. Never a path of this machine."""
        folder = Path(self.model)
        return self.served_model_name or [folder.resolve().name if folder.is_dir() else self.model]

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def warning(self) -> str | None:
        """What an operator should know before anybody asks."""
        if self.api_keys or self.on_loopback:
            return None
        return f"no API keys, and {self.host} is no loopback address: whoever reaches it may ask"

    @property
    def engine_options(self) -> dict[str, Any]:
        """What `EngineOptions` takes."""
        return {name: getattr(self, name) for name in ENGINE_OPTIONS}

    @property
    def shadow_engine_options(self) -> dict[str, Any]:
        """The reference answers one prompt at a time, so its cache holds one context."""
        return self.engine_options | {
            "max_sequences": 1,
            "kv_tokens": None,
            "swap_gib": 0.0,
            "warm_up": "none",
            "micro_batches": None,
            "speculative": None,
        }

    def key_name(self, given: str) -> str | None:
        """The name of the API key that was given; None for an unknown one."""
        return matching_key(given, self.api_keys)


FLAGS = tuple(name for name in ServerSettings.model_fields if name not in ("model", "virtual_models", *_SECRETS))


def load_settings(
    flags: Mapping[str, Any], config: str | Path | None = None, environment: Mapping[str, str] | None = None
) -> ServerSettings:
    """Settings from the flags that were given (None: not given), the environment and a file, in this order."""
    return merge_settings(flags, read_config(config) if config is not None else {}, config, environment)


def merge_settings(
    flags: Mapping[str, Any],
    from_file: Mapping[str, Any],
    config: str | Path | None,
    environment: Mapping[str, str] | None = None,
) -> ServerSettings:
    """As `load_settings`, with a file that was read before; `config` is what errors call it."""
    environment = os.environ if environment is None else environment
    given = {name: value for name, value in flags.items() if value is not None}
    for secret, file in _SECRETS.items():
        if secret in from_file:
            raise InputError(f"{config}: '{secret}' cannot stand in this file; name a file of keys with '{file}'")
    merged = dict(from_file) | given
    if environment.get(KEYS_VARIABLE) and "api_keys_file" not in given:
        merged |= {"api_keys": parse_api_keys(environment[KEYS_VARIABLE]), "api_keys_file": None}
    if "model" not in merged:
        raise InputError(
            "no model is named; run `quantkit serve MODEL`, or write `model: ...` into the file of --config"
        )
    try:
        return ServerSettings.model_validate(merged)
    except ValidationError as failure:
        raise InputError(_in_words(failure, given, config)) from None  # pydantic's own text repeats what was given


def parse_parts(split: str) -> dict[str, float]:
    """{"a": 60.0, "b": 40.0} of "a=60,b=40"."""
    found: dict[str, float] = {}
    for part in filter(None, split.split(",")):
        name, _, amount = part.rpartition("=")
        if not name.strip() or not _AMOUNT.fullmatch(amount.strip()) or not float(amount) or name.strip() in found:
            raise ValueError("a number above 0 for each model, such as a=60,b=40")
        found[name.strip()] = float(amount)
    return found


def _in_words(failure: ValidationError, flags: Mapping[str, Any], config: str | Path | None) -> str:
    """The first error as one line; unknown keys come first, they explain the others."""
    errors = failure.errors(include_url=False)
    error = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    key = str(error["loc"][0])
    where = f"--{key.replace('_', '-')}" if key in flags and key != "model" else f"'{key}'"
    source = "" if key in flags or config is None else f"{config}: "
    if error["type"] == "extra_forbidden":
        return f"{source}unknown key '{key}'; {did_you_mean(key, ('model', 'models', 'virtual_models', *FLAGS))}"
    if error["type"] == "value_error":
        wanted = str(error["ctx"]["error"])
    elif error["type"] in _MUST_BE:
        wanted = _MUST_BE[error["type"]].format(**error.get("ctx", {}))
    else:
        wanted = error["msg"]
    inside = "a list of text" if len(error["loc"]) > 1 else wanted
    return f"{source}{where} is {error['input']!r}, but must be {inside}"
