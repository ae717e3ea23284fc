"""Two players learn tic-tac-toe from each other: one base model, two adapters, two trainers, an Elo table in the end.

Shows: several trainable policies in one run. Seats change from game to game, every game trains both players, each with its own
       adapter, optimizer and checkpoints; past versions stay in leagues, to be played against (--league) and to be rated.
Needs: nothing but this repository and peft (the extra `lora`): no GPU, no server, no hub.
Takes: six minutes of computing; README.md has a run of a minute, and what came of a whole one.

    python examples/self_play/self_play.py
    python examples/self_play/self_play.py --league
    python examples/self_play/self_play.py --resume

The warm-up teaches the base what a legal move is, from games of random legal play; how to win is left to self-play.
"""
# ruff: noqa: T201 - a script prints

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from peft import LoraConfig

from ludic.agents import Agent
from ludic.batch_gen import (
    AssignedRequests,
    OfflineBatchSource,
    RolloutEngine,
    SharedRollouts,
    assign_roles,
    make_dataset_sequence_requests_fn,
)
from ludic.cli.script import run_script
from ludic.context import FullDialog
from ludic.distributed import SharedWeightsPublisher
from ludic.envs.tic_tac_toe.board import CELLS, FREE, MARKS, OTHER, position
from ludic.eval import Estimate, elo_table, fit_elo, matches_of, round_robin, share_estimate
from ludic.inference import HFChatTemplate, ScriptedClient
from ludic.inference.local import League, LocalEngine
from ludic.interaction import Policies
from ludic.models.execution import use_fastest_num_threads
from ludic.models.loading import LoadedModel, load_model, no_progress_bar
from ludic.models.lora import adapters_on
from ludic.parsers import ParseResult
from ludic.training import (
    CheckpointConfig,
    JSONLLogger,
    TeeLogger,
    Trainer,
    TrainerConfig,
    common_step,
    make_reinforce_pp,
    make_sft,
    train_policies,
)
from ludic.training.config import LRSchedule
from ludic.types import (
    ChatClient,
    ConfigError,
    EnvSpec,
    InferenceSpec,
    ProtocolSpec,
    Reducer,
    ReturnSpec,
    Rollout,
    RolloutRequest,
    SamplingParams,
    TokenCompletionRequest,
    save_rollouts,
)
from ludic.util.stop import StopSignal

TINY = Path(__file__).parents[1] / "tic_tac_toe" / "tiny" / "config.json"
GAMES = "games.jsonl"
PLAYERS = ("ann", "bob")
SEATS = ("X", "O")
MAX_MOVES = 9
LENGTH = 160
SAMPLING = SamplingParams(temperature=1.0, max_tokens=3)
TRAINING = InferenceSpec(sampling=SAMPLING, return_=ReturnSpec.for_rl())
GAME = RolloutRequest(
    env=EnvSpec("tic_tac_toe_duel", {"view": "compact", "random_plies": 2}),
    protocol=ProtocolSpec("duel"),
    inference=InferenceSpec(sampling=SAMPLING),
)
REDUCERS = {"illegal_rate": Reducer("count_true", "illegal_move", normalize_by="rollouts")}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The budget of the run."""

    out: Path = Path("runs/self_play")
    resume: bool = False
    """Go on with the run in `out`, with the same settings."""
    seed: int = 1
    synth_games: int = 2000
    """Games of random legal play to warm up on."""
    warm_up_steps: int = 200
    updates: int = 80
    """Updates of each player."""
    games: int = 64
    """Games of one update."""
    rank: int = 16
    """Rank of the adapters."""
    lr: float = 2e-3
    gamma: float = 0.7
    """The share of credit that a move gets for what came one move later: a blunder is mostly the last move's fault."""
    kl: float = 0.02
    """Weight of the distance from the base: a player that is sure of its move too soon learns no other."""
    league: bool = False
    """Every other game is played against a past version of the opponent instead of the present one."""
    snapshot_every: int = 20
    """Updates between two members of the leagues, which the table rates."""
    rating_games: int = 40
    """Games of every pair in the table, in each of the two seatings."""


def main(args: list[str]) -> int:
    settings = tyro.cli(Settings, args=args, description=__doc__)
    try:
        self_play(settings)
    except KeyboardInterrupt:
        how = "--resume" if (settings.out / "base").exists() else "a new --out"
        print(f"Stopped. To go on: the same command with {how}.")
        return 130
    return 0


def self_play(settings: Settings) -> None:
    use_fastest_num_threads()
    base = warm_up(settings)
    table = Table(settings, base)
    try:
        trainers = {name: table.trainer(name) for name in PLAYERS}
        stop = StopSignal()
        metrics = settings.out / "metrics.jsonl"
        if table.resume_from is None:
            metrics.unlink(missing_ok=True)  # nothing was saved of an earlier try
        log = TeeLogger(JSONLLogger(metrics), Lines())
        num_left = settings.updates - trainers[PLAYERS[0]].step
        asyncio.run(train_policies(trainers, num_left, train_logger=log, stop=stop))
        if stop.is_set:
            raise KeyboardInterrupt
        asyncio.run(table.rate())
    finally:
        table.close()


