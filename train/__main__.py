"""`python -m draftsmith.train --config configs/train/tiny-target.yaml`: train a small LM on the standard library."""

import sys

from draftsmith.train.cli import parse_config, run
from draftsmith.train.pretrain import PretrainConfig, pretrain


def main() -> None:
    """Train, and say where the model is."""
    print(f"model: {pretrain(parse_config(PretrainConfig, prog='python -m draftsmith.train'))}")


if __name__ == "__main__":
    sys.exit(run(main))
