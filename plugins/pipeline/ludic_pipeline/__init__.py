"""Training with actors and a learner in separate processes: queue/ between them, launch/ for the processes.

feature.py has the section [pipeline] of a run, generation.py the learner's end of it, plugin.py its commands.
"""
