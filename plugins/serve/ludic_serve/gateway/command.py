"""`ludic gateway`: a model behind the gateway's three APIs, with sessions for agents in other processes and languages. See
docs/gateway.md."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.cli.args import need_extras, parse
from ludic.http.address import check_port, require_port
from ludic.http.tokens import CONTROL_HEADER, CONTROL_VARIABLE, find_token
from ludic.run.config.entries import at_least
from ludic.run.config.model import Dtype, ModelSettings
from ludic.run.names import CONFIG, METRICS
from ludic.tasks import long_lived_objects_exempt
from ludic.types import ConfigError, InferenceSpec, ReturnSpec, Rollout, SamplingParams
from ludic.types.rollout_files import save_rollouts
from ludic.util.stop import DRAIN_S, serve_until_stopped
from ludic.util.urls import PUT_LOGIN, refuse_login
from ludic_serve.command import find_engine

if TYPE_CHECKING:
    from ludic.run import Run
    from ludic_serve.gateway import Policy, Session, SessionBatchSource

_SHOWN = ("avg_total_reward", "num_waiting", "num_skipped", "loss", "grad_norm", "lag_max", "num_stale", "tokens_per_s")
_WITHOUT_END = 2**31 - 1
"""Updates of a run that trains until it is stopped."""
_TOKEN_FOLDER = Path("runs/gateway")


@dataclass(frozen=True)
class GatewayArgs:
    """Serve a model as OpenAI's and Anthropic's APIs do, and record every session of an agent as rollouts."""

    model: str
    """A folder, a run or checkpoint, a hub id, a .gguf file, smollm2-135m or tiny. With --server: its tokenizer."""
    host: str = "127.0.0.1"
    """Address to listen on. Every session has its own key, and sessions are opened with the control token."""
    port: int = 8001
    """Port; 0 takes a free one."""
    control_token_file: Path | None = None
    """File of mode 600 with the control token. Default: $LUDIC_CONTROL_TOKEN, else runs/gateway/control_token, which is made."""
    save: Path | None = None
    """Append the rollouts of closed sessions to this file, one JSON object per line; *.gz is compressed."""
    max_idle_s: float = 3600.0
    """Close sessions without a call for so long; those with a reward are saved."""
    temperature: float = 1.0
    """Sampling temperature, which overrides the agent's, so that samples can be trained on."""
    max_tokens: int = 1024
    """Tokens of one reply at most."""
    lenient: bool = False
    """Accept formats of the answer and forced tools without effect: rollouts say so, and the model may answer otherwise."""
    train: bool = False
    """Train the model on closed sessions that were rewarded, while it serves. Not with --server."""
    algo: str = "reinforce_pp"
    """Algorithm of --train. One that compares groups (grpo) takes sessions that were opened with a `group`."""
    algo_set: dict[str, Any] = field(default_factory=dict)
    """Arguments of the algorithm, --algo-set KEY=VALUE."""
    sessions_per_update: int = 16
    """Sessions of one update."""
    steps: int | None = None
    """Updates after which the command ends. Default: it trains until it is stopped."""
    lr: float = 1e-5
    """Learning rate."""
    lora_rank: int = 0
    """Rank of a LoRA adapter; 0 trains all weights."""
    max_seq_len: int | None = None
    """Tokens of a sample; longer ones are dropped. Default: what the engine takes, 32,768 at most."""
    max_lag: int = 8
    """Versions that a sample's oldest token may be behind; older samples are dropped."""
    out: Path = Path("runs/gateway_train")
    """Folder of --train: metrics.jsonl, and checkpoints that load like any model."""
    checkpoint_every: int = 10
    """Updates between checkpoints; one is always written at the end."""
    resume: bool = False
    """Go on with the training in --out."""
    server: str | None = None
    """URL of a vLLM server (`ludic serve --engine vllm`) that samples. Default: the engine in this process."""
    max_sequences: int | None = None
    """Requests computed at the same time."""
    max_model_len: int | None = None
    """Tokens of prompt and reply together."""
    dtype: Dtype = "auto"
    """Number format of the weights; auto is what this hardware is fast at."""
    device: str | None = None
    """cpu, cuda, cuda:1; the GPU if there is one."""
    drain_s: float = DRAIN_S
    """Seconds that calls in progress may go on after SIGTERM or Ctrl-C."""

    def __post_init__(self) -> None:
        require_port(self.port)
        at_least(1, max_tokens=self.max_tokens, max_sequences=self.max_sequences, max_model_len=self.max_model_len)
        at_least(2, max_seq_len=self.max_seq_len)
        at_least(1, sessions_per_update=self.sessions_per_update, steps=self.steps)
        at_least(0, temperature=self.temperature, drain_s=self.drain_s)
        if not self.max_idle_s > 0:
            raise ConfigError(f"--max-idle-s {self.max_idle_s:g}; it must be more than 0.")
        if self.train and (self.server is not None or self.temperature == 0):
            raise ConfigError(
                "--train updates the model in this process, and learns from samples: leave --server out, and give a temperature "
                "above 0."
            )
        if self.server is not None:
            refuse_login("server", self.server, PUT_LOGIN)

    @property
    def inference(self) -> InferenceSpec:
        sampling = SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)
        return InferenceSpec(sampling=sampling, return_=ReturnSpec.for_rl())


