"""Reading an OpenAI-shaped request body: every field checked, the unsupported ones refused by name.

How much one body may ask for is bounded here, before anything is built from it; the values of sampling parameters are checked
by `SamplingParams`, for every engine.
"""

import difflib
import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ludic.inference.templates.chat import ChatTemplate, shows_tools
from ludic.inference.templates.tool_calls import READABLE_CALLS
from ludic.types import (
    ConfigError,
    LudicError,
    Message,
    PromptTooLong,
)

JSONObject = dict[str, Any]
MAX_SAMPLES = 128
"""The largest `n`."""
MAX_COMPLETIONS = 1024
"""Prompts times `n`, in one body."""
MAX_MESSAGES, MAX_TOOLS = 4096, 256
MAX_DEPTH = 32
"""Levels of lists and objects within each other, the body itself included."""
MAX_COMMAS = 1 << 20
"""In one body. There are no more values than that in it: parsing takes up to 20 times a body's size, and time in which no other
client is answered. A text with more commas is longer than a model reads."""


class RequestRefused(LudicError):
    """A request that is not served, for a reason that has a status of its own."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


_Kind = tuple[str, Callable[[Any], bool]]
# Bounds instead of isfinite, which fails on whole numbers that no float can hold.
INT: _Kind = ("a whole number", lambda v: type(v) is int and abs(v) < 2**63)
_NUMBER: _Kind = ("a finite number", lambda v: type(v) in (int, float) and abs(v) < 1e30)
BOOL: _Kind = ("true or false", lambda v: isinstance(v, bool))
TEXT: _Kind = ("a text", lambda v: isinstance(v, str))
LIST: _Kind = ("a list", lambda v: isinstance(v, list))
_OBJECT: _Kind = ("an object", lambda v: isinstance(v, dict))
ANYTHING: _Kind = ("anything", lambda v: True)

_WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "priority",
}  # fmt: skip
_ONLY_AS: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields that are not supported, and the values of theirs that ask for nothing."""


class Fields:
    """A body whose values are checked as they are taken; null is the same as absent."""

    def __init__(self, body: JSONObject) -> None:
        self._body = {name: value for name, value in body.items() if value is not None}
        self._taken: set[str] = set()

    def take(self, name: str, kind: _Kind, default: Any) -> Any:
        self._taken.add(name)
        if name not in self._body:
            return default
        value = self._body[name]
        what, fits = kind
        if not fits(value):
            raise ConfigError(f"{name} must be {what}, not {_shown(value)}.")
        return value

    def check_all_taken(self) -> None:
        for name in self._body.keys() - self._taken - _WITHOUT_EFFECT:
            if name not in _ONLY_AS:
                near = difflib.get_close_matches(name[:80], self._taken, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"Unknown field {name!r:.80}.{hint}")
            if self._body[name] not in _ONLY_AS[name]:
                raise ConfigError(f"{name}={_shown(self._body[name])} is not supported by this server; leave it out.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How the answer is to look; the same for both endpoints."""

    n: int
    seed: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool

    @classmethod
    def read(cls, fields: Fields, *, logprobs: bool) -> "Options":
        n = fields.take("n", INT, 1)
        if not 1 <= n <= MAX_SAMPLES:
            raise ConfigError(f"n={n}; it must lie between 1 and {MAX_SAMPLES}.")
        stream = fields.take("stream", BOOL, False)
        stream_options = Fields(fields.take("stream_options", _OBJECT, {}))
        return cls(
            n=n,
            seed=fields.take("seed", INT, None),
            stream=stream,
            include_usage=stream and stream_options.take("include_usage", BOOL, False),
            logprobs=logprobs,
            token_ids=fields.take("return_token_ids", BOOL, False),
        )


def read_sampling(fields: Fields) -> JSONObject:
    """Arguments of SamplingParams, which checks them, but for max_tokens; the defaults are OpenAI's."""
    stop_ids = fields.take("stop_token_ids", LIST, [])
    if not _are_ids(stop_ids):
        raise ConfigError(f"stop_token_ids must be a list of token ids, not {_shown(stop_ids)}.")
    top_k = fields.take("top_k", INT, 0)
    return {
        "temperature": fields.take("temperature", _NUMBER, 1.0),
        "top_p": fields.take("top_p", _NUMBER, 1.0),
        "top_k": 0 if top_k == -1 else top_k,  # vLLM's way to say "all"
        "min_p": fields.take("min_p", _NUMBER, 0.0),
        "frequency_penalty": fields.take("frequency_penalty", _NUMBER, 0.0),
        "presence_penalty": fields.take("presence_penalty", _NUMBER, 0.0),
        "repetition_penalty": fields.take("repetition_penalty", _NUMBER, 1.0),
        "min_tokens": fields.take("min_tokens", INT, 0),
        "ignore_eos": fields.take("ignore_eos", BOOL, False),
        "stop_token_ids": tuple(stop_ids),
        "stop": read_stops(fields.take("stop", ANYTHING, None)),
    }


def read_stops(value: Any) -> tuple[str, ...]:
    stops = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(stop, str) and stop for stop in stops):  # an empty one would end everything
        raise ConfigError(f"stop must be a text or a list of texts that are not empty, not {_shown(value)}.")
    return tuple(stops)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value)


