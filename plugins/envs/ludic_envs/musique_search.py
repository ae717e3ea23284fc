"""MuSiQue as a search task: a multi-hop question and a small knowledge base that can only be searched.

Each sample has some twenty paragraphs, of which two to four lead to the answer. The env offers `search` as a tool of the episode
(see `LudicEnv.episode_tools`) and takes one action, the answer.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Protocol

import msgspec

from ludic import registry
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.types import ConfigError, Info, Observation, StepOutcome

MAX_K: Final = 5
"""Most paragraphs per search: more would show the whole knowledge base."""
_MAX_PENALTY: Final = 1.0


class _Index(Protocol):
    def top(self, query: str, k: int) -> list[int]: ...


class MuSiQueSearchEnv(SingleAgentEnv):
    """One multi-hop question, a search tool over its own paragraphs, one answer; reward 1 for the right one."""

    full_reward = 1.0

    def __init__(
        self,
        sample: Mapping[str, Any],
        *,
        max_searches: int = 6,
        exact_weight: float = 0.5,
        loop_penalty: float = 0.1,
        system_prompt: str | None = None,
    ) -> None:
        """The reward is `exact_weight` · exact match + (1 − `exact_weight`) · token F1, less `loop_penalty` for each search that
        repeats one or exceeds `max_searches`. With `max_searches=0` there is no tool (closed book)."""
        super().__init__()
        if max_searches < 0 or loop_penalty < 0 or not 0 <= exact_weight <= 1:
            raise ConfigError(
                f"max_searches={max_searches}, loop_penalty={loop_penalty}, exact_weight={exact_weight}; the first two "
                "cannot be negative, and the weight lies between 0 and 1."
            )
        self.sample = MuSiQueSample.read(sample)
        self.max_searches = max_searches
        self.exact_weight = exact_weight
        self.loop_penalty = loop_penalty
        self._system_prompt = system_prompt
        self._index: _Index | None = None
        if max_searches:
            self._index = registry.tools.make("search", documents=[str(p) for p in self.sample.paragraphs])
        self._start()

    def _start(self) -> None:
        self._asked: set[str] = set()
        self._num_searches = 0
        self._num_repeated = 0
        self._seen: set[int] = set()

    @property
    def suggested_sysprompt(self) -> str | None:
        if self._system_prompt is not None:
            return self._system_prompt
        how = (
            "Look facts up with the search tool, one at a time: what one search finds often tells what to search for next. "
            f"Searches that you may make: {self.max_searches}, never two for the same. Then give"
        )
        return (
            f"You answer a question that takes several steps. {how if self.max_searches else 'Give'} "
            "the answer in as few words as possible inside <answer></answer>, for example <answer>Marie Curie</answer>."
        )

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        self._start()
        return self.sample.question, {"question_id": self.sample.id, "num_hops": len(self.sample.hops)}

    # --- the tool ---

    def episode_tools(self, agent_id: str) -> Sequence[Callable[..., Any]]:
        return (self.search,) if self.max_searches else ()

    def search(self, query: str, k: Annotated[int, msgspec.Meta(ge=1, le=MAX_K)] = 3) -> str:
        """Search the documents about this question; the best matching ones come back.

        Args:
            query: What to look for, in a few words.
            k: How many documents.
        """
        self._require_running()
        assert self._index is not None, "there is no search tool without searches"
        self._num_searches += 1
        if self._num_searches > self.max_searches:
            return f"Error: all {self.max_searches} searches are used. Answer now."
        asked = normalized(query)
        if asked in self._asked:
            self._num_repeated += 1
            return "Error: you have searched for that already. Search for something else, or answer."
        self._asked.add(asked)
        found = self._index.top(query, k)
        self._seen.update(found)
        return "\n\n".join(str(self.sample.paragraphs[n]) for n in found) or "Nothing found. Try other words."

    # --- the answer ---

    def env_step(self, action: str) -> StepOutcome:
        exact, f1 = exact_match(action, self.sample.accepted), token_f1(action, self.sample.accepted)
        num_excess = max(0, self._num_searches - self.max_searches)
        penalty = min(_MAX_PENALTY, self.loop_penalty * (self._num_repeated + num_excess))
        info: Info = {
            "question_id": self.sample.id,
            "raw_action": action,
            "target_answer": self.sample.answer,
            "correct": exact == 1.0,
            "exact_match": exact,
            "f1": f1,
            "num_searches": self._num_searches,
            "num_repeated": self._num_repeated,
            "num_excess": num_excess,
            "loop_penalty": penalty,
            "support_found": self._support_found(),
        }
        reward = self.exact_weight * exact + (1 - self.exact_weight) * f1 - penalty
        return StepOutcome("Correct." if exact else "Incorrect.", reward, terminated=True, info=info)

    def _support_found(self) -> float:
        """Share of the paragraphs needed for the answer that the searches have shown."""
        needed = {n for n, paragraph in enumerate(self.sample.paragraphs) if paragraph.is_supporting}
        return len(needed & self._seen) / len(needed) if needed else 0.0

    def env_current_obs(self) -> Observation:
        return self.sample.question

    def reference_action(self, agent_id: str) -> str | None:
        return self.sample.answer

    def reference_queries(self) -> list[str]:
        """The searches of a perfect player: the questions of the decomposition, with earlier answers filled in."""
        return [hop.question for hop in self.sample.hops]


# --- samples ---


@dataclass(frozen=True, kw_only=True, slots=True)
class _Paragraph:
    """One document of the question's knowledge base."""

    title: str
    text: str
    is_supporting: bool
    """Needed for the answer; the others distract."""

    def __str__(self) -> str:
        return f"# {self.title}\n{self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hop:
    """One step towards the answer."""

    question: str
    """With the answers of earlier steps in the place of #1, #2, …"""
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MuSiQueSample:
    """One question, in MuSiQue's own spelling (`paragraph_text`, `question_decomposition`) or a short one (`text`,
    `decomposition`)."""

    id: str
    question: str
    answer: str
    aliases: tuple[str, ...]
    """Other spellings of the answer."""
    paragraphs: tuple[_Paragraph, ...]
    hops: tuple[_Hop, ...]
    """Empty where the sample has none."""

    @property
    def accepted(self) -> tuple[str, ...]:
        return (self.answer, *self.aliases)

    @classmethod
    def read(cls, sample: Mapping[str, Any]) -> "MuSiQueSample":
        name = str(sample.get("id", "0"))
        if sample.get("answerable") is False:
            raise ConfigError(f"Sample {name!r} has no answer in its paragraphs (answerable is false). Leave it out.")
        paragraphs = tuple(_paragraph(p, name) for p in _one_of(sample, name, "paragraphs"))
        if not paragraphs:
            raise ConfigError(f"Sample {name!r} has no paragraphs to search in.")
        return cls(
            id=name,
            question=str(_one_of(sample, name, "question")),
            answer=str(_one_of(sample, name, "answer")),
            aliases=tuple(map(str, sample.get("answer_aliases") or ())),
            paragraphs=paragraphs,
            hops=_hops(sample.get("decomposition") or sample.get("question_decomposition") or (), name),
        )


