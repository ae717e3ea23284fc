"""Presets: each is a credit rule and a loss, with the defaults of the specification."""

import inspect
import re
import shlex
from dataclasses import replace
from math import log
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ludic.cli.args import parse_run
from ludic.cli.train import TrainArgs
from ludic.run import build
from ludic.run.given import env_factory
from ludic.run.parts.algorithm import make_algorithm
from ludic.training import algorithms
from ludic.training.algorithms import (
    RLAlgorithm,
    make_cispo,
    make_dapo,
    make_dr_grpo,
    make_grpo,
    make_reinforce_pp,
    make_scalerl,
    make_sft,
    spo_algorithm,
)
from ludic.training.learner.packing import collate_saw_items
from ludic.training.losses import (
    BatchNormalized,
    CompositeLoss,
    Needs,
    Reduction,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    tokens_from_logits,
)
from ludic.training.losses.corrections import effective_sample_size
from ludic.training.metric_names import METRICS
from ludic.types import ActorTokenLogps, ConfigError, SampleAttachments, SAWBatch, SAWItem
from tests.unit.training.hand_made import item

pytestmark = pytest.mark.slow

_OF_PARTS = {
    "group_size": "group_size", "group_normalize_adv": "normalize_adv", "positive_only": "positive_only", "gamma": "gamma",
    "step_weight": "step_weight", "clip_eps_low": "clip_eps_low", "clip_eps_high": "clip_eps_high", "tau_pos": "tau_pos",
    "tau_neg": "tau_neg", "beta": "beta", "wanted": "wanted", "unwanted": "unwanted", "observation_coeff": "coeff", "value_coeff": "coeff", "entropy_coeff": "coeff",
}  # fmt: skip
"""Setting -> the attribute of a credit rule or a loss that it becomes."""
DROP = "drop_zero_weight=False drop_zero_weight_eps=0.0001"
GROUP = "group_size=8 group_normalize_adv=True positive_only=False"
CLIP = "clip_eps_low=0.2 clip_eps_high=0.2"

