"""`ludic eval`: its settings, the models it compares, its results folder and the printed table.

Only `cli.main` imports it. Start with run.py.
"""
