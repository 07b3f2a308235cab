"""Train on nodes of RANKS ranks each: `ranks_as_nodes.py RANKS YAML OVERRIDES`; `{node}` in overrides is the node."""

import os
import sys

_RANK, _RANKS = int(os.environ["RANK"]), int(sys.argv[1])
_NODE = str(_RANK // _RANKS)
os.environ.update(NODE_RANK=_NODE, LOCAL_RANK=str(_RANK % _RANKS), LOCAL_WORLD_SIZE=str(_RANKS))

if __name__ == "__main__":
    from tests.tools.training_runs import train_runs

    yaml, *overrides = sys.argv[2:]
    sys.exit(train_runs([(yaml, [text.replace("{node}", _NODE) for text in overrides])]))
