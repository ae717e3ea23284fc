# # Your agent, unchanged
#
# An existing agent calls a URL. Give it Ludic's URL, and every call is recorded with its exact tokens.

# %%
from openai import AsyncOpenAI

client = AsyncOpenAI(base_url="http://gateway/v1", api_key="of the session")


async def agent(task, *, base_url, api_key, model):
    own = client.with_options(base_url=base_url, api_key=api_key)
    reply = await own.chat.completions.create(model=model, messages=[{"role": "user", "content": task}])
    return reply.choices[0].message.content


# %% [markdown]
# The reward sees the task, the agent's result and the recorded session.


# %%
def reward(task, answer, session):
    return sum(character.isdigit() for character in answer) / 8


# %% [markdown]
# Settings are those of `ludic train`.

# %%
import os

import ludic.gateway

STEPS = int(os.environ.get("STEPS", "30"))
settings = {"agent": agent, "tasks": ["Count."], "reward": reward, "model": "tiny", "max_tokens": 8, "logger": ()}
result = ludic.gateway.train(**settings, group_size=16, rollouts_per_update=32, lr=3e-3, steps=STEPS, name="digits")
print(f"{result.stats['train/avg_total_reward']:.2f} of the characters are digits after {result.step} updates")

# %% [markdown]
# Other frameworks, and commands in any language, work the same way: [gateway](../gateway.md).
