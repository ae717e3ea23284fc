"""A user simulator and an assistant in a shop: the user wants a colour, the assistant must order it. Either role can be trained.

Shows: a role that is frozen (a script here; any client works) beside a role that is trained, or two trained roles, in the dialogue
       env. The trained side starts from random weights; what it learns is to say what it wants, or to listen.
Needs: nothing but this repository: no GPU, no server, no hub.
Takes: a minute.

    python examples/user_simulator.py                 # the assistant learns from a scripted user
    python examples/user_simulator.py --train user    # the user simulator learns to be understood by a scripted assistant
    python examples/user_simulator.py --train both    # from random weights they agree on one colour, right one time in four

With a language model, take `DialogueEnv` itself, whose instructions are in plain English, a client of a served model as the
simulator, and tasks of your own: docs/envs/dialogue.md.
"""
# ruff: noqa: T201 - a script prints

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from ludic.agents import Agent
from ludic.batch_gen import AssignedRequests, RolloutEngine, SharedRollouts, make_dataset_sequence_requests_fn
from ludic.cli.script import run_script
from ludic.context import FullDialog
from ludic.distributed import SharedWeightsPublisher
from ludic.inference import HFChatTemplate, ScriptedClient
from ludic.inference.local import LocalEngine
from ludic.interaction import Policies
from ludic.models.loading import tiny_llama, word_tokenizer
from ludic.parsers import ParseResult
from ludic.training import Trainer, TrainerConfig, make_grpo, train_policies
from ludic.types import ChatClient, InferenceSpec, ReturnSpec, SamplingParams, TokenCompletionRequest
from ludic_envs.dialogue import ASSISTANT, USER, DialogueEnv

COLOURS = ["red", "green", "blue", "white"]
WORDS = [*COLOURS, "goal", "please", "what", "hello"]
ROLES = {USER: "simulator", ASSISTANT: "helper"}
"""Role in the env → name of its policy."""


class Shop(DialogueEnv):
    """The user is shown `goal red`; the first colour that the assistant names is the order. Messages are single words."""

    def user_brief(self) -> str:
        return f"goal {self.sample['goal']}"

    def assistant_brief(self, message: str) -> str:
        return message

    def submission(self, message: str) -> str | None:
        return message if message in COLOURS else None

    def reference_action(self, agent_id: str) -> str | None:
        return str(self.sample["goal"])


@dataclass(frozen=True)
class Settings:
    train: Literal["assistant", "user", "both"] = "assistant"
    """The role that learns; the other is a script that repeats the colour it reads."""
    updates: int = 60
    groups: int = 16
    """Tasks per update."""
    group_size: int = 16
    lr: float = 3e-3
    seed: int = 0


def main(args: list[str]) -> int:
    settings = tyro.cli(Settings, args=args, description=__doc__)
    shop = Table(settings)
    try:
        asyncio.run(train_policies(shop.trainers, settings.updates, train_logger=Lines()))
    finally:
        shop.close()
    return 0


class Lines:
    """A line every ten updates: how often the order was right, as each trained role earned it."""

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        earned = {name: value for name, value in stats.items() if name.endswith("/train/reward/env")}
        if step % 10 == 0:
            print(
                f"update {step:3d}",
                *(f"{name.split('/')[0]} {value:.2f}" for name, value in earned.items()),
                flush=True,
            )


class Table:
    """Both roles, the dialogues between them, and a trainer for each role that learns."""

    def __init__(self, settings: Settings) -> None:
        self.tokenizer = word_tokenizer(WORDS)
        trained = ["user", "assistant"] if settings.train == "both" else [settings.train]
        names = [ROLES[role] for role in trained]
        self.models = {
            name: tiny_llama(len(self.tokenizer), width=64, layers=2, max_length=64, seed=settings.seed + number)
            for number, name in enumerate(names)
        }
        size = {"max_model_len": 64, "max_sequences": 256, "kv_tokens": 16384}
        self.servers = {name: LocalEngine(model, self.tokenizer, **size) for name, model in self.models.items()}
        clients: dict[str, Any] = {name: self.servers.get(name) or self.script() for name in ROLES.values()}
        policies = Policies(clients, self.make_agent)
        engine = RolloutEngine(env_registry={"shop": Shop}, protocol_registry={"talk": policies.protocol})
        tasks = make_dataset_sequence_requests_fn(
            [{"goal": colour, "answer": colour} for colour in COLOURS],
            batch_size=settings.groups,
            group_size=settings.group_size,
            env_kind="shop",
            env_kwargs_fn=lambda sample: {"sample": sample, "max_turns": 1},
            protocol_kind="talk",
            inference=InferenceSpec(
                sampling=SamplingParams(temperature=1.0, max_tokens=1), return_=ReturnSpec.for_rl()
            ),
            rng_seed=settings.seed,
        )
        dialogues = SharedRollouts(
            engine, requests_fn=AssignedRequests(tasks, [ROLES], policies), max_steps=2, concurrency=256
        )
        self.trainers = {name: self.trainer(name, dialogues, settings) for name in names}

    def trainer(self, name: str, dialogues: SharedRollouts, settings: Settings) -> Trainer:
        algo = make_grpo(group_size=settings.group_size)
        return Trainer(
            model=self.models[name],
            algo=algo,
            batch_source=dialogues.batches_for(name, algorithm=algo),
            cfg=TrainerConfig(lr=settings.lr, weight_decay=0.0, max_seq_len=64, seed=settings.seed),
            publisher=SharedWeightsPublisher(self.servers[name]),
        )

    def make_agent(self, client: ChatClient, name: str) -> Agent:
        return Agent(
            client=client,
            model=name,
            ctx=FullDialog(),
            parser=lambda text: ParseResult(text.strip() or "nothing", 0.0, None),
            chat_template=HFChatTemplate(self.tokenizer),
            reject_incomplete_completions=False,
        )

    def script(self) -> ScriptedClient:
        """Repeats the last colour in its prompt; says `what` if there is none."""

        def reply(request: TokenCompletionRequest) -> str:
            words = self.tokenizer.decode(request.prompt_token_ids.tolist()).split()
            return next((word for word in reversed(words) if word in COLOURS), "what")

        return ScriptedClient(reply, tokenizer=self.tokenizer)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


if __name__ == "__main__":
    run_script(main)
