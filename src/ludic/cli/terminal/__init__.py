"""The output of the `ludic` command: colour.py decides on colours, pages.py writes the greeting and the short help,
flags.py describes a command's flags as data."""
