#!/bin/bash
# The command of ssh.sh on each host: ssh_host.sh NUM_HOSTS NUMBER FIRST_HOST PORT yaml key=value ...
set -u
source launchers/environment.sh
num_hosts=$1 number=$2 first=$3 port=$4
shift 4
exec 3<&0
"${BIN:-.venv/bin}/python" launchers/torchrun.py --nnodes="$num_hosts" --node-rank="$number" --master-addr="$first" \
  --master-port="$port" --nproc-per-node="${RANKS_PER_HOST:-gpu}" run.py "$@" < /dev/null 3<&- &
torchrun=$!
# Nothing is ever written to 3: the read returns when ssh.sh or the connection ends.
{ read -r -u 3; kill -TERM "$torchrun"; } > /dev/null 2>&1 &
wait "$torchrun"
code=$?
kill $! 2> /dev/null
exit "$code"
