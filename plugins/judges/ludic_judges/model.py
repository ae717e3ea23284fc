"""`JudgeModel`: a model that is asked for verdicts, with retries, a cache, a limit of calls at a time, and a count of its cost.

Any ChatClient serves: the embedded engine or a vLLM server with the model's chat template, an OpenAI-compatible endpoint with
`ByteTemplate`. `JudgeAgent` takes its place in every judge: an agent that may compute, search or run code before its verdict.
"""

import asyncio
import hashlib
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ludic.agents import Agent
from ludic.inference import ByteTemplate, ChatTemplate, HFChatTemplate
from ludic.inference.templates.conversation import encode_text
from ludic.types import (
    ChatClient,
    ConfigError,
    InferenceSpec,
    Info,
    Message,
    ReturnSpec,
    SamplingParams,
    TokenCompletionRequest,
    derive_seed,
)
from ludic.types.errors import encodable
from ludic.util.files import is_compressed, parse_json, read_lines
from ludic.util.line_writer import LineWriter
from ludic_judges.verdicts import (
    Form,
    JudgeError,
    Quoting,
    UnreadableVerdict,
    Verdict,
    mark_of,
    opening_of,
    read_verdict,
    request_for,
)

DEFAULT_SAMPLING = SamplingParams(temperature=0.0, max_tokens=512)


