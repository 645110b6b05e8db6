"""A training (training/loop.py) in a process of its own, which is killed as soon as a checkpoint is whole."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import torch
from safetensors.torch import load_file

# It waits for a line after every checkpoint.
SLOW = """
import importlib, json, sys
from pathlib import Path
from mlaforge.training import loop
whole = loop.Trainer._save
def slow(self):
    whole(self)
    print("saved", self.optimizer.step, flush=True)
    sys.stdin.readline()
loop.Trainer._save = slow
stage, options, kind, *models, out, options_json = sys.argv[1:]
config = getattr(importlib.import_module(options), kind)(**json.loads(options_json))
importlib.import_module(stage).run(*models, Path(out), config)
"""


def killed_after(steps, stage, models, out, config):
    """Runs stage.run(*models, out, config), whose checkpoints come after `steps`, and kills it after the last one."""
    options_json = json.dumps(dataclasses.asdict(config))
    kind = type(config)
    command = [sys.executable, "-c", SLOW, stage.__name__, kind.__module__, kind.__name__, *map(str, models), str(out)]
    command.append(options_json)
    # The same bits are promised for the same number of threads.
    own = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for step in steps:
            assert process.stdout.readline() == f"saved {step}\n"
            if step != steps[-1]:
                process.stdin.write("\n")
                process.stdin.flush()
        os.kill(process.pid, signal.SIGKILL)
    assert not out.exists()


def check_same_tensors(ours, theirs):
    """That two directories' weights are the same to the bit."""
    names = {path.name for path in ours.glob("*.safetensors")}
    assert names == {path.name for path in theirs.glob("*.safetensors")} != set()
    for file in names:
        a, b = load_file(ours / file), load_file(theirs / file)
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name
