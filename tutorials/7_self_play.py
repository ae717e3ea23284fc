# # Self-play
#
# Two policies with separate weights learn in one run. In the prisoner's dilemma both choose `c` (cooperate) or `d` (defect). Both
# cooperate: 3 points each. Both defect: 1 each. Else the defector gets 5, the other 0.

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
# An unreadable reply counts as cooperation, so both begin near 3. Each learns that defecting pays; both end at 1.

# %%
for line in (run.folder / "metrics.jsonl").read_text().splitlines()[:: max(1, STEPS // 5)]:
    row = json.loads(line)
    earned = {name: row[f"{name}/train/avg_total_reward"] for name in ("ann", "bob")}
    print(f"update {row['step']:2}: ann {earned['ann']:.2f}, bob {earned['bob']:.2f}")

# %% [markdown]
# A policy's folder is used like a run's: `ludic eval runs/dilemma/policies/ann`. Shared base models, leagues, ratings: [several policies](../multi_policy.md).
