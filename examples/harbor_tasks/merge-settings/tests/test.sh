#!/bin/bash
# Several rewards: "reward" is the one that is trained on, the others say what is missing.
python3 -I /tests/check.py > /logs/verifier/reward.json
