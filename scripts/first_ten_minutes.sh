#!/usr/bin/env bash
# What a newcomer does in the first ten minutes, step by step. Ends with the first step that fails.
#
#   scripts/first_ten_minutes.sh [--engine KIND --engine-url URL --model NAME | --llama DIR] [--out FILE.md]
#
# --llama starts the llama-server that `scripts/llama_server.sh install DIR` built, with a small random model. Without
# an engine the bundled policy answers; Claude Code and Codex are left out, because they end with an error if answers
# are cut after 256 tokens. Agents are installed into $POLAR_HARNESSES, by default into the script's own home,
# which is removed in the end. --out writes the output as a page, such as benchmarks/results/first_ten_minutes.md.
set -euo pipefail
cd "$(dirname "$0")/.."
ROOT=$PWD
PAGE=/dev/null
ENGINE=()
LLAMA=
while [ $# -gt 0 ]; do
    case $1 in
        --out) PAGE=$(realpath "$2") ;;
        --engine | --engine-url | --model) ENGINE+=("$1" "$2") ;;
        --llama) LLAMA=$(realpath "$2") ;;
        *) sed -n '2,9p' "$0" >&2; exit 2 ;;
    esac
    shift 2
done
[ -x .venv/bin/polar ] || make setup

WORK=$(mktemp -d)
export HOME=$WORK/home NO_COLOR=1 PATH=$ROOT/.venv/bin:$PATH
export POLAR_HARNESSES=${POLAR_HARNESSES:-$HOME/.polar/harnesses}
unset POLAR_HOME POLAR_DB POLAR_URL PYTHONPATH
mkdir -p "$HOME" "$WORK/bin" "$WORK/repository"
SERVERS=()
finish() {
    local status=$?
    [ ${#SERVERS[@]} -eq 0 ] || { kill "${SERVERS[@]}" && wait "${SERVERS[@]}"; } 2>/dev/null || true
    rm -rf "$WORK"
    [ "$status" -eq 0 ] || echo "first ten minutes: failed at: ${STEP:-start}" >&2
    exit "$status"
}
trap finish EXIT

write() { tee -a "$PAGE"; }
# Replace this machine's folders. Qwen Code names a folder after the repository's path.
plain() { sed -e "s#${WORK//[\/.]/-}#-tmp-work#g" -e "s#$POLAR_HARNESSES#/home/you/.polar/harnesses#g" -e "s#$HOME#/home/you#g" -e "s#$WORK#/tmp/work#g" -e "s#$ROOT#polar#g"; }
# Run a command, and write it with the end of its output (LINES_KEPT lines of 200 characters) and its duration.
LINES_KEPT=40
step() {
    STEP=$*
    local began=$SECONDS
    { echo; echo '```'; echo "\$$(printf ' %q' "$@")"; } | write
    { timeout 600 "$@" 2>&1 | plain | tail -n "$LINES_KEPT" | sed -E 's/^(.{200}).*/\1/'; } | write
    { echo '```'; echo; echo "$((SECONDS - began)) s"; } | write
}

# Wait until the newest of SERVERS has written TEXT into LOG.
wait_for() {
    local text=$1 log=$2
    for _ in $(seq 300); do
        ! grep -q "$text" "$log" || return 0
        kill -0 "${SERVERS[-1]}" || break
        sleep 1
    done
    cat "$log"
    return 1
}
# Serve a small random model under the name polar-tiny.
serve_llama() {
    local port
    port=$(python -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
    python - "$WORK/polar-tiny" <<'PROGRAM'
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
from polar_proxy.conformance.forced_vllm import make_model

folder = make_model(Path(sys.argv[1]))
model = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():  # makes the end of the turn likelier, or an answer would have thousands of tokens
    model.get_input_embeddings().weight[model.config.eos_token_id] *= 1.5
model.save_pretrained(folder)
PROGRAM
    scripts/llama_server.sh serve "$LLAMA" "$WORK/polar-tiny" "$port" -c 262144 -np 2 -t 1 >"$WORK/llama.log" 2>&1 &
    SERVERS+=($!)
    wait_for "listening on" "$WORK/llama.log"
    ENGINE=(--engine llamacpp --engine-url "http://127.0.0.1:$port")
}

: >"$PAGE"
{
    echo "# The first ten minutes"
    echo
    echo "Written by \`scripts/first_ten_minutes.sh\`: every command that a newcomer types, with the end of its output,"
    echo "in a new home. The times are of one machine with two shared processors, beside other work."
} | write
if [ -n "$LLAMA" ]; then
    STEP="llama-server"
    serve_llama
    {
        echo
        echo "Here a llama-server (\`scripts/llama_server.sh\`) serves a small random model under the name polar-tiny, so"
        echo "that the agents' answers have no meaning. A call has the status no_tokens if its tokens are not certain: a"
        echo "random model samples parts of characters that no text has."
    } | write
fi

step polar --version
step polar run swe-task --samples 4
# `polar serve` in its own process, as in another terminal.
polar serve "${ENGINE[@]}" >"$WORK/serve.log" 2>&1 &
SERVERS+=($!)
STEP="polar serve"
wait_for "Ctrl-C stops" "$WORK/serve.log"
{ echo; echo '```'; echo "\$ polar serve${ENGINE[*]:+ ${ENGINE[*]}} &"; plain <"$WORK/serve.log"; echo '```'; } | write

step polar connect
cd "$WORK/repository"
git init -q . && git -c user.name=you -c user.email=you@example.com commit -q --allow-empty -m start
# The agents that Polar installs for rollouts, on PATH as the user's own would be.
step polar harness install claude-code codex qwen-code
python - "$WORK/bin" <<'PROGRAM'
import os, shlex, sys
from pathlib import Path
from harness_adapters.base import get_adapter

for name in ("claude-code", "codex", "qwen-code"):
    harness = get_adapter(name)
    program = Path(sys.argv[1], harness.info.command)
    command = shlex.join(harness.command(harness.install(Path(os.environ["POLAR_HARNESSES"]))))
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
PROGRAM
PATH=$WORK/bin:$PATH
LINES_KEPT=6  # of an answer
if [ ${#ENGINE[@]} -gt 0 ]; then
    step polar connect claude-code -- --print "Say hello."
    step polar connect codex -- exec --skip-git-repo-check "Say hello."
fi
step polar connect qwen-code -- --prompt "Say hello."
LINES_KEPT=40

step polar sessions
step polar show last
step polar export --format tokens-jsonl --where 'reward>=1' --out train.jsonl
step python -m polar_proxy.traces.check train.jsonl
echo "first ten minutes: every step succeeded"