def read_prompts(value: Any, n: int, max_length: int) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids, and `n` completions of each."""
    several = isinstance(value, list) and bool(value) and type(value[0]) is not int
    prompts = value if several else [value]
    if len(prompts) * n > MAX_COMPLETIONS:
        raise ConfigError(
            f"{len(prompts)} prompts with n={n} are {len(prompts) * n} completions; one request may ask for "
            f"{MAX_COMPLETIONS}. Send several requests."
        )
    for prompt in prompts:
        if isinstance(prompt, list) and len(prompt) > max_length:
            raise PromptTooLong(len(prompt), max_length, "Shorten it.")
        if not (isinstance(prompt, str) or (_are_ids(prompt) and prompt)):
            raise ConfigError(
                f"prompt must be a text, a list of token ids, or a list of either, and not empty; not {_shown(prompt)}."
            )
    return list(prompts)


def read_messages(value: list[Any]) -> list[Message]:
    if not value:
        raise ConfigError("messages must be a list with at least one message.")
    if len(value) > MAX_MESSAGES:
        raise ConfigError(f"messages has {len(value)} messages; one request may have {MAX_MESSAGES}.")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be an object, not {_shown(value)}.")
    message = {key: field for key, field in value.items() if field is not None}
    if message.get("role") == "developer":  # what newer clients call the system
        message["role"] = "system"
    if message.get("role") not in ("system", "user", "assistant", "tool"):
        raise ConfigError(f"{where}.role must be system, user, assistant or tool, not {_shown(value.get('role'))}.")
    message["content"] = _content(message.get("content", ""), where)
    if "tool_calls" in message and not (
        isinstance(message["tool_calls"], list) and all(_is_tool_call(call) for call in message["tool_calls"])
    ):
        raise ConfigError(f"{where}.tool_calls must be a list of calls whose arguments are a JSON object, as a text.")
    return message


def _content(value: Any, where: str) -> str:
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise ConfigError(f"{where}.content must be a text or a list of parts, not {_shown(value)}.")
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ConfigError(f"{where}.content has a part that is not text; this server reads only text.")
    return "".join(part["text"] for part in parts)


def _is_tool_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    try:
        return isinstance(json.loads(function["arguments"]), dict)
    except (KeyError, TypeError, ValueError, RecursionError):
        return False


def read_tools(fields: Fields, template: ChatTemplate) -> list[JSONObject]:
    """Tools to put into the prompt and to read calls of; with tool_choice "none" there are none."""
    tools: list[JSONObject] = fields.take("tools", LIST, [])
    choice = fields.take("tool_choice", ANYTHING, "auto")
    if choice not in ("auto", "none"):
        raise ConfigError(f"tool_choice={_shown(choice)} is not supported by this server; 'auto' and 'none' are.")
    if len(tools) > MAX_TOOLS:
        raise ConfigError(f"tools has {len(tools)} tools; one request may have {MAX_TOOLS}.")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise ConfigError(f"tools must be a list of function schemas, which {_shown(tool)} is not.")
    if tools and choice == "auto" and not template.supports_tools():
        raise ConfigError(f"This server cannot read calls as this model's chat template writes them. {READABLE_CALLS}.")
    if tools and choice == "auto" and not shows_tools(template, tools):
        raise ConfigError(
            "This model's chat template does not write tools into the prompt, so the model would never hear of them."
        )
    return tools if choice == "auto" else []


def check_num_logprobs(name: str, value: int | None) -> None:
    if value not in (None, 0, 1):
        raise ConfigError(f"{name}={value}; this server gives the log-probability of the chosen token only: 0 or 1.")


def parse_object(body: bytes) -> JSONObject:
    """The JSON object that the body is."""
    if body.count(b",") > MAX_COMMAS:
        raise ConfigError(f"The body has more than {MAX_COMMAS} values; send less at once.")
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"The body must be a JSON object, not {type(value).__name__}.")
    # What reads it further on calls itself for each level, and Python's stack is small.
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in inner if isinstance(item, (dict, list))]
        if not level:
            return value
    raise ConfigError(f"The body has lists or objects within each other more than {MAX_DEPTH} levels deep.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def _shown(value: Any) -> str:
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
