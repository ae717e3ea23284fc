"""Models over HTTP: `ludic serve` in the way of OpenAI's API, and gateway/, which records what unchanged agents do.

`ludic.http` has the parts that every server shares.
"""
