"""The few lines of shell that run inside a container. They need sh, cat, head, mkdir, tar, tr and grep there."""

# `cd` here and not by the engine, which would create a missing folder; the shell names what cannot be started.
RUN = 'cd "$1" || exit 126; shift; exec "$@"'
# The engine offers no end of stdin that its clients agree on, so the shell takes exactly the bytes that were sent.
RUN_STDIN = 'cd "$1" || exit 126; n=$2; shift 2; head -c "$n" | "$@"'

# Ending the client of an exec, or its connection, leaves the program running: it has to be killed from inside.
# $2: what the environment of the command shows; that, and all below it, is killed until none is left. Without $2
# everything is. Spared are init, $1 (the container's own program) and this shell. Zombies are dead already.
KILL = r"""
me=$$; keep=$1; mark=$2
while :; do
  hit=" "; more=1
  for d in /proc/[0-9]*; do
    p=${d#/proc/}
    case $p in 1|"$me"|"$keep") continue;; esac
    if [ -z "$mark" ]; then
      IFS= read -r line <"$d/stat" || continue
      set -- ${line##*) }
      [ "$1" = Z ] || hit="$hit$p "
    elif tr '\0' '\n' <"$d/environ" | grep -qx -- "$mark"; then
      hit="$hit$p "
    fi
  done
  while [ $more = 1 ]; do
    more=0
    for d in /proc/[0-9]*; do
      p=${d#/proc/}
      case $hit in *" $p "*) continue;; esac
      IFS= read -r line <"$d/stat" || continue
      set -- ${line##*) }
      [ "$1" = Z ] && continue
      case $hit in *" $2 "*) hit="$hit$p "; more=1;; esac
    done
  done
  [ "$hit" = " " ] && exit 0
  kill -9 $hit
done 2>/dev/null
"""
# The container's own program is the only process besides init when the first command comes.
FIRST = (
    "for d in /proc/[0-9]*; do p=${d#/proc/}; case $p in 1|$$) ;; *) echo $p;; esac; done; "
    'for f; do test -w "$f" || exit 1; done'
)
READ = '[ -e "$1" ] || exit 2; [ -d "$1" ] && exit 21; [ -f "$1" ] || exit 22; head -c "$2" -- "$1"'
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1" && chmod "$2" -- "$1"'
UNPACK = 'mkdir -p -- "$1" && tar -xof - -C "$1"'
