#!/bin/bash
# Train on hosts that are reached by ssh, with one torchrun on each.
#
#   launchers/ssh.sh "host1 host2" yamls/phase1.yaml output_folder=/shared/runs/phase1 key=value ...
#
# The hosts see this folder at the same place. A host that is lost ends the others (within trainer.dist_timeout); then the
# run continues on the hosts that answer. SIGTERM or Ctrl-C here: all hosts save and end; the same command continues.
set -u
cd "$(dirname "$0")/.." || exit 2
SSH=${SSH:-ssh}
PORT=${PORT:-29500}
ATTEMPTS=${ATTEMPTS:-10}
# A host that is cut off is noticed after 30 seconds.
options=(-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=6)
read -ra hosts <<< "$1"
shift

# The hosts go on as long as this is open, which is all that they read.
folder=$(mktemp -d) && mkfifo "$folder/open" && exec 9<> "$folder/open" && trap 'rm -r "$folder"' EXIT
is_told_to_end=false
trap 'is_told_to_end=true; exec 9>&-' INT TERM

for ((attempt = 1; attempt <= ATTEMPTS; attempt++)); do
  answering=()
  for host in "${hosts[@]}"; do
    $SSH "${options[@]}" "$host" true < /dev/null && answering+=("$host")
  done
  [ ${#answering[@]} -gt 0 ] || { echo "none of ${hosts[*]} answers" >&2; exit 1; }
  connections=()
  for number in "${!answering[@]}"; do
    command=(launchers/ssh_host.sh "${#answering[@]}" "$number" "${answering[0]}" "$((PORT + attempt))" "$@")
    remote="cd $(printf %q "$PWD") && $(printf '%q ' "${command[@]}")"
    # Ctrl-C is for this script only.
    # shellcheck disable=SC2086 # SSH may hold options.
    setsid $SSH "${options[@]}" "${answering[$number]}" "$remote" < "$folder/open" 9>&- &
    connections+=($!)
  done
  code=0
  for connection in "${connections[@]}"; do
    until wait "$connection"; ended=$?; ! kill -0 "$connection" 2> /dev/null; do :; done
    [ "$ended" -eq 0 ] || code=$ended
  done
  [ "$code" -ne 0 ] || exit 0
  $is_told_to_end && exit 75
  echo "attempt $attempt of $ATTEMPTS on ${answering[*]} ended with exit code $code" >&2
done
exit "$code"
