"""Exit with 0 if a run's next start rolls back from a wrong loss: `goes_back.py CONFIG.yaml key=value ...`.

Exit code 75 of a run is ambiguous: it also follows a signal.
"""

import sys
from pathlib import Path

from diffusion.checkpointing.roll_back import read_request
from diffusion.config.loading import load_config

if __name__ == "__main__":
    config = load_config(sys.argv[1], sys.argv[2:])
    sys.exit(read_request(Path(config.output_folder).expanduser()) is None)
