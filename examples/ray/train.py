"""A run on a Ray cluster: one worker per rank.

python examples/ray/train.py run.toml                 # as many workers as the file has [[devices]]
python examples/ray/train.py run.toml --workers 4     # or so many
ray job submit --working-dir . -- python examples/ray/train.py /shared/run.toml

On an existing cluster set RAY_ADDRESS (for example to "auto"); without it Ray starts one on this machine.
"""

import argparse
import sys
from pathlib import Path

from lamella.config import load_run_config
from lamella.errors import UserError
from lamella.launch.ray import train_with_ray

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path, help="the run's TOML file")
    parser.add_argument("overrides", nargs="*", help="dotted.key=value")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    try:
        config = load_run_config(options.run, options.overrides)
        train_with_ray(config, "fresh" if options.fresh else "auto", workers=options.workers)
    except UserError as error:
        sys.exit(f"error: {error.render()}")
