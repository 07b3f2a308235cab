"""Effect of a changed key on the resumption of a run, for each key of its configuration."""

import re
from enum import Enum

from diffusion.config.locations import is_location
from diffusion.config.schema import Task


class Effect(str, Enum):
    """Effect of a changed key on the resumption of a run, in the words of the reference."""

    takes_effect = "takes effect"
    refused = "refused"
    same_weights = "another path of the same weights"
    same_order = "refused if the order of samples changes"
    same_averages = "refused once there are averages"
    kept = "none, the checkpoint's is kept"


_EFFECTS = (
    (Effect.kept, r"init_from(\.(checkpoint|weights|new_objective))?|autoencoder\.initial_logvar"),
    (Effect.same_averages, r"algorithms\.ema(\.(start|decays|power(\.relative_widths)?))?"),
    (
        Effect.same_order,
        r"seed|plugins\.train_dataset(\.(path|arguments))?"
        r"|data\.(global_batch_size|mixing|group_size|num_canonical_nodes|shuffle|shuffle_block_size|streams)"
        r"|data\.streams\.\d+\.(proportion|repeat)",
    ),
    (
        Effect.refused,
        r"task|optimizer\.(name|base_width)|trainer\.parallelism"
        r"|(?!model\.(local_files_only|low_precision_norms)|autoencoder\.(adversarial_start|discriminator_lr))"
        r"(model|objective|autoencoder)(\..+)?",
    ),
    (
        Effect.takes_effect,
        r"run_name|group|output_folder|data|validation|optimizer|schedule|trainer|performance|algorithms|samples|loggers"
        r"|plugins|operations|plan"
        r"|model\.(local_files_only|low_precision_norms)|autoencoder\.(adversarial_start|discriminator_lr)"
        r"|data\.(remote|local|representation|text_embeddings|caption_weights|resolution|crop|horizontal_flip)"
        r"|data\.(num_workers|prefetch_factor|predownload|cache_limit|download_attempts|download_timeout|validate_hash)"
        r"|data\.loader_timeout|validation\.(remote|local|streams|num_samples|device_batch_size)"
        r"|(data|validation)\.streams\.\d+\.(name|remote|local|endpoint_url|profile|proportion|repeat|resolution)"
        r"|optimizer\.(lr|weight_decay|betas|eps|momentum|max_grad_norm)|schedule\.(warmup|decay|cooldown|final)"
        r"|trainer\.(max_duration|device_train_microbatch_size|device|precision|collectives|reshard_after_forward)"
        r"|trainer\.(num_replicas|reduce_precision|activation_checkpointing|deterministic|eval_interval|save_interval)"
        r"|trainer\.(checkpoint_folder|async_checkpoints|store_timeout|keep_checkpoints|keep_every|autoresume)"
        r"|trainer\.(dist_timeout|compile_timeout|progress_bar)"
        r"|performance\.(channels_last|fused_norms|fused_projections|split_geglu|attention|compilation|cuda_graphs)"
        r"|performance\.(compile_text_encoder|parallel_compilation|accumulate_locally|log_late|cudnn_benchmark)"
        r"|algorithms\.ema(\.(interval|evaluate|power\.(snapshot_interval|snapshot_precision)))?"
        r"|samples\.(prompts|interval|guidance_scale|num_inference_steps|seed|scores)"
        r"|loggers\.(file|tensorboard|stream_loss_interval|utilisation_interval)"
        r"|loggers\.wandb(\.(project|entity|offline|tags))?|loggers\.prometheus(\.(port|address))?"
        r"|plugins\.(callbacks|loggers|algorithms)(\.\d+\.(path|arguments))?"
        r"|operations\.(heartbeat_folder|max_gpu_hours|max_dollars)"
        r"|operations\.guard(\.(spike_factor|spike_window|margin|skip|skip_steps|max_rollbacks))?"
        r"|operations\.supervision(\.(hang_floor|hang_factor|data_timeout|pause_timeout|max_restarts|first_pause))?"
        r"|operations\.supervision\.(longest_pause|continue_preempted|check_timeout|webhook_variable)"
        r"|operations\.supervision\.prometheus(\.(port|address))?"
        r"|plan\.(num_gpus|gpus_per_node|images_per_second|price_per_gpu_hour|gpu_memory_gb|num_samples|image_kb)",
    ),
)
"""Effects of keys, and regular expressions; the first that matches counts. Other keys than those of what is trained are
named, so that a new one without an effect is noticed."""

_UNUSED = {Task.diffusion: r"autoencoder\..*", Task.autoencoder: r"objective\..*|model\.(?!architecture$).*"}
"""Keys that a task does not use."""


def is_used(key: str, task: Task) -> bool:
    """Return whether a task uses a key."""
    return not re.fullmatch(_UNUSED[task], key)


def effect_of(key: str, task: Task | None = None) -> Effect:
    """Return the effect of a changed key, such as `data.streams.0.name`; in a task, keys that it ignores may change."""
    if task is not None and not is_used(key, task):
        return Effect.takes_effect
    effect = next(effect for effect, pattern in _EFFECTS if re.fullmatch(pattern, key))
    return Effect.same_weights if effect is Effect.refused and is_location(key) else effect
