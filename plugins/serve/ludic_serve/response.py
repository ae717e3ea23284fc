"""Writes OpenAI-shaped answers, whole or streamed."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ludic.inference.templates.chat import ChatTemplate
from ludic.types import ChatResponse, TokenChunk, TokenCompletionRequest, ToolCall
from ludic.util.text_stream import TextStream
from ludic_serve.request import Body, JSONObject

_LOWEST_LOGPROB = -9999.0


class Answer:
    """The replies to one body as JSON, whole or in events."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    event_kind: ClassVar[str]
    hold_from = ""

    def __init__(self, model_name: str, tokenizer: Any, requests: list[TokenCompletionRequest], body: Body) -> None:
        self.requests = requests
        self.is_streamed = body.stream
        self.include_usage = body.stream and bool(body.stream_options.include_usage)
        self._num_samples = body.n
        self._with_ids = body.return_token_ids
        self._with_logprobs = requests[0].return_.return_chosen_logprobs
        self.num_sampled = 0
        """Tokens that went through `events`."""
        self._tokenizer = tokenizer
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model_name}
        self._streams = [
            TextStream(self._decode, stops=tuple(r.sampling.stop or ()), hold_from=self.hold_from) for r in requests
        ]
        self._has_begun = [False] * len(requests)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self._num_samples])

    def whole(self, responses: Sequence[ChatResponse]) -> JSONObject:
        num_sampled = sum(len(response.completion_token_ids) for response in responses)
        choices = [self._choice(index, response) for index, response in enumerate(responses)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage(num_sampled)}

    def events(self, index: int, chunk: TokenChunk) -> Iterator[JSONObject]:
        self.num_sampled += len(chunk.token_ids)
        for choice in self._deltas(index, chunk):
            usage = {"usage": None} if self.include_usage else {}
            yield {**self._head, "object": self.event_kind, "choices": [choice], **usage}
        self._has_begun[index] = True

    def usage_event(self) -> JSONObject:
        return {**self._head, "object": self.event_kind, "choices": [], "usage": self._usage(self.num_sampled)}

    def _usage(self, num_sampled: int) -> JSONObject:
        num_prompt = self.num_prompt_tokens
        return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}

    def _choice(self, index: int, response: ChatResponse) -> JSONObject:
        raise NotImplementedError

    def _deltas(self, index: int, chunk: TokenChunk) -> Iterator[JSONObject]:
        raise NotImplementedError

    def _logprobs(self, ids: list[int], logprobs: list[float]) -> JSONObject:
        raise NotImplementedError

    def _entry(
        self, index: int, content: JSONObject, ids: list[int], logprobs: Any, finish_reason: str | None
    ) -> JSONObject:
        """One choice or a part of it."""
        shown = None
        if self._with_logprobs:  # JSON has neither infinity nor nan
            values = (float(value) if value > _LOWEST_LOGPROB else _LOWEST_LOGPROB for value in logprobs)
            shown = self._logprobs(ids, list(values))
        token_ids = {"token_ids": ids} if self._with_ids else {}
        return {"index": index, **content, "logprobs": shown, "finish_reason": finish_reason, **token_ids}

    def _prompt_ids(self, index: int) -> JSONObject:
        return {"prompt_token_ids": self.requests[index].prompt_token_ids.tolist()} if self._with_ids else {}

    def _is_worth_sending(self, text: str, chunk: TokenChunk) -> bool:
        return bool(text or chunk.response or self._with_logprobs or self._with_ids)

    def _decode(self, ids: list[int]) -> str:
        text: str = "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _token_text(self, token: int) -> str:
        text: str = f"token_id:{token}" if self._tokenizer is None else self._tokenizer.decode([token])
        return text