# SPEC 12; dapo, rloo and reinforce_pp, which it does not name, as their papers say.
# name -> (credit rule and loss, settings and their defaults)
PRESETS = {
    "reinforce": ("MonteCarloReturn ReinforceLoss", f"gamma=1.0 reduction=None {DROP}"),
    "reinforce_baseline": (
        "MonteCarloReturn ReinforceBaselineLoss",
        f"gamma=1.0 normalize_adv=False reduction=None {DROP}",
    ),
    "grpo": (
        "GroupNormalizedReturn TokenClippedSurrogateLoss",
        f"{GROUP} {CLIP} length_normalize=False reduction=None ratio_clip=None behavior_cap=None {DROP}",
    ),
    "dr_grpo": (
        "GroupNormalizedReturn TokenClippedSurrogateLoss",
        f"group_size=8 positive_only=False {CLIP} constant_length=None reduction=None ratio_clip=None {DROP}",
    ),
    "maxrl": (
        "MaximumLikelihoodReturn TokenClippedSurrogateLoss",
        f"group_size=8 {CLIP} reduction=None ratio_clip=None {DROP}",
    ),
    "echo": (
        "GroupNormalizedReturn CompositeLoss",
        f"group_size=8 group_normalize_adv=True observation_coeff=0.05 {CLIP} reduction=None ratio_clip=None train_on=()",
    ),
    "gdpo": (
        "ComponentNormalizedReturn BatchNormalized",
        f"group_size=8 component_weights=None normalize_batch=True {CLIP} reduction=None ratio_clip=None {DROP}",
    ),
    "dapo": (
        "GroupNormalizedReturn TokenClippedSurrogateLoss",
        f"group_size=8 {CLIP}8 filter_zvp=True zvp_filter_eps=1e-06",
    ),
    "gspo": (
        "GroupNormalizedReturn ClippedSurrogateLoss",
        f"{GROUP} clip_eps_low=0.0003 clip_eps_high=0.0004 length_normalize=True ratio_clip=None reduction=sample_mean {DROP}",
    ),
    "cispo": (
        "GroupNormalizedReturn CISPOLoss",
        f"{GROUP} clip_eps_low=1000000.0 clip_eps_high=0.2 length_normalize=True kl_coeff=0.0 {DROP}",
    ),
    "sapo": (
        "GroupNormalizedReturn SAPOLoss",
        f"{GROUP} tau_pos=1.0 tau_neg=1.05 length_normalize=False reduction=None {DROP}",
    ),
    "gmpo": (
        "GroupNormalizedReturn GMPOLoss",
        f"{GROUP} clip_eps_low=0.4 clip_eps_high=0.4 length_normalize=True ratio_clip=None reduction=sample_mean {DROP}",
    ),
    "gigpo": (
        "StateGroupReturn TokenClippedSurrogateLoss",
        f"group_size=8 gamma=0.95 step_weight=1.0 state_of=observation_before {CLIP} reduction=None {DROP}",
    ),
    "rloo": (
        "LeaveOneOutReturn ReinforceLoss",
        f"group_size=4 length_normalize=False reduction=None ratio_clip=2.0 {DROP}",
    ),
    "reinforce_pp": ("MonteCarloReturn BatchNormalized", f"gamma=1.0 {CLIP} kl_coeff=0.0"),
    "ppo": (
        "PerStepReward CompositeLoss",
        f"gamma=1.0 lam=0.95 over=tokens normalize_adv=True {CLIP} critic=shared value_coeff=0.5 value_clip_eps=0.2 entropy_coeff=0.0 behavior_cap=None",
    ),
    "scalerl": (
        "HybridNormalizedReturn CISPOLoss",
        f"group_size=8 positive_only=False {CLIP}8 length_normalize=True kl_coeff=0.0 filter_zvp=True zvp_filter_eps=1e-06 {DROP}",
    ),
    "sft": ("ConstantCredit MaskedCausalLMCrossEntropyLoss", "length_normalize=False reduction=None train_on=()"),
    "rft": (
        "ConstantCredit MaskedCausalLMCrossEntropyLoss",
        "min_reward=1.0 distinct=False max_per_group=None length_normalize=False reduction=None train_on=()",
    ),
    "fold_grpo": (
        "FoldedReturn TokenClippedSurrogateLoss",
        f"group_size=8 max_main_tokens=None unfolded=1.0 failed_call=1.0 {CLIP}8 reduction=None ratio_clip=None",
    ),
    "proposer_solver": (
        "ProposerSolverReturn TokenClippedSurrogateLoss",
        f"group_size=8 proposer=proposer normalize_adv=True {CLIP} reduction=None ratio_clip=None {DROP}",
    ),
    "dpo": ("ConstantCredit PreferencePairLoss", "beta=0.1 length_normalize=False"),
    "ipo": ("ConstantCredit PreferencePairLoss", "beta=0.1 length_normalize=False"),
    "kto": ("ConstantCredit KTOLoss", "beta=0.1 wanted=1.0 unwanted=1.0 length_normalize=False"),
    "opd": (
        "ConstantCredit CISPOLoss",
        "kl=sampled kl_coeff=1.0 discount=0.0 baseline=True clip_eps_high=1.0 top_k=None length_normalize=True",
    ),
    "grpo_opd": (
        "GroupNormalizedReturn TokenClippedSurrogateLoss",
        f"group_size=8 group_normalize_adv=True {CLIP} length_normalize=False reduction=None ratio_clip=None kl_coeff=1.0 discount=0.0 baseline=True",
    ),
    "mopd": (
        "ScaledCredit CorrectedLoss",
        "group_size=8 outcome_coeff=1.0 group_normalize_adv=True band_low=0.5 band_high=2.0 baseline=True",
    ),
    "spo": ("TrackedValueReturn BatchNormalized", f"d_half=0.1 rho_min=0.875 rho_max=0.96 low=0.0 high=1.0 {CLIP}"),
}
FIXED = {
    "reinforce": {"length_normalize": False, "reduction": Reduction("sample_sum"), "ratio_clip": 2.0},
    "reinforce_baseline": {"normalize": False, "reduction": Reduction("sample_sum"), "ratio_clip": 2.0},
    "echo": {"needs": Needs(observations=True)},
    "dapo": {"reduction": Reduction("token_mean")},
    "gigpo": {"ratio_clip": None},
    "ppo": {"needs": Needs(values=True)},
    "sft": {"reduction": Reduction("sample_sum")},
    "dpo": {"kind": "dpo"},
    "ipo": {"kind": "ipo"},
    "opd": {"clip_eps_low": 1e6, "reduction": Reduction("sample_mean")},
}
"""What a loss is made with beside its settings."""