def _one_of(mapping: Mapping[str, Any], sample: str, *keys: str) -> Any:
    for key in keys:
        if key in mapping:
            return mapping[key]
    raise ConfigError(
        f"Sample {sample!r} is not of MuSiQue's form: {' or '.join(map(repr, keys))} is missing among {sorted(mapping)}."
    )


def _paragraph(paragraph: Mapping[str, Any], sample: str) -> _Paragraph:
    return _Paragraph(
        title=str(_one_of(paragraph, sample, "title")),
        text=str(_one_of(paragraph, sample, "text", "paragraph_text")),
        is_supporting=bool(paragraph.get("is_supporting", False)),
    )


def _hops(decomposition: Sequence[Mapping[str, Any]], sample: str) -> tuple[_Hop, ...]:
    hops: list[_Hop] = []
    for step in decomposition:
        question = str(_one_of(step, sample, "question"))
        for number, earlier in enumerate(hops, start=1):
            question = re.sub(rf"#{number}\b", lambda _, hop=earlier: hop.answer, question)  # type: ignore[misc]
        hops.append(_Hop(question=question, answer=str(_one_of(step, sample, "answer"))))
    return tuple(hops)


# --- grading ---

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalized(text: str) -> str:
    """The text as SQuAD's evaluation compares it: lower case, without ASCII punctuation and articles, white space collapsed."""
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join((_ARTICLES.sub(" ", plain).split()) or plain.split())  # an answer that is an article stays one


def exact_match(answer: str, accepted: Iterable[str]) -> float:
    """1 when the answer is one of the accepted ones, else 0."""
    return float(normalized(answer) in map(normalized, accepted))


def token_f1(answer: str, accepted: Iterable[str]) -> float:
    """Harmonic mean of the shares of shared words, for the accepted answer that fits best."""
    words = normalized(answer).split()
    return max((_f1(words, normalized(gold).split()) for gold in accepted), default=0.0)


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)  # without a word on one side there is nothing to share
    shared = sum((Counter(answer) & Counter(gold)).values())
    return 2 * shared / (len(answer) + len(gold))
