#!/usr/bin/env bash
# Run a command as an ordinary user, with rootless Podman as its Docker engine, which is stopped afterwards.
#
#   scripts/rootless_podman.sh COMMAND...
#
# Root (a CI runner, a container) installs Podman with apt and runs the command as the user polar-podman, whom it
# creates. The image and the installed agents stay below ~/.polar of the user.
set -euo pipefail
cd "$(dirname "$0")/.."

COMMAND_SECONDS=1500
PYTHON=$PWD/.venv/bin/python

say() { printf '[podman] %s\n' "$*" >&2; }

install_podman() {
    if command -v podman >/dev/null && command -v runc >/dev/null && command -v newuidmap >/dev/null; then return 0; fi
    if [ "$(id -u)" -ne 0 ]; then
        say "install Podman first: apt-get install podman runc uidmap"
        exit 1
    fi
    say "installing Podman"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        podman runc uidmap catatonit mmdebstrap >&2
}

# Root's home is closed to other users. Give this script and its children an open one, with only Python and Polar in it.
open_the_home_of_root() {
    local interpreter closed folder
    interpreter=$(dirname "$(dirname "$(readlink -f "$PYTHON")")")
    closed=$(mktemp -d)
    mount --rbind "$HOME" "$closed"
    mount -t tmpfs -o mode=755 tmpfs "$HOME"
    for folder in "$interpreter" "$PWD"; do
        case $folder in "$HOME"/*) mkdir -p "$folder" && mount --rbind "$closed/${folder#"$HOME"/}" "$folder" ;; esac
    done
    umount -l "$closed"
    cd "$PWD"
}

# Podman's settings: runc, because crun refuses hybrid control groups; and the processes that it starts for a command
# end soon after it, not after five minutes.
configure() {
    cat >"$RUN/containers.conf" <<END
[engine]
runtime = "runc"
exit_command_delay = 10
END
    cat >"$RUN/storage.conf" <<END
[storage]
driver = "overlay"
rootless_storage_path = "$USER_HOME/.polar/podman"
runroot = "$RUN/containers"
graphroot = "$USER_HOME/.polar/podman"
END
}

stop() {
    kill "$SERVICE" 2>/dev/null || true
    kill "$(cat "$RUN/libpod/tmp/pause.pid")" 2>/dev/null || true # it keeps the user namespace
    rm -rf "$RUN"
}

install_podman
SWITCH=()
USER_HOME=$HOME
if [ "$(id -u)" -eq 0 ]; then
    [ -n "${POLAR_OWN_MOUNTS:-}" ] || POLAR_OWN_MOUNTS=1 exec unshare --mount "$0" "$@"
    id polar-podman >/dev/null 2>&1 || useradd --create-home --shell /bin/bash polar-podman
    open_the_home_of_root
    USER_HOME=$(getent passwd polar-podman | cut -d: -f6)
    SWITCH=(setpriv --reuid polar-podman --regid polar-podman --init-groups --inh-caps -all)
fi
# Podman remembers this folder, so it is the same each time.
RUN=/tmp/polar-podman-$("${SWITCH[@]}" id -u)
ADDRESS=unix://$RUN/podman.sock
rm -rf "$RUN"
"${SWITCH[@]}" mkdir -m 700 "$RUN"
configure
AS_USER=("${SWITCH[@]}" env HOME="$USER_HOME" XDG_RUNTIME_DIR="$RUN" TMPDIR="$RUN" DOCKER_HOST="$ADDRESS"
    CONTAINERS_CONF="$RUN/containers.conf" CONTAINERS_STORAGE_CONF="$RUN/storage.conf"
    POLAR_CACHE_DIR="$USER_HOME/.polar/harnesses")
timeout -k 10 $((COMMAND_SECONDS + 1000)) "${AS_USER[@]}" podman system service --time 0 "$ADDRESS" &
SERVICE=$!
trap stop EXIT
for _ in $(seq 300); do
    [ ! -S "$RUN/podman.sock" ] || break
    sleep 0.1
done
DOCKER_HOST=$ADDRESS timeout -k 10 900 "$PYTHON" -m sandboxes.images.build >&2
timeout -k 10 "$COMMAND_SECONDS" "${AS_USER[@]}" "$@"
