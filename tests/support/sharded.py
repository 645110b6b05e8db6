"""Trainings under torchrun, which end after a checkpoint and resume with another number of processes."""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from mlaforge.artifact import Manifest

# Exit code of a training that ended after the checkpoint `stop`.
STOPPED = 3


def launched(processes, stage, models, out, config, stop=None):
    """Run stage.run(*models, out, config) on so many gloo processes; one process runs without torchrun. stop: end all
    of them after the checkpoint of this step. Return the CompletedProcess."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    names = stage.__name__, type(config).__module__, type(config).__name__
    arguments = json.dumps([*names, [*map(str, models)], str(out), dataclasses.asdict(config), stop])
    # Threads of several processes on the same cores wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *torchrun, __file__, arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def trained_in_turns(turns, stage, models, out, config):
    """Train with turns[0] processes to the first checkpoint, with turns[1] from there to the second, and so on; the
    last ones finish. Return the manifest."""
    steps = [config.checkpoint_every * n for n in range(1, len(turns))]
    for number, (processes, stop) in enumerate(zip(turns, [*steps, None], strict=True)):
        done = launched(processes, stage, models, out, config, stop)
        if stop is None:
            assert done.returncode == 0, done.stderr
        else:
            # torchrun exits with 1 and reports the code of its processes.
            assert done.returncode == STOPPED or re.search(rf"exitcode\s*: {STOPPED}\b", done.stderr), done.stderr
            assert not out.exists()
        resumed = re.findall(r"resuming after step (\d+)", done.stderr)
        assert resumed == [str(step) for step in steps[number - 1 : number]], done.stderr
    manifest = Manifest.load(out)
    assert manifest.metrics["processes"] == turns[-1]
    return manifest


def check_same_training(trained, expected, metric, atol):
    """Assert that two trainings (directory and manifest each) gave the same losses, evaluations of `metric` and
    weights, up to the rounding of sums in another order."""
    (directory, manifest), (other_directory, other) = trained, expected
    assert manifest.metrics["losses"] == pytest.approx(other.metrics["losses"], rel=1e-3)
    curve, other_curve = ([point[metric] for point in part.metrics["curve"]] for part in (manifest, other))
    assert curve == pytest.approx(other_curve, rel=1e-3)
    files = [path.name for path in other_directory.glob("model*.safetensors")]
    assert files
    for file in files:
        tensors, others = load_file(directory / file), load_file(other_directory / file)
        assert tensors.keys() == others.keys()
        for name in tensors:
            assert_close(tensors[name], others[name], rtol=1e-2, atol=atol)


def _run(stage, config_module, config_name, models, out, options, stop):
    """What each process does."""
    from mlaforge.training import distributed, loop

    save = loop.Trainer._save

    def save_and_stop(self):
        save(self)
        if self.optimizer.step == stop:
            os._exit(STOPPED)

    loop.Trainer._save = save_and_stop
    config = getattr(importlib.import_module(config_module), config_name)(**options)
    importlib.import_module(stage).run(*models, Path(out), config)
    distributed.destroy_process_group()


if __name__ == "__main__":
    _run(*json.loads(sys.argv[1]))
