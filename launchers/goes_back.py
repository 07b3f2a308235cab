"""Whether a run's next start goes back from a wrong loss: `goes_back.py CONFIG.yaml key=value ...` then ends with 0.

Exit code 75 alone does not tell: a run that was told to end has it, too.
"""

import sys
from pathlib import Path

from diffusion.checkpointing.roll_back import read_request
from diffusion.config.loading import load_config

if __name__ == "__main__":
    config = load_config(sys.argv[1], sys.argv[2:])
    sys.exit(read_request(Path(config.output_folder).expanduser()) is None)
