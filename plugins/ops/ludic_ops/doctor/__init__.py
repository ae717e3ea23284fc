"""`ludic doctor`: machine.py asks what this machine has, abilities.py says what works with it, command.py prints both."""
