"""The first five minutes: a language model of half a million parameters learns tic-tac-toe on this machine's CPU.

Shows: the whole way with the classes that a GPU run uses: a model from a config, supervised warm-up on generated games, GRPO
       with the embedded engine that serves the very weights being trained, evaluation with confidence intervals. What
       `ludic.run` puts together elsewhere is written out here.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from display import Display
from game import MAX_MOVES, play_scripted, protocol

from ludic.batch_gen import OfflineBatchSource, RolloutBatchSource, RolloutEngine, make_dataset_sequence_requests_fn
from ludic.cli.script import run_script
from ludic.distributed import SharedWeightsPublisher
from ludic.envs.tic_tac_toe import TicTacToeEnv
from ludic.eval import Estimate, evaluate, share_estimate
from ludic.inference import HFChatTemplate
from ludic.inference.local import LocalEngine
from ludic.models.execution import use_fastest_num_threads
from ludic.models.loading import LoadedModel, load_model, no_progress_bar
from ludic.run import build
from ludic.run.config.run_config import RunConfig
from ludic.run.folder import ResumePoint, failure_written, rollouts_file, saved_step
from ludic.run.names import CHECKPOINTS, CONFIG, METRICS, TRAINED
from ludic.run.settings import to_toml, with_values
from ludic.training import CheckpointConfig, JSONLLogger, TeeLogger, Trainer, TrainerConfig, make_grpo, make_sft
from ludic.training.config import LRSchedule
from ludic.training.learner.token_recorder import TokenRecorder
from ludic.types import (
    ConfigError,
    EnvSpec,
    InferenceSpec,
    ProtocolSpec,
    Reducer,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
    save_rollouts,
)

MODEL = Path(__file__).parent / "tiny" / "config.json"
GAME: dict[str, Any] = {"agent_starts": True, "opponent": "random", "view": "compact"}
TRAINING = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=3), return_=ReturnSpec.for_rl())
EVALUATION = InferenceSpec(sampling=SamplingParams(temperature=0.6, max_tokens=3))
LR = 1e-3
SYNTH_SEEDS, EVAL_SEEDS, NUM_TRAIN_SEEDS = 2_000_000, 1_000_000, 1_000_000
"""Three sets of games that share none."""
RESULTS = {
    f"{name}_rate": Reducer(
        "count_true", "result", transform=lambda value, name=name: value == name, normalize_by="rollouts"
    )
    for name in ("win", "draw", "loss")
}
REDUCERS = RESULTS | {"illegal_rate": Reducer("count_true", "illegal_move", normalize_by="rollouts")}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The budget of the run; what is not here is in the code below, to be changed there."""

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


def main(settings: Settings, *, out: Path = Path("runs/first_run"), resume: Path | None = None) -> int:
    """Args:
    out: The run's folder; if there is one already, a number is added.
    resume: Go on with the run in this folder, with the settings that it began with.
    """
    settings, folder = run_folder(settings, out, resume)
    try:
        with failure_written(folder):
            first_run(settings, folder)
    except KeyboardInterrupt:
        print(f"Stopped. To go on: {sys.executable} {sys.argv[0]} --resume {folder}")
        return 130
    return 0


def run_folder(given: Settings, out: Path, resume: Path | None) -> tuple[Settings, Path]:
    """The folder of the run, and the settings that it began with. An earlier run is never overwritten."""
    if resume is None:
        folder, number = out, 1
        while folder.exists():
            number += 1
            folder = out.with_name(f"{out.name}-{number}")
        folder.mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps(asdict(given)))
        return given, folder
    if not (resume / "settings.json").is_file():
        raise ConfigError(f"There is no run in {resume} to resume.")
    own, usual = json.loads((resume / "settings.json").read_text()), asdict(Settings())
    changed = [name for name, value in asdict(given).items() if value not in (usual[name], own[name])]
    if changed:
        raise ConfigError(f"A run goes on as it began; {', '.join(changed)} cannot be changed with --resume.")
    return Settings(**own), resume