@dataclass(slots=True)
class JudgeCost:
    """The cost of a judge so far."""

    verdicts: int = 0
    """Verdicts given, cached ones included."""
    calls: int = 0
    """Model calls."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cache_hits: int = 0
    unreadable: int = 0
    """Replies that were no verdict; each but the last was asked for again."""
    failed: int = 0
    """Questions without a verdict in the end; each failed the reward of its episode."""

    def metrics(self, name: str = "judge") -> dict[str, float]:
        return {f"{name}/{one.name}": float(getattr(self, one.name)) for one in fields(self)}


class VerdictCache:
    """Replies by the hash of everything that led to them: in memory, and in a JSONL file that several processes may share.

    Only replies that could be read are kept. A judge whose weights change under one name must have no cache.
    """

    def __init__(self, path: str | Path | None = None, *, max_in_memory: int = 100_000) -> None:
        self.path = None if path is None else Path(path)
        if self.path is not None and is_compressed(self.path):
            raise ConfigError(f"cache = {path}; verdicts are looked up in a plain file, such as verdicts.jsonl.")
        self._writer = None if self.path is None else LineWriter(self.path)
        self._max_in_memory = max_in_memory
        self._replies: dict[str, str] = {}
        self._end = 0
        """Bytes of the file that were read."""
        self._lock = threading.Lock()

    async def get(self, key: str) -> str | None:
        if key not in self._replies and self.path is not None:
            await asyncio.to_thread(self._read_new)
        return self._replies.get(key)

    async def put(self, key: str, reply: str) -> None:
        self._keep(key, reply)
        if self._writer is not None:
            line = json.dumps({"key": key, "reply": reply}) + "\n"
            await asyncio.to_thread(self._writer.append, line.encode())

    def _keep(self, key: str, reply: str) -> None:
        self._replies[key] = reply
        while len(self._replies) > self._max_in_memory:
            del self._replies[next(iter(self._replies))]

    def _read_new(self) -> None:
        """Read what this and other processes have appended since the last time."""
        assert self.path is not None
        with self._lock:
            size = self.path.stat().st_size if self.path.exists() else 0
            self._end = self._end if self._end <= size else 0  # a shorter file is a new one
            if size == self._end:
                return
            for line, text in read_lines(self.path, start=self._end):
                if not text.endswith(b"\n"):
                    continue
                self._end = line.offset + line.length
                try:
                    row = parse_json(text)
                    self._keep(row["key"], row["reply"])
                except (ValueError, TypeError, KeyError):
                    continue  # a damaged line is a verdict to ask for again


@dataclass(slots=True)
class _OfLoop:
    """State of one event loop: a judge may be used by a trainer's and by an evaluator's."""

    calls: asyncio.Semaphore
    asking: "weakref.WeakValueDictionary[str, asyncio.Lock]" = field(default_factory=weakref.WeakValueDictionary)
    """Questions that are being asked: an equal one waits for the answer."""


class Asking:
    """Asks for verdicts until one can be read. What answers is up to a subclass: one model call, or an agent with tools."""

    def __init__(
        self,
        *,
        model: str,
        chat_template: ChatTemplate,
        sampling: SamplingParams,
        seed: int = 0,
        max_retries: int = 2,
        concurrency: int = 32,
        timeout_s: float | None = None,
        cache: VerdictCache | str | Path | None = None,
        use_cache: bool = True,
    ) -> None:
        if max_retries < 0 or concurrency < 1:
            raise ConfigError(f"max_retries={max_retries}, concurrency={concurrency}; at least 0 and 1 are needed.")
        self.model = model
        self.chat_template = chat_template
        self.sampling = sampling
        self.seed = seed
        self.max_retries = max_retries
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.cache = (cache if isinstance(cache, VerdictCache) else VerdictCache(cache)) if use_cache else None
        self.cost = JudgeCost()
        self.quote = Quoting(chat_template)
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _OfLoop] = weakref.WeakKeyDictionary()

    async def reply_to(self, messages: list[Message], opening: str, seed: int) -> str:
        """The answer to a conversation; `count` is called for each model call. `opening`: how a verdict begins, for models whose
        reply can be begun for them."""
        raise NotImplementedError

    def identity(self) -> Any:
        """Further facts that a reply depends on, in addition to prompt, model and sampling; a part of the cache's key, as JSON."""
        return None

    async def ask(self, question: str, form: Form) -> Verdict:
        """The verdict on a question, whose data is quoted and delimited (`Quoting`, `section`)."""
        mark = mark_of(question)
        prompt = f"{question}\n\n{request_for(form, mark)}"
        key = self._key(prompt)
        lock = self._of_loop().asking.setdefault(key, asyncio.Lock())
        async with lock:
            verdict = await self._cached(key, form, mark)
            if verdict is None:
                reply, verdict = await self._ask_until_readable(prompt, form, mark)
                if self.cache is not None:
                    await self.cache.put(key, reply)
        self.cost.verdicts += 1
        return verdict

    async def _cached(self, key: str, form: Form, mark: str) -> Verdict | None:
        reply = None if self.cache is None else await self.cache.get(key)
        if reply is None:
            return None
        try:
            verdict = read_verdict(reply, form, mark)
        except UnreadableVerdict:  # a file that something else wrote
            return None
        self.cost.cache_hits += 1
        return verdict

    async def _ask_until_readable(self, prompt: str, form: Form, mark: str) -> tuple[str, Verdict]:
        messages: list[Message] = [{"role": "user", "content": prompt}]
        wrong = ""
        for attempt in range(self.max_retries + 1):
            try:
                async with self._of_loop().calls:
                    answer = self.reply_to(messages, opening_of(form, mark), derive_seed(self.seed, attempt))
                    reply = await asyncio.wait_for(answer, self.timeout_s)
            except Exception as error:
                # Also an error that would end the run where the policy raised it: a judge fails the reward of one episode.
                self.cost.failed += 1
                raise JudgeError(f"The judge {self.model} failed: {type(error).__name__}: {error}") from error
            try:
                return reply, read_verdict(reply, form, mark)
            except UnreadableVerdict as error:
                self.cost.unreadable += 1
                wrong = str(error)
            # Quoted: what the judge repeats of the graded text must not turn into control tokens here, either.
            complaint = f"That is not a verdict. {self.quote(wrong)} {request_for(form, mark)}"
            messages = [
                *messages,
                {"role": "assistant", "content": self.quote(reply)},
                {"role": "user", "content": complaint},
            ]
        self.cost.failed += 1
        raise JudgeError(
            f"The judge {self.model} gave no readable verdict in {self.max_retries + 1} tries. {wrong} Take a stronger model, or "
            f"raise max_tokens (now {self.sampling.max_tokens}) or max_retries."
        )

    def count(self, info: Info, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a model call. An endpoint that takes text reports its tokens in the client's info; ours are bytes then."""
        self.cost.calls += 1
        self.cost.prompt_tokens += info.get("prompt_tokens", prompt_tokens)
        self.cost.completion_tokens += info.get("completion_tokens", completion_tokens)

    def _of_loop(self) -> _OfLoop:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = _OfLoop(asyncio.Semaphore(self.concurrency))
        return self._loops[loop]

    def _key(self, prompt: str) -> str:
        told = [prompt, self.model, asdict(self.sampling), self.seed, self.identity()]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


class JudgeModel(Asking):
    """A model that answers with one call."""

    def __init__(
        self,
        client: ChatClient,
        *,
        model: str,
        chat_template: ChatTemplate | None = None,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        prefill: bool = False,
        **limits: Any,
    ) -> None:
        """`chat_template`: the model's, for clients that take its tokens; without it, ByteTemplate, for an OpenAIChatClient.
        `prefill` begins the verdict for the model, up to its first field: a small model then keeps the format, a thinking model
        does not think. `limits`: see `Asking`. `cache` is the file to keep verdicts in, by default memory alone; `use_cache=False`
        is for a judge whose weights change."""
        super().__init__(model=model, chat_template=chat_template or ByteTemplate(), sampling=sampling, **limits)
        self.client = client
        self.prefill = prefill
        if prefill and not isinstance(self.chat_template, HFChatTemplate):
            raise ConfigError(
                "prefill=True needs a client that takes the model's tokens and its HFChatTemplate; an endpoint that takes messages "
                "begins the reply itself."
            )

    def identity(self) -> Any:
        return {"prefill": self.prefill}

    async def reply_to(self, messages: list[Message], opening: str, seed: int) -> str:
        template = self.chat_template
        prompt = template.apply(messages)
        ids, text, begun = prompt.prompt_token_ids, prompt.prompt_text, template.reply_prefix
        if self.prefill and isinstance(template, HFChatTemplate):
            text, begun = text + opening, begun + opening
            ids = encode_text(template.tokenizer, encodable(text))
        request = TokenCompletionRequest(self.model, ids, text, self.sampling, ReturnSpec.for_eval(), seed)
        response, info = await self.client.complete_tokens(request)
        self.count(info, len(ids), len(response.completion_token_ids))
        return begun + response.text


AGENT_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1024)