class Lines:
    """A line per update: what each player earned, and how often it moved where it must not."""

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        print(f"update {step:3d}", end="")
        for name in PLAYERS:
            reward, illegal = (stats[f"{name}/train/{number}"] for number in ("avg_total_reward", "illegal_rate"))
            print(f"   {name} reward {reward:+.2f} illegal {illegal:.1%}", end="")
        print(flush=True)


# --- warm-up: what is a legal move? -----------------------------------------------------------------------------


def warm_up(settings: Settings) -> LoadedModel:
    """The base model, which both players share; it is not trained any more."""
    saved = settings.out / "base"
    if settings.resume:
        if not (saved / "config.json").exists():
            raise ConfigError(f"There is no run in {settings.out} to resume.")
        return load_model(str(saved), dtype=torch.float32, device="cpu")
    # A warm-up that was stopped leaves its games, and nothing else.
    if settings.out.exists() and [path.name for path in settings.out.iterdir()] != [GAMES]:
        raise ConfigError(f"{settings.out} exists already. Give --resume, or another --out.")
    base = load_model(str(TINY), dtype=torch.float32, device="cpu", seed=settings.seed)
    games = settings.out / GAMES
    games.unlink(missing_ok=True)  # rollouts are added to what is there
    asyncio.run(play_at_random(settings, base.tokenizer, games))
    algo = make_sft(length_normalize=True)
    print(f"warm-up on {settings.synth_games} games of random play", flush=True)
    trainer = Trainer(
        model=base.model,
        algo=algo,
        batch_source=OfflineBatchSource(games, algorithm=algo, batch_size=32, seed=settings.seed, chunk_rollouts=8192),
        cfg=train_config(settings, 3e-3, settings.warm_up_steps),
    )
    trainer.train_sync(settings.warm_up_steps)
    if trainer.stop.is_set:
        raise KeyboardInterrupt
    with no_progress_bar():
        base.model.save_pretrained(saved)
    base.tokenizer.save_pretrained(saved)
    return base


async def play_at_random(settings: Settings, tokenizer: Any, path: Path) -> None:
    """Games of two players who play any legal move, in the model's own tokens."""
    policies = Policies({"random": scripted(tokenizer, random_cell)}, agent_maker(tokenizer))
    request = assign_roles(replace(GAME, num_episodes=settings.synth_games), dict.fromkeys(SEATS, "random"))
    engine = RolloutEngine(protocol_registry={"duel": policies.protocol}, seed=settings.seed)
    save_rollouts(await engine.generate_rollouts([request], max_steps=MAX_MOVES), path)


