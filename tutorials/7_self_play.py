# # Self-play
#
# Two policies learn in one run, each with its own weights. In one round of the prisoner's dilemma both choose `c` (cooperate) or `d` (defect). Both cooperate: 3 points
# each. Both defect: 1 each. One defects: 5 for it, 0 for the other.

# %%
import json
import os

import ludic.run

STEPS = int(os.environ.get("STEPS", "60"))
run = ludic.run.build(
    env="prisoners_dilemma", set={"rounds": 1}, system_prompt="c or d?", model="tiny", name="dilemma", max_tokens=1,
    group_size=16, rollouts_per_update=64, lr=3e-3, logger=(),
    policies={"ann": {"roles": ["player_0"]}, "bob": {"roles": ["player_1"]}},
)  # fmt: skip
run.train(steps=STEPS)

# %% [markdown]
# Metrics are by name. What a policy does not choose counts as cooperation, so both begin near 3. Each learns that defecting pays, and together they end near 1.

# %%
for line in (run.folder / "metrics.jsonl").read_text().splitlines()[:: max(1, STEPS // 5)]:
    row = json.loads(line)
    earned = {name: row[f"{name}/train/avg_total_reward"] for name in ("ann", "bob")}
    print(f"update {row['step']:2}: ann {earned['ann']:.2f}, bob {earned['bob']:.2f}")

# %% [markdown]
# Each policy's folder is used like that of a run: `ludic export runs/dilemma/policies/ann out`, `ludic eval runs/dilemma/policies/ann`.

# %%
print(*sorted(path.name for path in (run.folder / "policies").iterdir()))

# %% [markdown]
# Adapters on one base model, policies that change places, leagues of past versions and ratings: [several policies](../multi_policy.md).
