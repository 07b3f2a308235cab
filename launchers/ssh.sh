#!/bin/bash
# Train on hosts reachable by ssh, with one torchrun on each.
#
#   launchers/ssh.sh "host1 host2" yamls/phase1.yaml output_folder=/shared/runs/phase1 key=value ...
#
# The hosts see this folder at the same path. scripts/fit_hosts.py checks them before each start, and the run starts on the
# fit hosts that answer. NODES=2 uses two of them, the others are spare. CHECK=false skips the check and uses all.
# RANKS_PER_HOST=4 sets the ranks on each host (default: one per GPU). A lost host ends the others (within
# trainer.dist_timeout), and the run restarts. Exit code 2, an error of the user's, is not retried. On SIGTERM or Ctrl-C
# here, or SIGTERM to a rank, all hosts save and the exit code is 75; the same command continues.
set -u
cd "$(dirname "$0")/.." || exit 2
SSH=${SSH:-ssh}
PORT=${PORT:-29500}
ATTEMPTS=${ATTEMPTS:-10}
PYTHON=${PYTHON:-.venv/bin/python}
export SSH
# A lost connection is detected after 30 seconds.
options=(-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=6)
read -ra hosts <<< "${1:-}"
[ ${#hosts[@]} -gt 0 ] || { echo 'no hosts: launchers/ssh.sh "host1 host2" yamls/phase1.yaml ...' >&2; exit 2; }
shift

# Closing descriptor 9 ends the hosts: each reads 8, the other end of the pipe.
folder=$(mktemp -d) && mkfifo "$folder/open" && exec 9<> "$folder/open" && trap 'rm -r "$folder"' EXIT
exec 8< "$folder/open"
is_told_to_end=false
trap 'is_told_to_end=true; exec 9>&-' INT TERM

numbers=(${NODES:+--nodes="$NODES"} ${RANKS_PER_HOST:+--ranks-per-host="$RANKS_PER_HOST"})
for ((attempt = 1; attempt <= ATTEMPTS; attempt++)); do
  fit=("${hosts[@]}")
  if [ "${CHECK:-true}" = true ]; then
    named=$("$PYTHON" scripts/fit_hosts.py "${numbers[@]}" "${hosts[*]}" "$@" 8<&- 9>&-)
    code=$?
    $is_told_to_end && exit 75
    [ "$code" -eq 0 ] || exit "$code"
    read -ra fit <<< "$named"
  fi
  connections=()
  for number in "${!fit[@]}"; do
    command=(env ${RANKS_PER_HOST:+"RANKS_PER_HOST=$RANKS_PER_HOST"} launchers/ssh_host.sh)
    command+=("${#fit[@]}" "$number" "${fit[0]}" "$((PORT + attempt))" "$@")
    remote="cd $(printf %q "$PWD") && $(printf '%q ' "${command[@]}")"
    # setsid: Ctrl-C reaches this script only.
    # shellcheck disable=SC2086 # SSH may hold options.
    setsid $SSH "${options[@]}" "${fit[$number]}" "$remote" <&8 8<&- 9>&- &
    connections+=($!)
  done
  code=0
  for connection in "${connections[@]}"; do
    until wait "$connection"; ended=$?; ! kill -0 "$connection" 2> /dev/null; do :; done
    [ "$ended" -eq 0 ] || [ "$code" -eq 2 ] || code=$ended
  done
  [ "$code" -ne 0 ] || exit 0
  $is_told_to_end && exit 75
  [ "$code" -ne 2 ] || exit 2
  [ "$code" -ne 75 ] || "$PYTHON" launchers/goes_back.py "$@" || exit 75
  echo "attempt $attempt of $ATTEMPTS on ${fit[*]} ended with exit code $code" >&2
done
exit "$code"