def maker(name):
    """`make_spo` also hands out its tracker; the registry's maker does not."""
    return spo_algorithm if name == "spo" else getattr(algorithms, f"make_{name}")


def test_the_table_names_every_preset():
    assert {f"make_{name}" for name in PRESETS} == {name for name in algorithms.__all__ if name.startswith("make_")}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_specified_parts_and_defaults(name):
    parts, settings = PRESETS[name]
    parameters = inspect.signature(maker(name)).parameters
    found = [f"{key}={getattr(p.default, '__name__', p.default)}" for key, p in parameters.items()]
    assert sorted(found) == sorted([*settings.split(), f"name={name}"])
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    made = maker(name)()
    assert isinstance(made, RLAlgorithm) and made.name == name and maker(name)(name="mine").name == "mine"
    assert f"{type(made.credit_assigner).__name__} {type(made.loss).__name__}" == parts
    assert {key: getattr(made.loss, key) for key in FIXED.get(name, {})} == FIXED.get(name, {})


# --- settings reach their part --------------------------------------------------------------------------------

OTHER = {bool: lambda value: not value, int: lambda value: value + 1, float: lambda value: value * 0.75 + 0.01}


@pytest.mark.parametrize("name", PRESETS)
def test_every_plain_setting_changes_the_algorithm(name):
    """Where a setting has the name of an attribute of the credit rule or the loss, that attribute is the setting."""
    defaults = {key: p.default for key, p in inspect.signature(maker(name)).parameters.items()}
    for key, default in defaults.items():
        if key not in _OF_PARTS or type(default) not in OTHER:
            continue
        value = OTHER[type(default)](default)
        made = maker(name)(**{key: value})
        parts = [made.credit_assigner, getattr(made.credit_assigner, "inner", None), made.advantages, made.loss]
        parts += [getattr(made.loss, "loss", None), *(term.loss for term in getattr(made.loss, "terms", ()))]
        assert value in [getattr(part, _OF_PARTS[key], None) for part in parts], key


def test_dr_grpo_divides_by_a_constant_length_if_given():
    loss = make_dr_grpo(constant_length=512).loss
    assert loss.reduction == Reduction("constant", 512)
    with pytest.raises(ConfigError, match="constant_length"):
        make_dr_grpo(constant_length=0)


def test_reinforce_pp_normalises_over_the_batch_and_means_over_tokens():
    inner = make_reinforce_pp(clip_eps_high=0.3).loss.loss
    assert type(inner) is TokenClippedSurrogateLoss
    assert (inner.clip_eps_low, inner.clip_eps_high, inner.reduction) == (0.2, 0.3, Reduction("token_mean"))


@pytest.mark.parametrize("make", [make_cispo, make_scalerl, make_reinforce_pp])
def test_a_kl_coefficient_adds_a_kl_term(make):
    plain, loss = make().loss, make(kl_coeff=0.05).loss
    assert isinstance(loss, CompositeLoss)
    policy, kl = loss.terms
    assert (policy.name, type(policy.loss), kl.name, type(kl.loss)) == ("policy", type(plain), "kl", TokenKLLoss)
    assert kl.loss.coeff == 0.05
    to_reference = make is make_reinforce_pp
    assert (kl.loss.to, kl.loss.estimator) == (("reference", "k2") if to_reference else ("actor", "k3"))
    assert loss.needs.reference is to_reference and not plain.needs.reference


# --- preprocess -----------------------------------------------------------------------------------------------


def logps():
    return ActorTokenLogps([-0.5, -0.5])


