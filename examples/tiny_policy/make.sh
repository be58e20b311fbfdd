#!/usr/bin/env bash
# Makes polar-tiny from nothing: records the demonstrations, exports them, trains, mixes. Run it in the repository's root,
# in the environment of `make setup`. The folder (default out/tiny) receives everything; see README.md for the times.
set -euo pipefail
out=${1:-out/tiny}
model=polar_proxy/assets/polar_tiny
export PYTHONPATH=.
mkdir -p "$out"

polar run examples.tiny_policy.demonstrations:TrainingTasks --instances 387 --concurrency 3 --sandbox process \
  --engine examples.tiny_policy.expert_engine:ExpertEngine --db "$out/demonstrations.db"
polar export --db "$out/demonstrations.db" --format tokens-jsonl --where 'reward>=1' --out "$out/demonstrations.jsonl"
python -m examples.tiny_policy.verify_export "$out/demonstrations.jsonl" --tokenizer "$model"

python -m examples.tiny_policy.train "$out/demonstrations.jsonl" --model "$model" --out "$out" \
  --stages copy:120,short:230,full:900 --stop-after 1000 --save-every 25
python -m examples.tiny_policy.mix "$out/step-00975" "$out/step-01000" --share 0.3 \
  --tokenizer "$model" --out "$out/mixed"
echo "To try it: polar run swe-task --instances 40 --model $out/mixed"