def first_run(settings: Settings, folder: Path) -> None:
    began = time.perf_counter()
    with Display() as display:
        policy = warm_up(settings, folder, display)
        write_settings(settings, folder)
        server = LocalEngine(policy.model, policy.tokenizer, max_model_len=128, max_sequences=256, kv_tokens=65536)
        engine, recorder = make_engine(server), TokenRecorder(folder / TRAINED)
        try:
            display.begin("Playing before RL", settings.eval_games)
            before = results(settings, engine, folder / "before.json")
            trainer = make_trainer(settings, policy, server, recorder, folder, display)
            display.begin("GRPO", settings.updates, num_done=trainer.step)
            trainer.train_sync(settings.updates - trainer.step)
            if trainer.stop.is_set:
                raise KeyboardInterrupt
            display.begin("Playing after RL", settings.eval_games)
            after = results(settings, engine, folder / "after.json")
        finally:
            recorder.close()
            server.close()
    assert trainer.checkpointer is not None, "it was given a checkpoint_config"
    display.say(statement(before, after, settings, folder, trainer.checkpointer.latest(), time.perf_counter() - began))


# --- warm-up: what is a legal move? -----------------------------------------------------------------------------


def warm_up(settings: Settings, folder: Path, display: Display) -> LoadedModel:
    saved = folder / "warm_up"
    if (saved / "config.json").exists():
        use_fastest_num_threads()
        return load_model(str(saved), dtype=torch.float32, device="cpu")
    policy = load_model(str(MODEL), dtype=torch.float32, device="cpu", seed=settings.seed)
    num_threads, num_parameters = use_fastest_num_threads(), sum(weight.numel() for weight in policy.model.parameters())
    display.say(f"A Llama of {num_parameters:,} random parameters, on {num_threads} CPU thread(s). Folder: {folder}")
    games, metrics = folder / "games.jsonl", folder / "warm_up.jsonl"
    for path in (games, metrics):
        path.unlink(missing_ok=True)  # of an earlier try
    display.begin("Generating games", settings.synth_games)
    asyncio.run(play_at_random(settings, policy.tokenizer, games, display))
    algo = make_sft(length_normalize=True)
    display.begin("Warm-up", settings.warm_up_steps, shown=("nll", "tokens/s"))
    trainer = Trainer(
        model=policy.model,
        algo=algo,
        batch_source=OfflineBatchSource(games, algorithm=algo, batch_size=32, seed=settings.seed, chunk_rollouts=4096),
        cfg=train_config(settings, lr=3e-3, num_steps=settings.warm_up_steps),
        train_logger=TeeLogger(JSONLLogger(metrics), display),
    )
    trainer.train_sync(settings.warm_up_steps)
    if trainer.stop.is_set:
        raise KeyboardInterrupt
    policy.tokenizer.save_pretrained(saved)
    with no_progress_bar():
        policy.model.save_pretrained(saved)
    return policy


async def play_at_random(settings: Settings, tokenizer: Any, path: Path, display: Display) -> None:
    """Games of a player that plays any legal move, in the model's own tokens."""
    template, games = HFChatTemplate(tokenizer), []
    for index in range(settings.synth_games):
        games.append(await play_scripted(TicTacToeEnv(**GAME), "random", SYNTH_SEEDS + index, template, tokenizer))
        display.count(1)
    save_rollouts(games, path)


