"""Train on ranks each of which is a node of its own, with files of its own: `{node}` in overrides is its number."""

import os
import sys

os.environ.update(NODE_RANK=os.environ["RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")

if __name__ == "__main__":
    from tests.tools.training_runs import train_runs

    yaml, *overrides = sys.argv[1:]
    sys.exit(train_runs([(yaml, [text.replace("{node}", os.environ["RANK"]) for text in overrides])]))