class CompletionAnswer(Answer):
    prefix, kind, event_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, index: int, response: ChatResponse) -> JSONObject:
        content = {"text": response.text, **self._prompt_ids(index)}
        ids = response.completion_token_ids.tolist()
        return self._entry(index, content, ids, response.completion_logprobs, response.finish_reason)

    def _deltas(self, index: int, chunk: TokenChunk) -> Iterator[JSONObject]:
        stream, response = self._streams[index], chunk.response
        text = stream.push(chunk.token_ids) if response is None else stream.rest(response.text)
        is_first = not self._has_begun[index]
        if is_first or self._is_worth_sending(text, chunk):
            content = {"text": text, **(self._prompt_ids(index) if is_first else {})}
            reason = response.finish_reason if response else None
            yield self._entry(index, content, chunk.token_ids, chunk.logprobs, reason)

    def _logprobs(self, ids: list[int], logprobs: list[float]) -> JSONObject:
        tokens = [self._token_text(token) for token in ids]
        top = [{token: value} for token, value in zip(tokens, logprobs, strict=True)]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top}


class ChatAnswer(Answer):
    prefix, kind, event_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any, parser: ChatTemplate | None) -> None:
        """`parser` reads tool calls if the body has tools."""
        self._parser = parser
        self.hold_from = "<{" if parser else ""  # every dialect begins its calls with one of these
        super().__init__(*args)

    def whole(self, responses: Sequence[ChatResponse]) -> JSONObject:
        return super().whole(responses) | self._prompt_ids(0)

    def _choice(self, index: int, response: ChatResponse) -> JSONObject:
        content, calls = self._read_calls(response.text)
        message: JSONObject = {"role": "assistant", "content": content}
        if calls:
            message |= {"tool_calls": calls, "content": content or None}
        ids, reason = response.completion_token_ids.tolist(), _finish_reason(response, calls)
        return self._entry(index, {"message": message}, ids, response.completion_logprobs, reason)

    def events(self, index: int, chunk: TokenChunk) -> Iterator[JSONObject]:
        is_first = not any(self._has_begun)
        for event in super().events(index, chunk):
            yield event | self._prompt_ids(0) if is_first else event
            is_first = False

    def _deltas(self, index: int, chunk: TokenChunk) -> Iterator[JSONObject]:
        if not self._has_begun[index]:
            yield {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        stream, response = self._streams[index], chunk.response
        calls: list[ToolCall] = []
        if response is None:
            text = stream.push(chunk.token_ids)
        else:
            text, calls = self._read_calls(response.text)
            shown = stream.shown.lstrip()  # the parser strips the content around calls
            text = stream.rest(text) if not calls else text[len(shown) :] if text.startswith(shown) else ""
        if self._is_worth_sending(text, chunk):
            delta: JSONObject = {"content": text} if text else {}
            if calls:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
            reason = _finish_reason(response, calls) if response else None
            yield self._entry(index, {"delta": delta}, chunk.token_ids, chunk.logprobs, reason)

    def _read_calls(self, text: str) -> tuple[str, list[ToolCall]]:
        parsed = self._parser.parse_tool_calls(text) if self._parser is not None else None
        if parsed is None or not parsed.tool_calls:
            return text, []  # an unreadable call stays in the text
        # The parser numbers within a message; ids must differ over a conversation. Mistral's template needs 9 characters.
        return parsed.content, [{**call, "id": uuid.uuid4().hex[:9]} for call in parsed.tool_calls]

    def _logprobs(self, ids: list[int], logprobs: list[float]) -> JSONObject:
        content = []
        for token, logprob in zip(ids, logprobs, strict=True):
            text = self._token_text(token)
            encoded = None if "\ufffd" in text else list(text.encode())  # unknown for part of a character
            entry = {"token": text, "logprob": logprob, "bytes": encoded}
            content.append({**entry, "top_logprobs": [entry]})
        return {"content": content}


def _finish_reason(response: ChatResponse, calls: Sequence[ToolCall]) -> str | None:
    return "tool_calls" if calls and response.finish_reason == "stop" else response.finish_reason
