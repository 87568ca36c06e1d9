"""One model that is served: all that a handler needs to answer with it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from quantkit.errors import InputError
from quantkit.runtime.server.engine_process.client import EngineClient, EngineInfo
from quantkit.runtime.server.engine_process.pending import EngineDied
from quantkit.runtime.server.metrics import ServerMetrics
from quantkit.runtime.server.models.admission import AdmissionQueue
from quantkit.runtime.server.models.prompts import Prompts
from quantkit.runtime.server.schemas.logprobs import TokenTexts
from quantkit.runtime.server.settings import ServerSettings
from quantkit.runtime.server.version import package_version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quantkit.runtime.server.shadow import ShadowWatch


MOST_TOKENIZING = 16  # requests for tokens that may wait


@dataclass(frozen=True)
class ServedModel:
    """A model whose engine is ready; `make_served_model` makes one."""

    settings: ServerSettings
    client: EngineClient
    prompts: Prompts
    metrics: ServerMetrics
    queue: AdmissionQueue
    tokenizing: AdmissionQueue  # for those who want tokens only
    names: tuple[str, ...]  # of the model, as clients ask for it
    started: int  # when, as a Unix time
    token_texts: TokenTexts
    shadow: ShadowWatch | None = None

    @property
    def info(self) -> EngineInfo:
        if self.client.info is None:
            raise EngineDied("the engine is not ready yet; try again in a moment")
        return self.client.info

    @property
    def fingerprint(self) -> str:
        """Changes with everything that may change an answer to the same request."""
        info = self.info
        parts = (package_version(), info.model, info.format, info.device, info.dtype, info.kv_dtype)
        return "qk_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def make_served_model(
    settings: ServerSettings,
    client: EngineClient,
    tokenizer: PreTrainedTokenizerBase | None,
    shadow: ShadowWatch | None = None,
) -> ServedModel:
    """One model, ready for requests. Without a tokenizer, nothing could become text."""
    if tokenizer is None:
        raise InputError(f"'{settings.model}' has no tokenizer, which a server needs; copy tokenizer.json there")
    assert client.info is not None, "the engine must be ready"
    names = tuple(settings.names)
    metrics = ServerMetrics(
        lambda: client.stats,
        client.info,
        settings.vllm_metric_names,
        model_name=names[0],
        restarts=lambda: client.restarts,
        shadow=lambda: None if shadow is None else asdict(shadow.numbers()),
        ready=lambda: client.ready,
    )
    return ServedModel(
        settings=settings,
        client=client,
        prompts=Prompts(tokenizer),
        metrics=metrics,
        queue=AdmissionQueue(client.info.max_sequences, settings.max_queue),
        tokenizing=AdmissionQueue(1, MOST_TOKENIZING),
        names=names,
        started=int(time.time()),
        token_texts=TokenTexts(tokenizer),
        shadow=shadow,
    )
