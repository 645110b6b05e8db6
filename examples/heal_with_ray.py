"""Heal CONVERTED towards MODEL with Ray Train, one worker per GPU on any nodes of a Ray cluster.

All paths are absolute, on a file system that every node mounts. The same command resumes, also with other --workers.

Usage:
    pip install 'ray[train]'
    python examples/heal_with_ray.py MODEL CONVERTED HEALED --workers 16
"""

import argparse

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device

parser = argparse.ArgumentParser()
parser.add_argument("models", nargs=3, metavar="MODEL CONVERTED HEALED")
parser.add_argument("--workers", type=int, default=8)
parser.add_argument("--cpu", action="store_true", help="gloo processes on CPUs instead of GPUs")
parser.add_argument("--text", default="embedded", help="file or folder to heal on")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--seqlen", type=int, default=512)
args = parser.parse_args()


def heal(options):
    import mlaforge

    mlaforge.heal(*args.models, **options, device=str(get_device()))


TorchTrainer(
    heal, train_loop_config={"text": (args.text,), "steps": args.steps, "seqlen": (args.seqlen,)},
    scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=not args.cpu),
).fit()  # fmt: skip
