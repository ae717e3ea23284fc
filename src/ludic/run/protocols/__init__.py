"""Who plays an episode of a run, and who runs its turns, as the settings of [agent] say.

agents.py: the agents, of ludic.agents or of a plug-in that plays functions and commands. factory.py: the protocol around them, with
sub-agents where it delegates.
"""
