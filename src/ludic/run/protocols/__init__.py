"""Who plays an episode of a run, and who runs its turns, as the settings of [agent] say.

agents.py: the agents, of ludic.agents or outside it. kinds.py: what a plug-in provides to play the latter. factory.py: the protocol
around them, with sub-agents where it delegates.
"""
