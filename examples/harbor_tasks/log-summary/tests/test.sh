#!/bin/bash
# One third of the reward for each key.
python3 -I /tests/check.py > /logs/verifier/reward.txt