DISTILLED = {"opd", "grpo_opd", "mopd"}
"""They take only samples that a teacher has seen."""
COMPARING = {"dpo", "ipo", "kto"}
"""They take stored preferences and a reference; tests/golden/test_preferences.py."""


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - DISTILLED - COMPARING - {"sft", "rft"}))
def test_a_preset_whose_loss_uses_ratios_asks_for_the_samplers_log_probs(name):
    made = maker(name)()
    assert made.loss.needs.old_logps
    with pytest.raises(ValueError, match=r"1 of 2 items \(indices 1\).*ReturnSpec\.for_rl"):
        made.preprocess(SAWBatch(items=[item(logps=logps()), item()]))
    assert len(made.preprocess(SAWBatch(items=[item(logps=logps())]))) == 1


def test_sft_takes_any_sample():
    made = make_sft()
    assert len(made.preprocess(SAWBatch(items=[item()]))) == 1 and not made.loss.needs.old_logps


def test_sft_ignores_the_sampling_temperature():
    cold = replace(item(2.0), attachments=SampleAttachments(temperature=0.6, token_weights=[1.0, 3.0]))
    (seen,) = make_sft().preprocess(SAWBatch(items=[cold])).items
    assert seen.attachments.temperature is None and cold.attachments.temperature == 0.6
    assert seen.token_weights.tolist() == [1.0, 3.0] and seen.input_ids.tolist() == cold.input_ids.tolist()


@pytest.mark.parametrize("name", PRESETS)
def test_divisors_and_caps_reach_the_loss(name):
    def policy_loss(**settings):
        loss = maker(name)(**settings).loss
        while isinstance(loss, BatchNormalized | CompositeLoss):
            loss = loss.loss if isinstance(loss, BatchNormalized) else loss.terms[0].loss
        return loss

    has = {setting.partition("=")[0] for setting in PRESETS[name][1].split()}
    if "ratio_clip" in has:
        assert (policy_loss(ratio_clip=5.0).ratio_clip, policy_loss(ratio_clip=None).ratio_clip) == (5.0, None)
    if "behavior_cap" in has:
        assert policy_loss(behavior_cap=3.0).behavior_cap == 3.0
    if "reduction" in has:
        assert policy_loss(reduction="episode_mean").reduction == Reduction("episode_mean")
    if "length_normalize" in has:
        for value, kind in ((True, "sample_mean"), (False, "sample_sum")):
            loss = policy_loss(length_normalize=value)
            assert getattr(loss, "length_normalize", value) == value
            assert hasattr(loss, "length_normalize") or loss.reduction == Reduction(kind)


@pytest.mark.parametrize("name", sorted(name for name, row in PRESETS.items() if "drop_zero_weight" in row[1]))
def test_zero_weights_are_dropped_only_if_asked(name):
    batch = SAWBatch(items=[item(0.0, logps=logps()), item(5e-4, logps=logps()), item(1.0, logps=logps())])
    assert len(maker(name)().preprocess(batch)) == 3
    dropped = maker(name)(drop_zero_weight=True).preprocess(batch)
    assert [kept.weight for kept in dropped.items] == [5e-4, 1.0]
    assert dropped.meta["zero_weight_frac"] == pytest.approx(1 / 3)
    wider = maker(name)(drop_zero_weight=True, drop_zero_weight_eps=1e-3).preprocess(batch)
    assert [kept.weight for kept in wider.items] == [1.0]
    assert len(batch) == 3  # the batch that was given stays as it was


def test_a_sample_that_is_dropped_needs_no_log_probs():
    batch = SAWBatch(items=[item(0.0), item(1.0, logps=logps())])
    assert len(make_grpo(drop_zero_weight=True).preprocess(batch)) == 1


@pytest.mark.parametrize("make", [make_dapo, make_scalerl])
def test_zero_variance_groups_are_filtered_by_default(make):
    flat = [item(0.0, logps=logps(), group_id="flat", rollout_id=f"f{i}") for i in range(2)]
    mixed = [item(w, logps=logps(), group_id="mixed", rollout_id=f"m{w}") for w in (1.0, -1.0)]
    batch = SAWBatch(items=flat + mixed)
    kept = make().preprocess(batch)
    assert kept.items == mixed and kept.meta["zvp_filter_frac"] == 0.5
    assert make(filter_zvp=False).preprocess(batch).items == batch.items
    assert make(zvp_filter_eps=10.0).preprocess(batch).items == []


# --- in use ---------------------------------------------------------------------------------------------------


