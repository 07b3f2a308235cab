#!/bin/bash
# Train on hosts reachable by ssh, with one torchrun on each.
#
#   launchers/ssh.sh "host1 host2" yamls/phase1.yaml output_folder=/shared/runs/phase1 key=value ...
#
# The hosts see this folder at the same path. RANKS_PER_HOST=4 sets the ranks on each host (default: one per GPU),
# NETWORK_INTERFACE=ens5 their network, BIN=FOLDER that of Python; other variables belong in environment.sh. A lost host
# ends the others (within trainer.dist_timeout, in a save within two hours). On SIGTERM or Ctrl-C here, or SIGTERM
# to a rank, all hosts save and the exit code is 75; the same command continues. scripts/supervise.py --hosts FILE checks
# hosts, chooses among them and restarts.
set -u
cd "$(dirname "$0")/.." || exit 2
SSH=${SSH:-ssh}
PORT=${PORT:-29500}
# A lost connection is detected after 30 seconds.
options=(-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=6)
read -rd '' -a hosts <<< "${1:-}"
[ ${#hosts[@]} -gt 0 ] || { echo 'no hosts: launchers/ssh.sh "host1 host2" yamls/phase1.yaml ...' >&2; exit 2; }
shift

# Closing descriptor 9 ends the hosts: each reads 8, the other end of the pipe.
folder=$(mktemp -d) && mkfifo "$folder/open" && exec 9<> "$folder/open" && trap 'rm -r "$folder"' EXIT
exec 8< "$folder/open"
is_ending=false
trap 'is_ending=true; exec 9>&-' INT TERM

connections=()
for number in "${!hosts[@]}"; do
  command=(env)
  for name in RANKS_PER_HOST NETWORK_INTERFACE BIN; do
    [ -z "${!name:-}" ] || command+=("$name=${!name}")
  done
  command+=(launchers/ssh_host.sh "${#hosts[@]}" "$number" "${hosts[0]}" "$PORT" "$@")
  remote="cd $(printf %q "$PWD") && $(printf '%q ' "${command[@]}")"
  # setsid: Ctrl-C reaches this script only.
  # shellcheck disable=SC2086 # SSH may hold options.
  setsid $SSH "${options[@]}" "${hosts[$number]}" "$remote" <&8 8<&- 9>&- &
  connections+=($!)
done
code=0
for connection in "${connections[@]}"; do
  until wait "$connection"; ended=$?; ! kill -0 "$connection" 2> /dev/null; do :; done
  [ "$ended" -eq 0 ] || [ "$code" -eq 2 ] || code=$ended
done
$is_ending && [ "$code" -ne 0 ] && exit 75
exit "$code"