def gateway(args: list[str]) -> int:
    given = parse(GatewayArgs, args, prog="ludic gateway")
    need_extras("serve", "ludic gateway")
    check_port(given.host, given.port)  # before a large model is loaded
    found = find_token(given.control_token_file, CONTROL_VARIABLE, _TOKEN_FOLDER)
    in_shell = f"$(cat {found.file})" if found.file else f"${found.variable}"
    run = training_run(given) if given.train else None
    if given.save is not None:
        save_rollouts([], given.save)  # a path that cannot be written is named now
    with contextlib.ExitStack() as closing:
        if run is None:
            policy, sessions = closing.enter_context(_policy(given)), None
        else:
            policy, sessions = prepared(closing.enter_context(run), given)
        asyncio.run(serve_sessions(given, policy, found.token, in_shell, run=run, sessions=sessions))
    return 0


@contextlib.contextmanager
def _policy(given: GatewayArgs) -> "Iterator[Policy]":
    """The policy that answers, where nothing is trained."""
    from ludic.run.model import load_policy, load_tokenizer, make_template
    from ludic_serve.gateway import Policy

    settings = ModelSettings(model=given.model, dtype=given.dtype, device=given.device, lora_rank=given.lora_rank)
    if given.server is not None:
        from ludic.util.stop import run_sync

        template = make_template(load_tokenizer(settings), with_tools=True)
        client = find_engine("vllm").client(given.server)
        try:
            served = run_sync(client.control_get(client.servers[0], "/v1/models"))["data"][0]["id"]
            yield Policy(client=client, chat_template=template, model=served)
        finally:
            run_sync(client.close())
        return
    from ludic.inference.local import LocalEngine

    loaded = load_policy(settings)
    engine = LocalEngine(
        loaded.model, loaded.tokenizer, max_sequences=given.max_sequences, max_model_len=given.max_model_len
    )
    try:
        template = make_template(loaded.tokenizer, with_tools=True)
        yield Policy(client=engine, chat_template=template, model=loaded.name)
    finally:
        engine.close()


