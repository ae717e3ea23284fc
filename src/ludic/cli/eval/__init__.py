"""`ludic eval`. Start with run.py (the command); config.py has its settings, models.py the models that it compares, results.py
the folder and the printed table. Only `cli.main` imports it.
"""
