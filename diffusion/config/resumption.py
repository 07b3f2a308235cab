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
)
"""Effects of keys, and regular expressions; the first that matches counts. Other keys take effect."""

_UNUSED = {Task.diffusion: r"autoencoder\..*", Task.autoencoder: r"objective\..*|model\.(?!architecture$).*"}
"""Keys that a task does not use."""


def is_used(key: str, task: Task) -> bool:
    """Return whether a task uses a key."""
    return not re.fullmatch(_UNUSED[task], key)


def effect_of(key: str, task: Task | None = None) -> Effect:
    """Return the effect of a changed key, such as `data.streams.0.name`; in a task, keys that it ignores may change."""
    if task is not None and not is_used(key, task):
        return Effect.takes_effect
    named = (effect for effect, pattern in _EFFECTS if re.fullmatch(pattern, key))
    effect = next(named, Effect.takes_effect)
    return Effect.same_weights if effect is Effect.refused and is_location(key) else effect
