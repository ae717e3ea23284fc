"""The settings of a training run, as the user wrote them. `resolve` (ludic/run/resolve.py) fills in the defaults.

Every field is a flag (`--group-size 8`) and a key of its section in the file (`[algo]` … `group_size = 8`). `ludic eval` shares the
sections env, agent and reward. See docs/ludic-train.md.

run_config.py is `RunConfig`, all sections together, and the section run. The others: env_and_agent.py, model.py, reward.py,
training.py (algo, train, eval) and rollouts.py; plug-ins add their sections (features/base.py). entries.py has the tables that
are no flags, and the checks of values that all sections share.
"""
