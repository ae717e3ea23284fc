"""The first five minutes: a language model of half a million parameters learns tic-tac-toe on this machine's CPU.

Shows: the whole way with the classes that a GPU run uses: a model from a config, supervised warm-up on generated games, GRPO
       with the embedded engine that serves the very weights being trained, evaluation with confidence intervals.
Needs: nothing but this repository: no GPU, no server, no hub. `make train` runs it.
Takes: four minutes on two cores.

    python examples/tic_tac_toe/first_run.py
    python examples/tic_tac_toe/first_run.py --resume runs/first_run

The warm-up teaches what a legal move is, from games of random legal play; how to win is left to reinforcement.
"""
# ruff: noqa: T201 - a script prints

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import tyro
from display import Display
from game import Game
from generate_synth_data import Settings as SynthSettings
from generate_synth_data import play_one

from ludic.batch_gen import OfflineBatchSource, RolloutBatchSource, RolloutEngine, make_dataset_sequence_requests_fn
from ludic.distributed import SharedWeightsPublisher
from ludic.eval import Estimate, evaluate, share_estimate
from ludic.inference import HFChatTemplate
from ludic.inference.local import LocalEngine
from ludic.models.execution import use_fastest_num_threads
from ludic.models.loading import LoadedModel, load_model, no_progress_bar
from ludic.training import (
    CheckpointConfig,
    JSONLLogger,
    TeeLogger,
    Trainer,
    TrainerConfig,
    make_grpo,
    make_sft,
)
from ludic.training.schedules import LRSchedule
from ludic.types import (
    ConfigError,
    InferenceSpec,
    LudicError,
    Reducer,
    ReturnSpec,
    SamplingParams,
    save_rollouts,
)

MODEL = Path(__file__).parent / "tiny" / "config.json"
GAME = Game(agent_starts_as="x", view="compact")
MAX_TOKENS = 3
TRAINING = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS), return_=ReturnSpec.for_rl())
MEASURING = InferenceSpec(sampling=SamplingParams(temperature=0.6, max_tokens=MAX_TOKENS))
SYNTH_SEEDS, EVAL_SEEDS, NUM_TRAIN_SEEDS = 2_000_000, 1_000_000, 1_000_000
"""Three sets of games that share none."""
COSTS = {"Generating games": 4, "Warm-up": 30, "Playing before RL": 2, "GRPO": 62, "Playing after RL": 2}
SETTINGS = "settings.json"
REDUCERS = {
    f"{name}_rate": Reducer(
        "count_true", "result", transform=lambda value, name=name: value == name, normalize_by="rollouts"
    )
    for name in ("win", "draw", "loss")
} | {"illegal_rate": Reducer("count_true", "illegal_move", normalize_by="rollouts")}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The budget of the run; what is not here is in the code below, to be changed there."""

    out: Path = Path("runs/first_run")
    """The run's folder; if there is one already, a number is added."""
    resume: Path | None = None
    """Go on with the run in this folder, with the settings that it began with."""
    seed: int = 1
    synth_games: int = 3000
    """Games of random legal play to warm up on."""
    warm_up_steps: int = 250
    updates: int = 75
    """GRPO updates, of `groups` × `group_size` games each."""
    groups: int = 16
    group_size: int = 8
    """Games against the same dice, compared with each other."""
    eval_games: int = 500


OWN = {field.name for field in fields(Settings)} - {"out", "resume"}
"""What makes a run this run."""


def main(settings: Settings, folder: Path) -> None:
    began = time.perf_counter()
    with Display(COSTS) as display:
        policy = warm_up(settings, folder, display)
        server = LocalEngine(policy.model, policy.tokenizer, max_model_len=128, max_sequences=256, kv_tokens=65536)
        try:
            before = measured("Playing before RL", settings, server, folder / "before.json", display)
            trainer = make_trainer(settings, policy, server, folder, display)
            display.begin("GRPO", settings.updates, num_done=trainer.step)
            trainer.train_sync(settings.updates - trainer.step)
            if trainer.stop.is_set:
                raise KeyboardInterrupt
            after = measured("Playing after RL", settings, server, folder / "after.json", display)
        finally:
            server.close()
    for line in statement(settings, folder, trainer, before, after, time.perf_counter() - began):
        display.say(line)


