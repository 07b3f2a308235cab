# shellcheck shell=bash
# Variables for runs on several hosts, each with its reason; sourced by the launchers in this folder.
# Values that are already set stay. Effects on NCCL and EFA follow their documentation: see docs/launchers.md.

# torchrun's restarts hang if its agents and the ranks share one store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
# Seconds from SIGTERM to SIGKILL of torchrun's ranks, in which they save: pods have 120. Torch 2.11 knows 30 only.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}
# Every rank and loader worker would otherwise start a thread per core.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Stack traces of a rank that is killed by a signal.
export PYTHONFAULTHANDLER=${PYTHONFAULTHANDLER:-1}

# The hosts' common network, where they have several (docker0 and the like have the same name on each host, but connect
# none). Gloo takes a name, NCCL also a prefix.
if [ -n "${NETWORK_INTERFACE:-}" ]; then
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$NETWORK_INTERFACE}
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$NETWORK_INTERFACE}
fi
# NCCL's messages on failed connections.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# After a collective timed out, each rank writes its last NCCL operations to a file, which shows the missing rank.
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
export TORCH_NCCL_TRACE_BUFFER_SIZE=${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}

# AWS: libfabric's EFA provider, its GPU-to-GPU transfers, and forking while memory is registered (loader workers are
# forked).
if [ -d /sys/class/infiniband ] && [ -d /opt/amazon/efa ]; then
  export FI_PROVIDER=${FI_PROVIDER:-efa}
  export FI_EFA_USE_DEVICE_RDMA=${FI_EFA_USE_DEVICE_RDMA:-1}
  export FI_EFA_FORK_SAFE=${FI_EFA_FORK_SAFE:-1}
fi
