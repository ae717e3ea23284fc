"""More environments: other people's (adapters/), games, searches; envs in processes of their own (workers/) and on other machines.

plugin.py says what the plug-in adds. `ludic.envs` has what an environment is.
"""
