"""OpenAI-shaped request bodies as typed structs; fields that are not supported are refused by name.

How much one body may ask for is bounded here, before anything is built from it; the values of sampling parameters are checked
by `SamplingParams`, for every engine.
"""

import difflib
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ludic.inference.templates.chat import ChatTemplate, require_tools
from ludic.types import ConfigError, Message, PromptTooLong
from ludic.util.files import parse_json

JSONObject = dict[str, Any]
MAX_SAMPLES = 128
"""The largest `n`."""
MAX_COMPLETIONS = 1024
"""Prompts times `n`, in one body."""
MAX_MESSAGES, MAX_TOOLS = 4096, 256
MAX_DEPTH = 32
"""Levels of lists and objects within each other, the body itself included."""
MAX_COMMAS = 1 << 20
"""In one body, as a bound on its values: parsing takes up to 20 times a body's size, and time in which no other client is
answered. A text with more commas is longer than any context."""


# --- bodies ---

Whole = Annotated[int, Meta(gt=-(2**63), le=2**63 - 1)]
Number = Annotated[float, Meta(gt=-1e30, lt=1e30)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
NonEmpty = Annotated[str, Meta(min_length=1)]
"""A stop string; an empty one would end every text."""


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = False


class Body(Struct, kw_only=True):
    """The fields that both endpoints have. `null` is the same as absent; the defaults are OpenAI's."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    seed: Whole | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Whole = 0
    min_p: Number = 0.0
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    repetition_penalty: Number = 1.0
    min_tokens: Whole = 0
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = []
    stop: NonEmpty | list[NonEmpty] = []

    def sampling(self) -> JSONObject:
        """Arguments of SamplingParams, which checks them; max_tokens is left out."""
        taken = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
        return {name: getattr(self, name) for name in (*taken, "min_tokens", "ignore_eos")} | {
            "top_k": 0 if self.top_k == -1 else self.top_k,  # vLLM's way to say "all"
            "stop_token_ids": tuple(self.stop_token_ids),
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
        }


class CompletionBody(Body):
    prompt: Any = None
    add_special_tokens: bool = True
    logprobs: Whole | None = None
    max_tokens: Whole = 16


class ChatBody(Body):
    messages: list[Any] = []
    tools: list[Any] = []
    tool_choice: Any = "auto"
    logprobs: bool = False
    top_logprobs: Whole | None = None
    max_tokens: Whole | None = None
    """The older name of the next."""
    max_completion_tokens: Whole | None = None


WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "priority",
}  # fmt: skip
ONLY_AS: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,), "best_of": (1,), "suffix": ("",), "logit_bias": ({},), "prompt_logprobs": (), "use_beam_search": (False,),
    "response_format": ({"type": "text"},), "functions": ([],), "function_call": ("none",), "modalities": (["text"],),
    "parallel_tool_calls": (True,), "skip_special_tokens": (True,), "include_stop_str_in_output": (False,),
    "chat_template": (), "chat_template_kwargs": ({},), "add_generation_prompt": (True,), "continue_final_message": (False,),
}  # fmt: skip
"""Unsupported fields, and their values without effect."""
TAKES: Mapping[str, str] = {"role": "It is system, user, assistant or tool.", "type": "This server reads only text."}
"""Values that a field takes, for errors: by its name, or with the name of the body's field that it is in (`tools.type`)."""
RequestBody = TypeVar("RequestBody", bound=Body)
Fields = TypeVar("Fields", bound=Struct)


def read_body(data: bytes, kind: type[RequestBody]) -> RequestBody:
    """The typed body; refuses every field that is unknown, unsupported or of the wrong type, by name."""
    return read_fields(parse_object(data), kind, WITHOUT_EFFECT, ONLY_AS)[0]


def read_fields(
    body: JSONObject,
    kind: type[Fields],
    without_effect: Set[str],
    only_as: Mapping[str, tuple[Any, ...]],
    takes: Mapping[str, str] = TAKES,
) -> tuple[Fields, list[str]]:
    """The typed fields, and the names of the others that the body gives a value: those are accepted and change nothing."""
    asked = {name: value for name, value in body.items() if value is not None}
    known = kind.__struct_fields__
    others = sorted(asked.keys() - {*known})
    for name in others:
        if name in without_effect:
            continue
        if name not in only_as:
            near = difflib.get_close_matches(name[:80], known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"Unknown field {name!r:.80}.{hint}")
        if asked[name] not in only_as[name]:
            raise unsupported(name, asked[name])
    fields: Fields = typed({name: asked[name] for name in known if name in asked}, kind, takes=takes)
    return fields, others


def unsupported(name: str, value: Any) -> ConfigError:
    return ConfigError(f"{name}={shown(value)} is not supported by this server; leave it out.")


def typed(value: Any, kind: Any, where: str = "", takes: Mapping[str, str] = TAKES) -> Any:
    """The JSON value as that type; else a ConfigError that names the field and what it takes."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half a surrogate pair is no UTF-8
        what, _, path = str(error).partition(" - at `$")
        path = f"{where}{path.rstrip('`')}".lstrip(".")
        top, name = re.split(r"[.\[]", path, maxsplit=1)[0], path.rpartition(".")[2]
        is_choice = what.startswith(("Invalid enum value", "Invalid value"))
        hint = takes.get(f"{top}.{name}", takes.get(name, "")) if is_choice else ""
        raise ConfigError(f"{path}: {what:.200}. {hint}".rstrip()) from error


# --- prompts, messages and tools ---


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
        if prompt in (None, []):
            raise ConfigError("prompt: it must be a text, a list of token ids, or a list of either, and not empty.")
        typed(prompt, str | list[TokenId], "prompt")
    return list(prompts)


class TextPart(Struct):
    type: Literal["text"]
    text: str


class _Function(Struct):
    name: str
    arguments: str = ""


class _WithFunction(Struct):
    """A tool, or a call of one."""

    function: _Function


class _Message(Struct):
    """The fields of a message that are read here; the template may read others."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    tool_calls: list[_WithFunction] = []


def read_messages(messages: list[Any]) -> list[Message]:
    check_count(messages, "messages")
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_count(messages: Sequence[Any], where: str) -> None:
    if not messages:
        raise ConfigError(f"{where} must be a list with at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise ConfigError(f"{where} has {len(messages)} messages; one request may have {MAX_MESSAGES}.")


def check_arguments(arguments: str, where: str) -> None:
    """Refuse arguments of a tool call that are not a JSON object."""
    try:
        is_object = isinstance(parse_json(arguments), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise ConfigError(f"{where} must be a list of calls whose arguments are a JSON object, as a text.")


def _read_message(value: Any, where: str) -> Message:
    given = {key: field for key, field in value.items() if field is not None} if isinstance(value, dict) else value
    message: _Message = typed(given, _Message, where)
    for call in message.tool_calls:
        check_arguments(call.function.arguments, f"{where}.tool_calls")
    role = "system" if message.role == "developer" else message.role  # newer clients' name of the system role
    content = message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)
    return {**given, "role": role, "content": content}


def read_tools(tools: list[Any], choice: Any, template: ChatTemplate) -> list[JSONObject]:
    """The tools to put into the prompt; none with tool_choice "none"."""
    check_tools(tools, choice)
    typed(tools, list[_WithFunction], "tools")
    if not tools or choice == "none":
        return []
    require_tools(template, tools)
    return tools


def check_tools(tools: Sequence[Any], choice: Any) -> None:
    if choice not in ("auto", "none"):
        raise ConfigError(f"tool_choice={shown(choice)} is not supported by this server; 'auto' and 'none' are.")
    if len(tools) > MAX_TOOLS:
        raise ConfigError(f"tools has {len(tools)} tools; one request may have {MAX_TOOLS}.")


def check_num_logprobs(name: str, value: int | None) -> None:
    if value not in (None, 0, 1):
        raise ConfigError(f"{name}={value}; this server gives the log-probability of the chosen token only: 0 or 1.")


# --- lengths ---

_SURE = 16
"""A text of fewer characters per token of the limit is tokenised whole. Few texts have more than 5."""
_PIECE = 1 << 15


def check_length(num_tokens: Callable[[str], int], text: str, room: int) -> None:
    """Raise PromptTooLong for a text that cannot fit, without tokenising all of it: for 15 MB that takes minutes and gigabytes."""
    num_found = 0
    for start in range(0, len(text) if len(text) > _SURE * room else 0, _PIECE):
        num_found += num_tokens(text[start : start + _PIECE])
        if num_found > 2 * room:  # tokens do not end where pieces do
            counted = f"That counts only the first {min(start + _PIECE, len(text))} of its {len(text)} characters."
            raise PromptTooLong(num_found, room, f"{counted} {PromptTooLong.RAISE}")


def check_prompt(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[JSONObject], room: int) -> None:
    """`check_length` of what a prompt is made of."""

    def num_tokens(piece: str) -> int:
        return len(template.apply([{"role": "user", "content": piece}]).prompt_token_ids)

    check_length(num_tokens, "".join(_texts([*messages, *tools])), room)


def _texts(value: Any) -> Iterator[str]:
    """The keys and values of messages and tools."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    else:
        yield str(value)


# --- JSON ---


def parse_object(body: bytes) -> JSONObject:
    """The JSON object that the body is."""
    if body.count(b",") > MAX_COMMAS:
        raise ConfigError(f"The body has more than {MAX_COMMAS} values; send less at once.")
    try:
        value = parse_json(body, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ConfigError(f"The body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"The body must be a JSON object, not {type(value).__name__}.")
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return value
    # The code that reads it recurses into each level, and Python's stack is small.
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in inner if isinstance(item, (dict, list))]
        if not level:
            return value
    raise ConfigError(f"Lists and objects in the body are nested more than {MAX_DEPTH} levels deep.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: Any) -> str:
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
