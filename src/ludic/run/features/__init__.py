"""Features that a run may have beyond the plain loop: each declares itself in one place.

base.py is `Feature`; core.py lists the features of the core and checks all pairs of those that a run has; plugged.py finds the
features of plug-ins (entry points `ludic.features`), their sections of the settings and their engines. To add a feature, copy
replay.py and add it to the list in core.py, or name it by an entry point.
"""
