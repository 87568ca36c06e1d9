"""quantkit's engine as a model of lm-eval. Texts become tokens as in lm-eval's own `hf` model, so that scores are the
same item by item: special tokens, where a context ends, which tokens of an over-long item are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance  # type: ignore[import-untyped]
from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-untyped]

from quantkit.errors import InputError
from quantkit.eval.tasks.generation import answer_text, generation_settings
from quantkit.eval.tasks.scoring import Job, run_jobs, score
from quantkit.progress import Progress, silent
from quantkit.runtime.llm import LLM

Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, tokens of the context, tokens of the continuation


class EngineModel(TemplateLM):  # type: ignore[misc]
    """What lm-eval asks of a model, answered by an engine with all requests at once.

    `truncated` counts the items that were cut to the model's context so far.
    """

    def __init__(self, llm: LLM, *, on_item: Progress = silent) -> None:
        super().__init__()
        if llm.tokenizer is None:
            raise InputError("tasks are texts, and this model folder has no tokenizer; copy it from the original model")
        self.llm = llm
        self.tokenizer: Any = llm.tokenizer
        self.truncated = 0
        self._on_item = on_item
        if self.prefix_token_id is None:
            raise InputError("this model's tokenizer has neither a begin nor an end token, and tasks need one of them")

    @property
    def device(self) -> torch.device:
        return self.llm.engine.runner.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.llm.engine.runner.decoder.weights.dtype

    @property
    def max_length(self) -> int:
        """Tokens that the model may see before one that it predicts."""
        return self.llm.engine.memory.max_context - 1

    @property
    def max_gen_toks(self) -> int:
        """Of tasks that do not say how long their answers may be: as in lm-eval's `hf` model."""
        return 256

    @property
    def eot_token_id(self) -> int:
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        first: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as one text. Templates that refuse a system message get it without."""
        from jinja2 import TemplateError

        how = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return str(self.tokenizer.apply_chat_template(chat_history, **how))
        except TemplateError:
            without = [message for message in chat_history if message["role"] != "system"]
            return str(self.tokenizer.apply_chat_template(without, **how))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """None: the tokenizer's own first token is added, unless the text has it already."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        for request in requests:
            if not "".join(request.args):
                raise InputError(f"{_where(request)} has neither context nor continuation; nothing can be scored")
        scored: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scored

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        windows: list[Pair] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found: list[Pair] = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += found
            owners += [index] * len(found)
        sums = [0.0] * len(requests)
        for index, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[index] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        jobs, stops = [], []
        for index, request in enumerate(requests):
            context, given = request.args
            params, until = generation_settings(given, self.tokenizer, self.max_gen_toks)
            assert params.max_tokens is not None
            prompt = self._prompt(context, self.max_length + 1 - params.max_tokens, _where(request))
            jobs.append(Job(index, prompt, params))
            stops.append(until)
        jobs.sort(key=lambda job: -len(job.prompt))
        texts = [""] * len(requests)
        for job, _, outputs in run_jobs(self.llm.engine, jobs, self.tokenizer):
            tokens = [output.token for output in outputs if output.token is not None]
            texts[job.item] = answer_text(self.tok_decode(tokens), stops[job.item])
            self.cache_hook.add_partial("generate_until", requests[job.item].args, texts[job.item])
            self._on_item("", len(requests))
        return texts

    def _prompt(self, context: str, room: int, where: str) -> list[int]:
        """The last tokens of a context that leave room for the answer."""
        if room < 1:
            raise InputError(f"{where} wants longer answers than the model's {self.max_length + 1} tokens allow")
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        self.truncated += len(tokens) > room
        return tokens[-room:]

    def _loglikelihood_tokens(self, requests: list[Pair], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        pairs = []
        for texts, context, continuation in requests:
            if not 1 <= len(continuation) <= self.max_length:
                raise InputError(
                    f"a continuation has {len(continuation)} tokens, but this model can score 1 to {self.max_length}: "
                    f"{texts[1][:60] if texts else ''!r}; leave the item out"
                )
            room = self.max_length + 1 - len(continuation)  # the last token is predicted only
            self.truncated += len(context) > room
            pairs.append((context[-room:], continuation))
        answers = [(one.logprob, one.greedy) for one in score(self.llm.engine, pairs, self._on_item)]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers


def _where(request: Instance) -> str:
    return f"item {request.doc_id} of task '{request.task_name}'"
