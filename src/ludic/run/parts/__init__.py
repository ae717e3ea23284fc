"""From a resolved run to its parts. The model itself is in ludic/run/model.py, the batch source in sources.py.

episodes.py makes what plays: envs, protocols and engines, with what samples.py and rewards.py provide. requests.py makes the tasks
of an update, algorithm.py what is learned from them, evaluation.py what is measured, loggers.py where metrics go. `ludic eval`
uses episodes.py and evaluation.py too. Loads without torch: `ludic eval --base-url` needs none.
"""
