"""The `ludic` command: parses, calls `ludic.run`, prints.

It may import everything; no other package imports it. Start with main.py (the list of commands), then train.py and args.py. eval/
is `ludic eval`. Plug-ins add their commands by entry points. terminal/ has the greeting, the help pages and the colours. script.py
gives examples and your scripts the flags of `ludic train`.
"""
