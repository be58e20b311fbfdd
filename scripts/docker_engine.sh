#!/bin/sh
# A Docker engine on a machine that has no service manager (a CI runner, a container), as root.
#
#   scripts/docker_engine.sh start    install docker.io if it is missing, start the engine, wait until it answers
#   scripts/docker_engine.sh stop     stop the engine and what it started
#   scripts/docker_engine.sh status   exit 0 if an engine answers
#
# With POLAR_GVISOR=1 the engine gets gVisor as one more runtime (Debian's package runsc, which is installed if it is
# missing). Polar then uses it for all containers, unless sandboxes.docker_runtime says otherwise.
#
# Idempotent, and safe when several start at once: one lock, one engine for the machine. An engine
# that something else runs (systemd, Docker Desktop) is used and never stopped.
set -eu

STATE=/var/run/polar-docker
PIDFILE=$STATE/dockerd.pid
LOG=$STATE/dockerd.log
SOCKET=/var/run/docker.sock

answers() {
  [ -S "$SOCKET" ] && DOCKER_HOST=unix://$SOCKET docker version --format '{{.Server.Version}}' >/dev/null 2>&1
}

gvisor_wanted() { [ "${POLAR_GVISOR:-}" = 1 ]; }

has_gvisor() { DOCKER_HOST=unix://$SOCKET docker info --format '{{json .Runtimes}}' | grep -q '"runsc"'; }

as_wanted() { answers && { ! gvisor_wanted || has_gvisor; }; }

# A killed engine may remain as a zombie with a pid and a /proc entry; it counts as dead.
alive() {
  [ -n "${1:-}" ] && [ -r "/proc/$1/status" ] && ! grep -q '^State:[[:space:]]*[ZX]' "/proc/$1/status"
}

pid_of() { cat "$1" 2>/dev/null || true; }

ours() {
  pid=$(pid_of "$PIDFILE")
  alive "$pid" && tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q dockerd
}

# Send SIGTERM, wait, then send SIGKILL. $1: pid, $2: tenths of a second to wait.
end() {
  kill -TERM "$1" 2>/dev/null || return 0
  n=0
  while alive "$1" && [ $n -lt "$2" ]; do sleep 0.1; n=$((n + 1)); done
  if alive "$1"; then kill -KILL "$1" 2>/dev/null || true; fi
}

install() {
  if command -v "$1" >/dev/null; then return 0; fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq >&2
  apt-get install -y -qq --no-install-recommends "$2" >&2
}

start() {
  if as_wanted; then return 0; fi
  if answers; then
    echo "docker_engine: an engine without runsc runs already; stop it first" >&2
    exit 1
  fi
  [ "$(id -u)" = 0 ] || { echo "docker_engine: starting an engine needs root" >&2; exit 1; }
  install dockerd docker.io
  runtime=
  if gvisor_wanted; then
    install runsc runsc
    # Polar opens the gateway's socket in the container's network, which gVisor's own network would not show.
    printf '#!/bin/sh\nexec runsc --network=host "$@"\n' >"$STATE/runsc"
    chmod +x "$STATE/runsc"
    runtime="--add-runtime runsc=$STATE/runsc"
  fi
  if ours; then end "$(pid_of "$PIDFILE")" 100; fi # it runs, but does not answer
  # After a crash these name dead processes, and dockerd would wait for them.
  for file in /var/run/docker.pid /var/run/docker/containerd/containerd.pid; do
    if ! alive "$(pid_of $file)"; then rm -f "$file"; fi
  done
  # shellcheck disable=SC2086
  setsid dockerd --host "unix://$SOCKET" --pidfile /var/run/docker.pid $runtime >"$LOG" 2>&1 </dev/null 9>&- &
  engine=$!
  echo "$engine" >"$PIDFILE"
  n=0
  until answers; do
    if ! alive "$engine" || [ $n -ge 600 ]; then
      echo "docker_engine: dockerd did not come up; the end of $LOG:" >&2
      tail -20 "$LOG" >&2
      exit 1
    fi
    sleep 0.1
    n=$((n + 1))
  done
}

stop() {
  if ! ours; then return 0; fi
  running=$(DOCKER_HOST=unix://$SOCKET docker ps -q 2>/dev/null || true)
  # Containers outlive an engine that is killed.
  # shellcheck disable=SC2086
  if [ -n "$running" ]; then DOCKER_HOST=unix://$SOCKET docker kill $running >/dev/null 2>&1 || true; fi
  containerd=$(pid_of /var/run/docker/containerd/containerd.pid)
  end "$(pid_of "$PIDFILE")" 150
  if alive "$containerd"; then end "$containerd" 50; fi
  rm -f "$PIDFILE"
}

mkdir -p "$STATE" 2>/dev/null || true
case "${1:-}" in
  start | stop)
    if [ "$1" = start ] && as_wanted; then exit 0; fi
    exec 9>"$STATE/lock"
    flock 9
    "$1"
    ;;
  status) answers ;;
  *)
    echo "usage: $0 start|stop|status" >&2
    exit 2
    ;;
esac
