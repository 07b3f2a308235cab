"""How fast a fleet is, from how fast one of its GPUs is: a model of computing and communicating.

A step of one GPU is its microbatches one after the other. Weights are gathered and gradients reduced once per step
(SHARD_GRAD_OP with `performance.accumulate_locally`), or gradients after each microbatch. Ring collectives carry each
byte over the network of each node once, so the network of a node is the limit, and within a node the links of a GPU.
Communication hides behind the backward pass, two thirds of the computing; what does not fit adds to the step. The
optimizer works on a GPU's shard.
"""

from dataclasses import dataclass

BACKWARD_SHARE = 2 / 3
"""Of the time of a step's computing, behind which communication hides."""

OPTIMIZER_BYTES = 28
"""Moved by AdamW per parameter: weight, gradient and two moments are read, all but the gradient written, in fp32."""


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """What carries gradients and weights; effective rates, not those of a data sheet."""

    gpus_per_node: int = 8
    node_bytes_per_second: float
    """Of the network of one node, in each direction."""

    gpu_bytes_per_second: float = 200e9
    """Between the GPUs of a node."""

    memory_bytes_per_second: float = 1.5e12
    """Of one GPU's memory, for the optimizer."""


PUBLISHED_INTERCONNECT = Interconnect(node_bytes_per_second=37.4e9)
"""Fitted to one entry of the published table (256 px on 128 A100); 75 % of a 400 Gbit/s network."""


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """What a step consists of."""

    num_parameters: int
    global_batch_size: int
    microbatch_size: int
    """At most; a GPU whose share is smaller takes its share."""

    images_per_gpu_second: float
    """Of one GPU that computes, at this microbatch size."""

    gather_bytes: int = 2
    """Per parameter: gathered weights in half precision."""

    reduce_bytes: int = 4
    """Per parameter: gradients in fp32, or 2 in 16 bits (`trainer.reduce_precision`)."""

    reduces_each_microbatch: bool = False
    """Reduce after each microbatch instead of once per step."""

    num_replicas: int = 1
    """Groups that each hold the model once (`trainer.num_replicas`)."""


def communication_seconds(model: StepModel, links: Interconnect, num_gpus: int) -> float:
    """Seconds of all collective operations of a step, if nothing hid them."""
    share = model.global_batch_size / num_gpus
    num_reductions = -(-share // model.microbatch_size) if model.reduces_each_microbatch else 1
    group = num_gpus // model.num_replicas
    sharded = (model.gather_bytes + num_reductions * model.reduce_bytes) * (group - 1) / group
    rate = links.gpu_bytes_per_second if group <= links.gpus_per_node else links.node_bytes_per_second
    seconds = model.num_parameters * sharded / rate
    # Between replicas every GPU reduces its shard; the GPUs of a node share its network.
    replicas = model.num_replicas
    between = 2 * model.reduce_bytes * num_reductions * (replicas - 1) / replicas * model.num_parameters / group
    return seconds + between * min(group, links.gpus_per_node) / links.node_bytes_per_second


def predict_images_per_second(model: StepModel, links: Interconnect, num_gpus: int) -> float:
    """Images per second of a fleet.

    Args:
        model: the step.
        links: between GPUs and nodes.
        num_gpus: of the fleet.
    """
    share = model.global_batch_size / num_gpus
    computing = share / model.images_per_gpu_second
    exposed = max(0.0, communication_seconds(model, links, num_gpus) - BACKWARD_SHARE * computing)
    shard = model.num_parameters * model.num_replicas / num_gpus
    return model.global_batch_size / (computing + exposed + shard * OPTIMIZER_BYTES / links.memory_bytes_per_second)
