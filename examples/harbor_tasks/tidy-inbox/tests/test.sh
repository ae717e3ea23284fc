#!/bin/bash
# 1 if everything is in its place, else 0.
if python3 -I /tests/check.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
