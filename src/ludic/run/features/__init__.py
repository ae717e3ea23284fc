"""Features that a run may have beyond the plain loop: each declares itself in one place.

base.py is `Feature`, and finds those of plug-ins (entry points `ludic.features`), their sections of the settings and their engines.
core.py lists the features of the core and checks all pairs of those that a run has. To add a feature of the core, copy `Replay`
of sources.py and add it to that list; its settings are a record in config/entries.py and a field of `RunConfig`, its random
numbers a stream of seeds.py. A plug-in declares `section` and `Settings` and is named by an entry point, as `Pipeline` of
plugins/pipeline.
"""