def train_config(settings: Settings, lr: float, num_steps: int) -> TrainerConfig:
    schedule = LRSchedule("cosine", num_steps // 20, num_steps, min_ratio=0.1)
    return TrainerConfig(
        lr=lr, lr_schedule=schedule, betas=(0.9, 0.95), weight_decay=0.0, max_seq_len=LENGTH, seed=settings.seed
    )


# --- who can sit down -------------------------------------------------------------------------------------------


def agent_maker(tokenizer: Any) -> Any:
    template = HFChatTemplate(tokenizer)

    def make(client: ChatClient, name: str) -> Agent:
        return Agent(
            client=client,
            model=name,
            ctx=FullDialog(),
            parser=lambda text: ParseResult(text or "nothing", 0.0, None),  # nonsense is an illegal move
            chat_template=template,
            reject_incomplete_completions=False,
        )

    return make


def scripted(tokenizer: Any, choose: Any) -> ScriptedClient:
    """A player that needs no model: it reads the board in its prompt."""

    def reply(request: TokenCompletionRequest) -> str:
        words = tokenizer.decode(request.prompt_token_ids.tolist()).split()
        cells = [word for word in words if word[:2] in CELLS][-9:]  # "A1" or "A1=X"
        board = "".join(word[3:] or FREE for word in cells)
        return CELLS[choose(board, random.Random(request.seed))]

    return ScriptedClient(reply, tokenizer=tokenizer)


def random_cell(board: str, dice: random.Random) -> int:
    return dice.choice([cell for cell in range(9) if board[cell] == FREE])


def perfect_cell(board: str, dice: random.Random) -> int:
    to_move = MARKS[0] if board.count(MARKS[0]) == board.count(MARKS[1]) else OTHER[MARKS[0]]
    return dice.choice(position(board, to_move).best)


# --- both sides learn -------------------------------------------------------------------------------------------


class Table:
    """Everything around one board: the players as they are, as they were, two who need no model, and who meets whom."""

    def __init__(self, settings: Settings, base: LoadedModel) -> None:
        self.settings, self.tokenizer = settings, base.tokenizer
        lora = LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear")
        self.models = adapters_on(base.model, PLAYERS, lora, seed=settings.seed)
        size = {"max_model_len": LENGTH, "max_sequences": 256, "kv_tokens": 32768}
        self.servers = {name: LocalEngine(model, base.tokenizer, **size) for name, model in self.models.items()}
        leagues = {"every": settings.snapshot_every, "max_size": 100, **size}
        self.leagues = {name: League(server, **leagues) for name, server in self.servers.items()}
        self.policies = Policies(
            {
                **self.servers,
                **{f"past_{name}": league for name, league in self.leagues.items()},
                "random": scripted(base.tokenizer, random_cell),
                "perfect": scripted(base.tokenizer, perfect_cell),
            },
            agent_maker(base.tokenizer),
        )
        self.engine = RolloutEngine(protocol_registry={"duel": self.policies.protocol})
        self.games = SharedRollouts(
            self.engine,
            requests_fn=AssignedRequests(self.requests_fn(), self.seatings(), self.policies, seed=settings.seed),
            max_steps=MAX_MOVES,
            concurrency=256,
        )
        self.resume_from = common_step(map(self.checkpoints, PLAYERS)) if settings.resume else None

    def seatings(self) -> list[dict[str, str]]:
        """Both ways to seat the two; with a league, each also against the other's past."""
        ann, bob = PLAYERS
        pairs = [(ann, bob), (bob, ann)]
        if self.settings.league:
            pairs += [(ann, f"past_{bob}"), (f"past_{ann}", bob), (bob, f"past_{ann}"), (f"past_{bob}", ann)]
            pairs += [(ann, bob), (bob, ann)]
        return [dict(zip(SEATS, pair, strict=True)) for pair in pairs]

    def requests_fn(self) -> Any:
        return make_dataset_sequence_requests_fn(
            range(1_000_000),
            batch_size=self.settings.games,
            env_kind=GAME.env.kind,
            env_kwargs_fn=lambda _: GAME.env.kwargs,
            protocol_kind=GAME.protocol.kind,
            inference=TRAINING,
            rng_seed=self.settings.seed,
        )

    def checkpoints(self, name: str) -> CheckpointConfig:
        return CheckpointConfig(self.settings.out / "checkpoints" / name, every_n_steps=10)

    def trainer(self, name: str) -> Trainer:
        algo = make_reinforce_pp(gamma=self.settings.gamma, kl_coeff=self.settings.kl)
        return Trainer(
            model=self.models[name],
            algo=algo,
            batch_source=self.games.batches_for(name, algorithm=algo, followers=[self.leagues[name]]),
            cfg=train_config(self.settings, self.settings.lr, self.settings.updates),
            publisher=SharedWeightsPublisher(self.servers[name]),
            checkpoint_config=self.checkpoints(name),
            resume_from=self.resume_from,
            reducers=REDUCERS,
        )

    # --- who is better? -----------------------------------------------------------------------------------------

    async def rate(self) -> None:
        """Every version in the leagues against every other, in both seats."""
        players = [f"past_{name}@{version}" for name, league in self.leagues.items() for version in league.versions]
        requests = round_robin(
            GAME, [*players, "random", "perfect"], SEATS, num_games=self.settings.rating_games, seed=self.settings.seed
        )
        rollouts = await self.engine.generate_rollouts(requests, max_steps=MAX_MOVES, concurrency=256)
        matches = matches_of(rollouts, SEATS)
        ratings = fit_elo(matches, anchor="random", prior_draws=1)
        (self.settings.out / "elo.txt").write_text(f"{elo_table(ratings)}\n")
        print(f"\n{len(matches)} games, every pair in both seats; random play is 1000:\n\n{elo_table(ratings)}\n")
        print("legal moves:")
        for name in players:
            share = legal_share([rollout for rollout in rollouts if rollout.meta["model"] == name])
            print(f"  {name:12} {share.mean:.1%} [{share.low:.1%}, {share.high:.1%}]")
        print(f"X scored {sum(match.score for match in matches) / len(matches):.3f} per game.")

    def close(self) -> None:
        for part in (*self.leagues.values(), *self.servers.values()):
            part.close()


def legal_share(rollouts: Sequence[Rollout]) -> Estimate:
    """The share of legal moves; a game is a sample of several."""
    moves = [[not step.info["illegal_move"] for step in r.env_steps if step.action] for r in rollouts]
    games = [legal for legal in moves if legal]
    return share_estimate([sum(legal) / len(legal) for legal in games], num_samples=sum(map(len, games)))


if __name__ == "__main__":
    run_script(main)
