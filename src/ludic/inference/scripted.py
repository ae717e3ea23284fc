"""`ScriptedClient`: a policy client that returns given texts, immediately and without a model.

It keeps the whole contract of a real client (token ids in and out, log-probs, limits), so everything above it can be tried,
demonstrated and measured without weights.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ludic.inference.templates.chat import ByteTemplate
from ludic.types import (
    ChatResponse,
    ConfigError,
    Info,
    PromptTooLong,
    TokenArray,
    TokenCompletionRequest,
    VersionRun,
    token_array,
)

_BYTES = ByteTemplate()
Reply = Callable[[TokenCompletionRequest], str]


class ScriptedClient:
    """Returns the given texts in order, or what a function makes of the request.

    Its tokens are ByteTemplate's; with an HFChatTemplate it needs that template's `tokenizer`.
    """

    def __init__(
        self,
        replies: Iterable[str] | Reply,
        *,
        tokenizer: Any = None,
        max_prompt_tokens: int | None = None,
        version: int = 0,
    ) -> None:
        self._next = replies if callable(replies) else _in_order(replies)
        self._tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        self.version = version

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        await asyncio.sleep(0)  # let other episodes run, as with a real server
        num_tokens = len(request.prompt_token_ids)
        if self.max_prompt_tokens is not None and num_tokens > self.max_prompt_tokens:
            raise PromptTooLong(num_tokens, self.max_prompt_tokens)
        text = self._next(request)
        ids = self._encode(text)
        finish_reason = "stop"
        if len(ids) > request.sampling.max_tokens:
            ids = ids[: request.sampling.max_tokens]
            text = self._decode(ids)
            finish_reason = "length"
        response = ChatResponse(
            text=text,
            prompt_token_ids=request.prompt_token_ids,
            completion_token_ids=ids,
            # A scripted reply has probability 1.
            completion_logprobs=np.zeros(len(ids), np.float32) if request.return_.return_chosen_logprobs else None,
            finish_reason=finish_reason,
            version_runs=(VersionRun(self.version, len(ids)),),
        )
        return response, {}

    def _encode(self, text: str) -> TokenArray:
        if self._tokenizer is None:
            return np.append(_BYTES.encode(text), np.int32(ByteTemplate.END))
        return token_array(
            [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
        )

    def _decode(self, ids: TokenArray) -> str:
        if self._tokenizer is None:
            return _BYTES.decode_reply(ids)
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return text

    def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        raise RuntimeError("A ScriptedClient has no weights to replace.")


def _in_order(replies: Iterable[str]) -> Reply:
    script = iter(replies)

    def next_reply(request: TokenCompletionRequest) -> str:
        try:
            return next(script)
        except StopIteration:
            raise ConfigError("ScriptedClient has no replies left; give it more of them.") from None

    return next_reply
