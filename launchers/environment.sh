# shellcheck shell=bash
# Variables that matter where a run has several hosts, each with its reason; sourced by what is in this folder.
# A value that is set already stays. What a variable does to NCCL or EFA is their documentation's word: see docs/launchers.md.

# torchrun's restarts hang in torch 2.7 if its agents and the ranks share one store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
# Every rank and loader worker would otherwise start a thread per core.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Stack traces of a rank that dies by a signal.
export PYTHONFAULTHANDLER=${PYTHONFAULTHANDLER:-1}

# Which network the hosts share, where they have several (docker0 and the like are there by the same name on each, and lead
# nowhere). Gloo takes a name, NCCL also a beginning of one.
if [ -n "${NETWORK_INTERFACE:-}" ]; then
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$NETWORK_INTERFACE}
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$NETWORK_INTERFACE}
fi
# What NCCL says when it cannot connect, instead of nothing.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# After a collective timed out, NCCL's last operations of each rank go to a file: which rank was missing.
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
export TORCH_NCCL_TRACE_BUFFER_SIZE=${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}

# AWS: libfabric's EFA provider, transfers from GPU to GPU by it, and leave to fork while memory is registered, as loader
# workers do.
if [ -d /sys/class/infiniband ] && [ -d /opt/amazon/efa ]; then
  export FI_PROVIDER=${FI_PROVIDER:-efa}
  export FI_EFA_USE_DEVICE_RDMA=${FI_EFA_USE_DEVICE_RDMA:-1}
  export FI_EFA_FORK_SAFE=${FI_EFA_FORK_SAFE:-1}
fi