def run_folder(settings: Settings) -> tuple[Settings, Path]:
    """Where the run is written, and the settings it has: those that it began with. An earlier run is never written over."""
    if settings.resume is not None:
        return resumed(settings, settings.resume), settings.resume
    folder, number = settings.out, 1
    while folder.exists():
        number += 1
        folder = settings.out.with_name(f"{settings.out.name}-{number}")
    folder.mkdir(parents=True)
    (folder / SETTINGS).write_text(json.dumps({name: value for name, value in asdict(settings).items() if name in OWN}))
    return settings, folder


def resumed(given: Settings, folder: Path) -> Settings:
    if not (folder / SETTINGS).is_file():
        raise ConfigError(f"There is no run in {folder} to resume.")
    settings = Settings(**json.loads((folder / SETTINGS).read_text()))
    usual = asdict(Settings())
    changed = [n for n, v in asdict(given).items() if n in OWN and v not in (usual[n], asdict(settings)[n])]
    if changed:
        raise ConfigError(f"A run goes on as it began; {', '.join(changed)} cannot be changed with --resume.")
    return settings


# --- warm-up: what is a legal move? -----------------------------------------------------------------------------


def warm_up(settings: Settings, folder: Path, display: Display) -> LoadedModel:
    saved = folder / "warm_up"
    if (saved / "config.json").exists():
        use_fastest_num_threads()
        return load_model(str(saved), dtype=torch.float32, device="cpu")
    policy = load_model(str(MODEL), dtype=torch.float32, device="cpu", seed=settings.seed)
    num_threads = use_fastest_num_threads()
    num_parameters = sum(weight.numel() for weight in policy.model.parameters())
    display.say(f"A Llama of {num_parameters:,} random parameters, on {num_threads} CPU thread(s). Folder: {folder}")
    games = synth_games(settings, policy.tokenizer, folder / "games.jsonl", display)
    algo = make_sft(length_normalize=True)
    (folder / "warm_up.jsonl").unlink(missing_ok=True)  # of an earlier try
    display.begin("Warm-up", settings.warm_up_steps, shown=("nll", "tokens/s"))
    trainer = Trainer(
        model=policy.model,
        algo=algo,
        batch_source=OfflineBatchSource(games, algorithm=algo, batch_size=32, seed=settings.seed, chunk_rollouts=4096),
        cfg=train_config(settings, lr=3e-3, num_steps=settings.warm_up_steps),
        train_logger=TeeLogger(JSONLLogger(folder / "warm_up.jsonl"), display),
    )
    trainer.train_sync(settings.warm_up_steps)
    if trainer.stop.is_set:
        raise KeyboardInterrupt
    policy.tokenizer.save_pretrained(saved)
    with no_progress_bar():
        policy.model.save_pretrained(saved)
    return policy


def synth_games(settings: Settings, tokenizer: Any, path: Path, display: Display) -> Path:
    """Games of a player that plays any legal move, in the model's own tokens."""
    synth = SynthSettings(player="random", agent_starts_as=GAME.agent_starts_as, view=GAME.view)
    template = HFChatTemplate(tokenizer)
    display.begin("Generating games", settings.synth_games)

    async def play() -> None:
        games = []
        for index in range(settings.synth_games):
            games.append(await play_one(synth, SYNTH_SEEDS + index, template, tokenizer))
            if index % 100 == 99:
                display.advance(100)
        save_rollouts(games, path)

    path.unlink(missing_ok=True)
    asyncio.run(play())
    return path


