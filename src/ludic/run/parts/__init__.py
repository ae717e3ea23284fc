"""The parts of a resolved run. The model itself is in ludic/run/model.py.

episodes.py makes what plays: envs, protocols, engines and rewards, with the samples of samples.py. requests.py makes the tasks of
an update and of an evaluation, source.py the batches, algorithm.py what is learned from them, loggers.py where metrics go. `ludic
eval` uses episodes.py and requests.py as well. Loads without torch: `ludic eval --base-url`
needs none.
"""