class JudgeAgent(Asking):
    """Asks a new agent for each verdict; `make_agent` returns one, with its client, model, context and tools."""

    def __init__(
        self, make_agent: Callable[[], Agent], *, sampling: SamplingParams = AGENT_SAMPLING, **limits: Any
    ) -> None:
        """`limits`: see `Asking`."""
        agent = make_agent()
        super().__init__(model=agent.model, chat_template=agent.chat_template, sampling=sampling, **limits)
        self._make_agent = make_agent
        self._identity = {
            "agent": type(agent).__qualname__,
            "tools": getattr(agent, "tool_schemas", None),
            "system_prompt": agent.ctx.default_system_prompt,
        }

    def identity(self) -> Any:
        return self._identity

    async def reply_to(self, messages: list[Message], opening: str, seed: int) -> str:
        agent = self._make_agent()
        agent.begin_episode()
        try:
            agent.reset()
            # A new agent for each attempt: what was wrong with the last one stands below the question.
            told = [message["content"] for message in messages if message["role"] == "user"]
            agent.on_env_reset("\n\n".join(dict.fromkeys([told[0], told[-1]])), {})
            inference = InferenceSpec(sampling=self.sampling, return_=ReturnSpec.for_eval())
            result = await agent.act(inference, sampling_seed=seed)
        finally:
            agent.end_episode()
        for step in result.steps:
            self.count(step.info, len(step.trace.prompt_token_ids), len(step.trace.completion_token_ids))
        if result.final_step.action_target != "env":
            raise RuntimeError("The agent ended on a tool call instead of a verdict.")
        return result.final_step.action
