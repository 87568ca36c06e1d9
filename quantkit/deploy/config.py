"""The file of `quantkit deploy`: which models, how many replicas of each, and one endpoint before them.

Keys of the endpoint are those of `quantkit serve` and mean the same; `options` of a model are those of its engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from quantkit.errors import InputError, did_you_mean
from quantkit.runtime.server.config_file import KEYS_VARIABLE, parse_api_keys, read_config
from quantkit.runtime.server.settings import ENGINE_OPTIONS, ServerSettings

RANKS = ("tensor_parallel", "expert_parallel", "pipeline_parallel")  # keys of a model, not of its options
MODEL_OPTIONS = tuple(
    dict.fromkeys((*(name for name in ENGINE_OPTIONS if name not in RANKS), "max_queue", "tool_parser"))
)
SHARED = ("api_keys_file", "rate_limit_requests_per_minute", "max_request_bytes", "request_timeout_seconds",
          "cors_origins", "allowed_hosts", "log_prompts", "log_level", "drain_seconds", "vllm_metric_names",
          "tls_certfile", "tls_keyfile")  # fmt: skip
_NAME = re.compile(r"[\w.@:/-]{1,128}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Http(_Strict):
    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(8000, ge=1, le=65535)
    fronts: int = Field(1, ge=1, le=64)  # processes that share the endpoint's work


class Replicas(_Strict):
    """How many engines share the requests for a model. More are started while more than `target_queue` requests are
    open for each of them."""

    min: int = Field(1, ge=1, le=1024)
    max: int = Field(1, ge=1, le=1024)
    target_queue: float = Field(16, gt=0)
    up_seconds: float = Field(10.0, ge=0)  # how long there must be too much work, or too little
    down_seconds: float = Field(300.0, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Replicas:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, but must be at least min, {self.min}")
        return self


class ModelPlan(_Strict):
    name: str
    path: str = Field(min_length=1)
    tensor_parallel: int = Field(1, ge=1, le=1024)
    expert_parallel: bool = False
    pipeline_parallel: int = Field(1, ge=1, le=1024)
    replicas: Replicas = Replicas.model_validate({})
    cpus: float = Field(1.0, gt=0)  # that Ray sets aside for each rank
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("1 to 128 letters, digits, '.', '_', '-', '@', ':' or '/'")
        return name

    @field_validator("replicas", mode="before")
    @classmethod
    def _number_of_replicas(cls, given: Any) -> Any:
        return {"min": given, "max": given} if type(given) is int else given

    @property
    def ranks(self) -> int:
        """Devices of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def deployment(self) -> str:
        """The name of its Ray Serve deployment, which is part of file names."""
        return "model-" + re.sub(r"[^\w.-]", "_", self.name)

    @property
    def margin(self) -> float:
        """How many more requests than the least busy replica the one with a request's prefix may have."""
        return max(2.0, self.replicas.target_queue / 2)


class DeployConfig(_Strict):
    http: Http = Http.model_validate({})
    models: list[ModelPlan] = Field(min_length=1)
    health_check_seconds: float = Field(10.0, gt=0)
    shared: dict[str, Any] = Field(default_factory=dict)  # keys of SHARED that the file gives

    @model_validator(mode="after")
    def _different_names(self) -> DeployConfig:
        for number, model in enumerate(self.models):
            for other in self.models[:number]:
                if model.deployment == other.deployment:
                    raise ValueError(f"models '{other.name}' and '{model.name}' need names that differ more")
        return self

    @property
    def front_settings(self) -> ServerSettings:
        """Settings of the endpoint. The model that they name is never loaded. As with `serve`, keys in the environment
        win over a file of keys."""
        given = {"model": "front", "host": self.http.host, "port": self.http.port, "page": False} | self.shared
        if keys := os.environ.get(KEYS_VARIABLE):
            given |= {"api_keys": parse_api_keys(keys), "api_keys_file": None}
        return ServerSettings.model_validate(given)

    def replica_settings(self, model: ModelPlan) -> ServerSettings:
        """Settings of one replica: who may ask was settled before a request comes here."""
        kept = ("max_request_bytes", "request_timeout_seconds", "log_prompts", "log_level", "vllm_metric_names")
        given: dict[str, Any] = {"model": model.path, "served_model_name": [model.name], "page": False}
        given |= {"allowed_hosts": ["*"]}
        given |= {name: self.shared[name] for name in kept if name in self.shared}
        given |= {name: getattr(model, name) for name in RANKS if name in ServerSettings.model_fields}
        return ServerSettings.model_validate(given | model.options)


def read_deploy_config(path: str | Path) -> DeployConfig:
    return parse_config(read_config(path), str(path))


def parse_config(given: Mapping[str, Any], where: str = "the configuration") -> DeployConfig:
    """Strict: unknown keys, wrong types and values that the engine would refuse are errors in one line."""
    known = ("http", "models", "health_check_seconds", *SHARED)
    for key in given:
        if key not in known:
            raise InputError(f"{where}: unknown key '{key}'; {did_you_mean(str(key), known)}")
    if not given.get("models"):
        raise InputError(f"{where}: no models; write `models: [{{name: chat, path: org/model}}]`")
    own = {key: value for key, value in given.items() if key not in SHARED}
    shared = {key: value for key, value in given.items() if key in SHARED}
    try:
        config = DeployConfig.model_validate(own | {"shared": shared})
    except ValidationError as failure:
        raise InputError(f"{where}: {_in_words(failure)}") from None
    try:
        config.front_settings  # noqa: B018  # checks the keys of SHARED
    except ValidationError as failure:
        raise InputError(f"{where}: {_in_words(failure)}") from None
    for number, model in enumerate(config.models):
        _check_options(config, model, f"models[{number}].options", where)
    return config


def _check_options(config: DeployConfig, model: ModelPlan, key: str, where: str) -> None:
    for option in model.options:
        if option not in MODEL_OPTIONS:
            raise InputError(f"{where}: unknown key '{key}.{option}'; {did_you_mean(str(option), MODEL_OPTIONS)}")
    if model.options.get("device", "auto") not in ("auto", "cpu", "cuda"):
        device = model.options["device"]
        raise InputError(f"{where}: {key}.device is {device!r}, but must be auto, cpu or cuda: Ray chooses which one")
    try:
        config.replica_settings(model)
    except ValidationError as failure:
        raise InputError(f"{where}: {_in_words(failure, key)}") from None


def fingerprint(*parts: Any) -> str:
    """A word that changes with what it is made from."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:12]


def _in_words(failure: ValidationError, inside: str = "") -> str:
    """The first error as one line; unknown keys come first, they explain the others."""
    errors = failure.errors(include_url=False)
    error = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    key = inside
    for part in error["loc"]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    if error["type"] == "extra_forbidden":
        kind = Replicas if ".replicas." in key else ModelPlan if key.startswith("models[") else Http
        return f"unknown key '{key}'; {did_you_mean(str(error['loc'][-1]), kind.model_fields)}"
    if error["type"] == "missing":
        return f"'{key}' is missing"
    if error["type"] == "value_error":
        wanted = str(error["ctx"]["error"])
        told_all = isinstance(error["input"], dict)  # of a whole block: the sentence says it all
        return (
            f"{key}: {wanted}".removeprefix(": ") if told_all else f"{key} is {error['input']!r}, but must be {wanted}"
        )
    return f"{key} is {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
