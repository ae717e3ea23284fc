"""The `ludic` command: parses, calls `ludic.run`, prints.

It may import everything; no other package imports it. Start with main.py (the list of commands), then train.py and args.py. eval/
is `ludic eval`. pipeline/ is `ludic launch` and `ludic actor`, which start and restart processes; the queue between those processes
is `ludic_pipeline.queue`. terminal/ has the greeting, the help pages and the colours; doctor/ is `ludic
doctor`. script.py gives examples and your scripts the flags of `ludic train`.
"""
