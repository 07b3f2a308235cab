#!/bin/bash
# Train on hosts that are reached by ssh, with one torchrun on each.
#
#   launchers/ssh.sh "host1 host2" yamls/phase1.yaml output_folder=/shared/runs/phase1 key=value ...
#
# The hosts see this folder at the same place. Before each start they are checked (scripts/fit_hosts.py): the run starts on
# those that answer and are fit, with NODES=2 on two of them, the others being spare; CHECK=false: on all;
# RANKS_PER_HOST=4: with so many ranks on each, instead of one for each GPU. A host that is lost ends the others (within
# trainer.dist_timeout); then it starts again, unless by a mistake (exit code 2), which that does not mend. SIGTERM or Ctrl-C
# here, or SIGTERM to a rank: all hosts save and end with 75; the same command continues.
set -u
cd "$(dirname "$0")/.." || exit 2
SSH=${SSH:-ssh}
PORT=${PORT:-29500}
ATTEMPTS=${ATTEMPTS:-10}
PYTHON=${PYTHON:-.venv/bin/python}
export SSH
# A host that is cut off is noticed after 30 seconds.
options=(-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=6)
read -ra hosts <<< "${1:-}"
[ ${#hosts[@]} -gt 0 ] || { echo 'no hosts: launchers/ssh.sh "host1 host2" yamls/phase1.yaml ...' >&2; exit 2; }
shift

# The hosts go on as long as 9 is open; they read 8, which ends when it is closed.
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
    # Ctrl-C is for this script only.
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