class Bigram(torch.nn.Module):
    """A language model in one table: the next word depends on this one."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(12, 12))

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.table[input_ids])


@pytest.mark.parametrize(
    "name", [name for name in PRESETS if name not in {"ppo", *COMPARING}]
)  # a critic needs hidden states
def test_one_step_raises_the_good_sample_and_lowers_the_bad_one(name):
    attached = SampleAttachments(actor_logps=ActorTokenLogps([-log(12)] * 2))  # on-policy: all 12 words alike
    good = SAWItem([9, 9, 9], None, [0, 1, 1], 1.0, {}, attached)
    bad = SAWItem([3, 3, 3], None, [0, 1, 1], 1.0 if name == "sft" else -1.0, {}, attached)
    model, made = Bigram(), maker(name)()
    loss, stats = made.compute_loss(model, collate_saw_items([good, bad], pad_token_id=0))
    loss.backward()
    assert stats["loss"].item() == pytest.approx(loss.item())
    up, down = model.table.grad[9, 9].item(), model.table.grad[3, 3].item()
    assert up < 0 and (down < 0 if name == "sft" else down > 0)


# --- documentation --------------------------------------------------------------------------------------------

PAGES = Path(__file__).parents[3] / "docs" / "algorithms"
HEADINGS = ["Usage", "Settings", "Results and tests"]


def page_of(name):
    shared = {"reinforce_baseline": "reinforce", "ipo": "dpo", "kto": "dpo"}
    return PAGES / f"{shared.get(name, name)}.md"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_page_and_every_metric_of_its_loss_is_explained(name):
    text = page_of(name).read_text()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == HEADINGS
    attached = SampleAttachments(actor_logps=ActorTokenLogps([-1.0]))
    batch = collate_saw_items([SAWItem([1, 2], None, [0, 1], 1.0, {}, attached)], pad_token_id=0)
    tokens = tokens_from_logits(torch.zeros(1, 2, 4), batch, with_observed=True)
    if name == "ppo":
        tokens = replace(tokens, values=torch.zeros(1), returns=torch.ones(1), old_values=torch.zeros(1))
    if name in COMPARING:
        two = collate_saw_items(
            [SAWItem([1, 2], None, [0, 1], weight) for weight in (1.0, 0.0 if name == "kto" else -1.0)], pad_token_id=0
        )
        tokens = tokens_from_logits(torch.zeros(2, 2, 4), {**two, "ref_logps": torch.zeros(2, 2)})
        tokens = replace(tokens, comparisons=("a", "a"))
    _, stats = maker(name)().loss(tokens)
    stats = effective_sample_size(dict.fromkeys(stats, 1.0))  # as it is logged
    stats = {metric.split("/")[-1] for metric in stats} if name in ("ppo", "echo") else stats
    assert {metric for metric in stats if f"train/{metric}" not in METRICS and f"`{metric}`" not in text} == set()


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.glob("*.md")))
def test_the_code_on_a_page_runs(page):
    blocks = python_blocks(PAGES / page)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})


def test_the_commands_on_the_pages_name_settings_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = next(block for block in python_blocks(PAGES.parent / "ludic-train.md") if "class RockPaperScissors" in block)
    Path("rps.py").write_text(env)
    Path("questions.jsonl").write_text('{"question": "1 + 1 = ?", "answer": "#### 2"}\n')
    Path("pairs.jsonl").write_text('{"prompt": "1 + 1 = ?", "chosen": "2", "rejected": "3"}\n')
    trained = set()
    for page in PAGES.glob("*.md"):
        for command in re.findall(r"^ludic train (.*)$", page.read_text(), flags=re.MULTILINE):
            _, config = parse_run(TrainArgs, shlex.split(command), prog="ludic train", description="")
            run = build(config, env=env_factory(config.env.id) if config.env.id else None)
            trained.add(make_algorithm(run.resolved).name)
    assert trained >= {"grpo", "dpo", "spo", "ppo", "mopd", "fold_grpo"}


def test_the_overview_lists_every_preset():
    text = (PAGES / "README.md").read_text()
    assert [name for name in PRESETS if f"[`make_{name}`]({page_of(name).name})" not in text] == []