def training_run(given: GatewayArgs) -> "Run":
    """The run of `--train`; ConfigError if its folder holds another one. Nothing is loaded."""
    from ludic.run import RunConfig, build
    from ludic.run.folder import write_config
    from ludic.run.model import LONGEST_USUAL, usual_length
    from ludic.training import PrintLogger
    from ludic_serve.gateway.online import OutsideSession
    from ludic_serve.gateway.protocol import TaskEnv

    class Sampled(OutsideSession):
        max_sequences, max_model_len = given.max_sequences, given.max_model_len

    has_run = (given.out / METRICS).exists()
    if has_run and not given.resume:
        raise ConfigError(f"There is a run in {given.out} already. Go on with --resume, or choose another --out.")
    model = ModelSettings(model=given.model, dtype=given.dtype, device=given.device, lora_rank=given.lora_rank)
    longest = given.max_seq_len or min(usual_length(model), given.max_model_len or LONGEST_USUAL)
    run = build(
        RunConfig(model=model),
        env=TaskEnv,
        data=["The tasks are those of the agents outside."],
        algo=given.algo,
        algo_set=given.algo_set,
        group_size=given.algo_set.get("group_size"),
        correction=("none",),
        rollouts_per_update=given.sessions_per_update,
        steps=given.steps or _WITHOUT_END,
        lr=given.lr,
        max_seq_len=longest,
        too_long="drop",
        max_lag=given.max_lag,
        max_tokens=min(given.max_tokens, longest - 1),
        temperature=given.temperature,
        checkpoint_every=given.checkpoint_every,
        save_rollouts=False,
        save_tokens="off",
        name=given.out.name,
        runs=given.out.parent,
        logger=PrintLogger(keys=_SHOWN),
    )
    command = f"ludic gateway --model {given.model} --train --out {given.out}"
    run.resolved = replace(
        run.resolved,
        parts=replace(run.resolved.parts, session=Sampled, command=command),
        trainer=replace(run.resolved.trainer, max_lag=given.max_lag),  # 0 is a limit too: samples come at any time
    )
    if has_run and not (given.out / CONFIG).exists():  # ludic 0.2.0 wrote none
        write_config(run.resolved)
    run.starting_point(resume=given.resume)
    return run


def prepared(run: "Run", given: GatewayArgs) -> "tuple[Policy, SessionBatchSource]":
    """The policy that the run trains, and where closed sessions go."""
    from ludic_serve.gateway.online import OutsideSession

    run.prepare(resume=given.resume)
    assert isinstance(run.session, OutsideSession), "the run was given it"
    return run.session.policy, run.session.sessions


async def serve_sessions(
    given: GatewayArgs,
    policy: "Policy",
    token: str,
    shown: str,
    *,
    run: "Run | None" = None,
    sessions: "SessionBatchSource | None" = None,
) -> None:
    """Serve until a signal, or until the run has made its last update. `shown`: how a shell writes the token."""
    from ludic_serve.gateway import Gateway

    is_training = False

    def closed(session: "Session", rollouts: list[Rollout]) -> None:
        if given.save is not None:
            save_rollouts(rollouts, given.save)
        if sessions is not None:
            sessions.add(session, rollouts)

    server = Gateway(
        {policy.model: policy},
        default=policy.model,
        control_token=token,
        inference=given.inference,
        on_closed=closed,
        max_idle_s=given.max_idle_s,
        lenient=given.lenient,
    )

    async def serve() -> None:
        nonlocal is_training
        await server.start(given.host, given.port)
        try:
            print(_how_to_use(server.url, policy.model, shown, given), flush=True)
            if run is None:
                await asyncio.Event().wait()
            else:
                is_training = True
                await run.train_async()  # until a signal, or the last step; then it saves
        finally:
            is_training = False
            num_open = server.num_sessions
            await server.close(given.drain_s)
            open_ = "1 session was" if num_open == 1 else f"{num_open} sessions were"
            print("Stopped." + (f" {open_} open; their rollouts are not saved." if num_open else ""))

    with long_lived_objects_exempt():
        await serve_until_stopped(serve(), hears_signals=lambda: is_training)


def _how_to_use(url: str, model: str, token: str, given: GatewayArgs) -> str:
    control = f'-H "{CONTROL_HEADER}: {token}"'
    saved = f", saves its rollouts to {given.save}" if given.save is not None else ""
    learns = (
        f"\n  training:        every {given.sessions_per_update} rewarded sessions, in {given.out}"
        if given.train
        else ""
    )
    return (
        f"Gateway of {model} at {url} (Ctrl-C stops)\n"
        f"  open a session:  curl -X POST {url}/sessions {control}\n"
        "                   answers with id, base_url and api_key, for any client of OpenAI's or Anthropic's API\n"
        f"  its reward:      curl -X POST {url}/sessions/ID/reward {control} -d '{{\"value\": 1.0}}'\n"
        f"  its end:         curl -X POST {url}/sessions/ID/close {control}{saved and f'   ({saved[2:]})'}{learns}"
    )
