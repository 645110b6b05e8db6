"""Heal CONVERTED towards MODEL with Ray Train, one worker per GPU on any nodes of a Ray cluster.

All paths are absolute, on a file system that every node mounts. The same command resumes, also with other --workers.

Usage:
    pip install 'ray[train]'
    python examples/heal_with_ray.py MODEL CONVERTED HEALED --workers 16
"""

import argparse

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device

arguments = argparse.ArgumentParser()
arguments.add_argument("models", nargs=3, metavar="MODEL CONVERTED HEALED")
arguments.add_argument("--workers", type=int, default=8)
arguments.add_argument("--cpu", action="store_true", help="gloo processes on CPUs instead of GPUs")
arguments.add_argument("--text", default="embedded", help="file or folder to heal on")
arguments.add_argument("--steps", type=int, default=200)
arguments.add_argument("--seqlen", type=int, default=512)
given = arguments.parse_args()


def heal(options):
    import mlaforge

    mlaforge.heal(*given.models, **options, device=str(get_device()))


TorchTrainer(
    heal, train_loop_config={"text": (given.text,), "steps": given.steps, "seqlen": (given.seqlen,)},
    scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=not given.cpu),
).fit()  # fmt: skip