def train_config(settings: Settings, *, lr: float, num_steps: int) -> TrainerConfig:
    schedule = LRSchedule("cosine", num_steps // 20, num_steps, min_ratio=0.05)
    return TrainerConfig(
        lr=lr, lr_schedule=schedule, betas=(0.9, 0.95), weight_decay=0.0, max_seq_len=128, seed=settings.seed
    )


def write_settings(settings: Settings, folder: Path) -> None:
    """The settings in the words of `ludic train`, for everything that reads run folders, such as `ludic view`."""
    values = {
        "id": "tic_tac_toe", "set": GAME, "max_steps": MAX_MOVES, "model": str(folder / "warm_up"), "device": "cpu",
        "max_tokens": TRAINING.sampling.max_tokens, "group_size": settings.group_size, "steps": settings.updates,
        "rollouts_per_update": settings.groups * settings.group_size, "lr": LR, "schedule": "cosine", "weight_decay": 0.0,
        "warmup_steps": settings.updates // 20, "max_seq_len": 128, "seed": settings.seed, "eval_episodes": settings.eval_games,
    }  # fmt: skip
    config = build(with_values(RunConfig(), values)).config  # with what `ludic train` would choose by itself
    shown = replace(config, run=replace(config.run, name=folder.name, runs=folder.parent))
    (folder / CONFIG).write_text(to_toml(shown))


# --- reinforcement: which move is good? -------------------------------------------------------------------------


def make_engine(server: LocalEngine, games: Path | None = None) -> RolloutEngine:
    """Plays with the weights that are trained; the games are kept in a file if one is given."""
    template = HFChatTemplate(server.tokenizer)
    return RolloutEngine(protocol_registry={"player": lambda: protocol(server, template)}, jsonl_path=games)


def make_trainer(
    settings: Settings,
    policy: LoadedModel,
    server: LocalEngine,
    recorder: TokenRecorder,
    folder: Path,
    display: Display,
) -> Trainer:
    algo = make_grpo(group_size=settings.group_size)
    games = rollouts_file(folder, ResumePoint(first_step=saved_step(folder)))
    games.unlink(missing_ok=True)  # of an earlier try
    source = RolloutBatchSource(
        make_engine(server, games),
        requests_fn=make_dataset_sequence_requests_fn(
            range(NUM_TRAIN_SEEDS),
            batch_size=settings.groups,
            group_size=settings.group_size,
            env_kind="tic_tac_toe",
            env_kwargs_fn=lambda _: GAME,
            protocol_kind="player",
            inference=TRAINING,
            rng_seed=settings.seed,
        ),
        algorithm=algo,
        max_steps=MAX_MOVES,
        concurrency=256,
    )
    checkpoints, metrics = folder / CHECKPOINTS, folder / METRICS
    if not checkpoints.exists():  # nothing was saved of an earlier try
        metrics.unlink(missing_ok=True)
    return Trainer(
        model=policy.model,
        algo=algo,
        batch_source=source,
        cfg=train_config(settings, lr=LR, num_steps=settings.updates),
        publisher=SharedWeightsPublisher(server),
        checkpoint_config=CheckpointConfig(checkpoints, every_n_steps=20),
        resume_from="latest" if checkpoints.exists() else None,
        train_logger=TeeLogger(JSONLLogger(metrics), display),
        reducers=REDUCERS,
        tokenizer=policy.tokenizer,
        token_recorder=recorder,
    )


# --- evaluation -------------------------------------------------------------------------------------------------

LABELS = {
    "win_rate": "win", "draw_rate": "draw", "loss_rate": "loss", "illegal_move_rate": "illegal move",
    "parse_error_rate": "unreadable",
}  # fmt: skip


def results(settings: Settings, engine: RolloutEngine, path: Path) -> dict[str, Estimate]:
    """The shares of results on the same held-out games; kept in a file, so that a resumed run need not play them again."""
    if not path.exists():
        request = RolloutRequest(
            env=EnvSpec("tic_tac_toe", GAME), protocol=ProtocolSpec("player"), inference=EVALUATION
        )
        seeds = range(EVAL_SEEDS, EVAL_SEEDS + settings.eval_games)
        requests = [replace(request, env_seed=seed, sampling_seed=seed) for seed in seeds]
        report = asyncio.run(evaluate(engine, requests, max_steps=MAX_MOVES, concurrency=256))
        unreadable = share_estimate([float(outcome.has_parse_error) for outcome in report.outcomes])
        nothing = share_estimate([0.0] * settings.eval_games)  # a rate that no game got far enough for
        found = {name: report.estimates.get(name, nothing) for name in LABELS} | {"parse_error_rate": unreadable}
        path.write_text(json.dumps({name: [e.mean, e.low, e.high] for name, e in found.items()}))
    return {name: Estimate(*numbers) for name, numbers in json.loads(path.read_text()).items()}


def statement(
    before: dict[str, Estimate],
    after: dict[str, Estimate],
    settings: Settings,
    folder: Path,
    saved: Path | None,
    seconds: float,
) -> str:
    rows = "\n".join(f"  {label:12}  {shown(before[name])}    {shown(after[name])}" for name, label in LABELS.items())
    won, illegal = ([f"{e[name].mean:.1%}" for e in (before, after)] for name in ("win_rate", "illegal_move_rate"))
    return f"""
{settings.eval_games} games as X against a random opponent, before and after {settings.updates} updates of GRPO:

                 warm-up only              after RL
{rows}

[bold]Win rate {" → ".join(won)}[/bold], illegal moves {" → ".join(illegal)}, in {seconds / 60:.1f} minutes. \
In brackets: 95 % confidence intervals.
Run folder: {folder} (settings, metrics, checkpoints, every game)
Next, in .venv/bin:
  ludic view {folder.parent}
  ludic eval tic_tac_toe --set view=compact --model {folder}/warm_up --model {saved}
  ludic play tic_tac_toe
  ludic train --help"""


def shown(estimate: Estimate) -> str:
    return f"{estimate.mean:6.1%} \\[{estimate.low:.1%}, {estimate.high:.1%}]".ljust(23)


if __name__ == "__main__":
    run_script(lambda args: tyro.cli(main, args=args, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)))
