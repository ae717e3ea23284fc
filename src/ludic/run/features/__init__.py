"""Features that a run may have beyond the plain loop: each declares itself in one place.

base.py is `Feature`, and finds those of plug-ins (entry points `ludic.features`), their sections of the settings and their engines.
core.py lists the features of the core and checks all pairs of those that a run has. To add a feature, copy `Replay` of sources.py
and add it to that list, or name it by an entry point.
"""
