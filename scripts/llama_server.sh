#!/usr/bin/env bash
# A real llama-server on CPU, built from the source package of llama-cpp-python on PyPI, which contains llama.cpp.
#
#   scripts/llama_server.sh install DIR                         11 minutes of processor time, once; 0.5 GB of disk
#   scripts/llama_server.sh serve DIR MODEL PORT [flags...]     in the foreground, until it is killed
#
# MODEL is a GGUF file, or the folder of a small Qwen3 model, which is converted (scripts/gguf_model.py). The server names
# the model as the file or folder; the flag --alias NAME gives another name.
# `install` needs a C++ compiler; cmake and ninja come from PyPI. It uses pip's settings unchanged, and JOBS processes (2).
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=${POLAR_LLAMA_VERSION:-0.3.36}
PYTHON=${PYTHON:-python3}

usage() {
    sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p}' "$0" >&2
    exit 2
}

install() {
    local dir=$1 work
    "$PYTHON" -m venv "$dir"
    "$dir/bin/python" -m pip install -q cmake ninja gguf safetensors
    work=$(mktemp -d -t llama-XXXXXX)
    # shellcheck disable=SC2064
    trap "rm -rf '$work'" EXIT
    "$dir/bin/python" -m pip download -q --no-binary llama-cpp-python --no-deps -d "$work" "llama-cpp-python==$VERSION"
    tar -xzf "$work"/*.tar.gz -C "$work"
    export PATH="$dir/bin:$PATH"
    cmake -G Ninja -S "$work"/*/vendor/llama.cpp -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_WEBUI=OFF
    nice ninja -j "${JOBS:-2}" -C "$work/build" llama-server
    mv "$work/build/bin/llama-server" "$dir/bin/"
    echo "llama-server is $dir/bin/llama-server"
}

serve() {
    local dir=$1 model=$2 port=$3 name
    shift 3
    name=$(basename "$model" .gguf)
    [ -x "$dir/bin/llama-server" ] || { echo "No llama-server in $dir: run $0 install $dir" >&2; exit 2; }
    if [ -d "$model" ]; then
        local converted
        converted=$(mktemp -t "llama-$port-XXXXXX.gguf")
        # shellcheck disable=SC2064
        trap "rm -f '$converted'" EXIT
        "$dir/bin/python" scripts/gguf_model.py "$model" "$converted"
        model=$converted
    fi
    # A float32 cache without flash attention: log-probabilities equal those of PyTorch to 1e-5.
    "$dir/bin/llama-server" -m "$model" --alias "$name" --host 127.0.0.1 --port "$port" \
        -ctk f32 -ctv f32 -fa off --no-webui "$@" &
    local server=$!
    # llama-server may hang on SIGTERM while it samples, and has nothing to save.
    # shellcheck disable=SC2064
    trap "kill -KILL $server 2>/dev/null; wait $server 2>/dev/null; rm -f '${converted:-}'; exit 143" TERM INT HUP
    wait $server
}

case "${1:-}" in
    install) [ $# -eq 2 ] || usage; install "$2" ;;
    serve) [ $# -ge 4 ] || usage; shift; serve "$@" ;;
    *) usage ;;
esac
