"""What a machine must have for a configuration.

Pure functions of the configuration and of numbers about the machine.
"""

from collections.abc import Iterator

from diffusion.config.schema import Config
from diffusion.config.training import Device, Precision
from diffusion.errors import MachineError, raise_all


def check_machine(config: Config, *, num_gpus: int, bf16_supported: bool, local_world_size: int = 1) -> None:
    """Check whether this machine can do what the configuration asks for.

    Args:
        config: the configuration.
        num_gpus: GPUs of this node.
        bf16_supported: whether they compute in bfloat16.
        local_world_size: ranks on this node.

    Raises:
        MachineError: with everything that is lacking.
    """
    raise_all(MachineError, list(_machine(config, num_gpus, bf16_supported, local_world_size)))


def resolve_device(device: Device, num_gpus: int) -> Device:
    """What `auto` means on a machine with so many GPUs."""
    if device is not Device.auto:
        return device
    return Device.gpu if num_gpus else Device.cpu


def _machine(config: Config, num_gpus: int, bf16_supported: bool, local_world_size: int) -> Iterator[str]:
    trainer = config.trainer
    device = resolve_device(trainer.device, num_gpus)
    if device is Device.gpu and num_gpus == 0:
        yield (
            "trainer.device is gpu, but no GPU is visible here (torch.cuda.device_count() is 0). Check the driver and "
            "CUDA_VISIBLE_DEVICES, or set trainer.device=cpu trainer.precision=fp32."
        )
        return
    if device is Device.cpu and trainer.precision is not Precision.fp32:
        why = "and no GPU is visible here" if trainer.device is Device.auto else "which needs a GPU"
        yield (
            f"trainer.precision is {trainer.precision.value} with trainer.device {trainer.device.value}, {why}: a CPU "
            "trains in fp32. Set trainer.precision=fp32."
        )
    if device is Device.cpu and trainer.num_replicas > 1:
        yield (
            f"trainer.num_replicas is {trainer.num_replicas} without GPUs, where gloo cannot average between groups "
            "of ranks. Set trainer.num_replicas=1."
        )
    if device is Device.gpu and trainer.precision is Precision.amp_bf16 and not bf16_supported:
        yield (
            "trainer.precision is amp_bf16, which the GPUs here cannot compute (it takes compute capability 8.0). "
            "Set trainer.precision=amp_fp16."
        )
    if device is Device.gpu and local_world_size > num_gpus:
        yield (
            f"{local_world_size} ranks were started on this machine, which shows {num_gpus} "
            f"GPU{'s' if num_gpus > 1 else ''}. Start {num_gpus}, or check CUDA_VISIBLE_DEVICES."
        )
