"""`ludic optimize-prompt`: prompt search as a command. config.py: its settings. command.py: what it does. docs/prompt_search.md."""
