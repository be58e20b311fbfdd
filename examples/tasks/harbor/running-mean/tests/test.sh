#!/bin/sh
# Half of the reward for the program, half for the answer.
cd /app || exit 1
python3 /tests/judge.py >/logs/verifier/reward.json