def train_config(settings: Settings, *, lr: float, num_steps: int) -> TrainerConfig:
    return TrainerConfig(
        lr=lr,
        lr_schedule=LRSchedule("cosine", num_steps // 20, num_steps, min_ratio=0.05),
        betas=(0.9, 0.95),
        weight_decay=0.0,
        max_seq_len=128,
        seed=settings.seed,
    )


# --- reinforcement: which move is good? -------------------------------------------------------------------------


def make_trainer(
    settings: Settings, policy: LoadedModel, server: LocalEngine, folder: Path, display: Display
) -> Trainer:
    algo = make_grpo(group_size=settings.group_size)
    source = RolloutBatchSource(
        player(server),
        requests_fn=make_dataset_sequence_requests_fn(
            range(NUM_TRAIN_SEEDS),
            batch_size=settings.groups,
            group_size=settings.group_size,
            env_kind="tic_tac_toe",
            env_kwargs_fn=GAME.env_kwargs,
            protocol_kind="player",
            inference=TRAINING,
            rng_seed=settings.seed,
        ),
        algorithm=algo,
        max_steps=GAME.max_steps_per_episode,
        concurrency=256,
    )
    checkpoints, metrics = folder / "checkpoints", folder / "metrics.jsonl"
    if not checkpoints.exists():  # nothing was saved of an earlier try
        metrics.unlink(missing_ok=True)
    return Trainer(
        model=policy.model,
        algo=algo,
        batch_source=source,
        cfg=train_config(settings, lr=1e-3, num_steps=settings.updates),
        publisher=SharedWeightsPublisher(server),
        checkpoint_config=CheckpointConfig(checkpoints, every_n_steps=20),
        resume_from="latest" if checkpoints.exists() else None,
        train_logger=TeeLogger(JSONLLogger(metrics), display),
        reducers=REDUCERS,
        tokenizer=policy.tokenizer,
    )


def player(server: LocalEngine) -> RolloutEngine:
    return GAME.rollout_engine(server, server.tokenizer)


# --- evaluation -------------------------------------------------------------------------------------------------

RATES = ("win_rate", "draw_rate", "loss_rate", "illegal_move_rate", "parse_error_rate")
LABELS = ("win", "draw", "loss", "illegal move", "unreadable")


def measured(phase: str, settings: Settings, server: LocalEngine, path: Path, display: Display) -> dict[str, Estimate]:
    """The shares of results on the same held-out games; kept in a file, so that a resumed run need not play them again."""
    display.begin(phase, settings.eval_games)
    if not path.exists():
        report = asyncio.run(
            evaluate(
                player(server),
                GAME.requests(range(EVAL_SEEDS, EVAL_SEEDS + settings.eval_games), MEASURING),
                max_steps=GAME.max_steps_per_episode,
                concurrency=256,
                on_rollouts=lambda rollouts: display.advance(len(rollouts)),
            )
        )
        unreadable = share_estimate([float(outcome.has_parse_error) for outcome in report.outcomes])
        nothing = share_estimate([0.0] * settings.eval_games)  # a rate that no game got far enough for
        found = {name: report.estimates.get(name, nothing) for name in RATES} | {"parse_error_rate": unreadable}
        path.write_text(json.dumps({name: [e.mean, e.low, e.high] for name, e in found.items()}))
    return {name: Estimate(*numbers) for name, numbers in json.loads(path.read_text()).items()}


def statement(
    settings: Settings,
    folder: Path,
    trainer: Trainer,
    before: dict[str, Estimate],
    after: dict[str, Estimate],
    seconds: float,
) -> Sequence[str]:
    num_games = settings.eval_games
    saved = trainer.checkpointer.latest() if trainer.checkpointer is not None else None
    return [
        "",
        f"{num_games} games as X against a random opponent, before and after {trainer.step} updates of GRPO:",
        "",
        "                 warm-up only              after RL",
        *(
            f"  {label:12}  {shown(before[name])}    {shown(after[name])}"
            for label, name in zip(LABELS, RATES, strict=True)
        ),
        "",
        f"[bold]Win rate {before['win_rate'].mean:.1%} → {after['win_rate'].mean:.1%}[/bold], "
        f"illegal moves {before['illegal_move_rate'].mean:.1%} → {after['illegal_move_rate'].mean:.1%}, "
        f"in {seconds / 60:.1f} minutes. In brackets: 95 % confidence intervals.",
        f"Run folder: {folder} (metrics.jsonl, checkpoints, the games of the warm-up)",
        "Next, in .venv/bin:",
        f"  ludic eval tic_tac_toe --set view=compact --model {folder}/warm_up --model {saved}",
        "  ludic play tic_tac_toe",
        "  ludic train --help",
    ]


def shown(estimate: Estimate) -> str:
    return f"{estimate.mean:6.1%} \\[{estimate.low:.1%}, {estimate.high:.1%}]".ljust(23)


if __name__ == "__main__":
    chosen = tyro.cli(Settings, description=__doc__)
    try:
        settings, folder = run_folder(chosen)
        main(settings, folder)
    except LudicError as mistake:
        sys.exit(f"first_run: {mistake}")
    except KeyboardInterrupt:
        print(f"Stopped. To go on: {sys.executable} {sys.argv[0]} --resume {folder}")
        sys.exit(130)
