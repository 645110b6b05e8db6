"""Commands and trainings in separate processes, to be killed.

They are forked from a server process that has preloaded the slow imports.
"""

import importlib
import multiprocessing
import os
import sys

import torch
from safetensors.torch import load_file

PROCESSES = multiprocessing.get_context("forkserver")
IMPORTED = [
    "mlaforge.conversion.convert", "mlaforge.healing.heal", "mlaforge.drafting.train", "mlaforge.serving.server",
    "transformers.models.llama.modeling_llama", "transformers.models.gpt_oss.modeling_gpt_oss",
]  # fmt: skip
PROCESSES.set_forkserver_preload(IMPORTED)


def started(function, *arguments):
    """Start function(*arguments) in a new process; the function must be importable by name."""
    process = PROCESSES.Process(target=function, args=arguments)
    process.start()
    return process


def command(*arguments):
    """Run the command line, which ends the process."""
    from mlaforge.cli.main import main

    sys.argv = ["mlaforge", *map(str, arguments)]
    main()


def finish_artifact(out, manifest, moment):
    """Finish a resumable artifact, and exit before the file-system change number `moment`."""
    from mlaforge.artifact import WORK, writing

    counted = 0

    def count(event, arguments):
        nonlocal counted
        written = event == "open" and isinstance(arguments[1], str) and set("wax+") & set(arguments[1])
        if counted is not None and (written or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")):
            if counted == moment:
                os._exit(9)
            counted += 1

    with writing(out, manifest, resumable=True) as partial:
        (partial / WORK / "piece").write_text("hours of work")
        (partial / "b").write_text("new")
        manifest.environment = {"mlaforge": manifest.environment.get("mlaforge", "")} if manifest.environment else {}
        sys.addaudithook(count)
    counted = None


def _train(stage, models, out, config, threads, test):
    """Train, waiting for the test after every checkpoint (training/loop.py)."""
    from mlaforge.training import loop

    save = loop.Trainer._save

    def save_and_wait(self):
        save(self)
        test.send(self.optimizer.step)
        test.recv()

    loop.Trainer._save = save_and_wait
    torch.set_num_threads(threads)
    importlib.import_module(stage).run(*map(str, models), out, config)


def killed_after(steps, stage, models, out, config):
    """Run stage.run(*models, out, config), which writes checkpoints after `steps`, and kill it after the last one."""
    parent, child = PROCESSES.Pipe()
    # Results are bitwise equal only for the same number of threads.
    process = started(_train, stage.__name__, models, out, config, torch.get_num_threads(), child)
    child.close()
    for step in steps:
        assert parent.poll(120) and parent.recv() == step
        if step != steps[-1]:
            parent.send("continue")
    process.kill()
    process.join()
    assert not out.exists()


def check_same_tensors(directory, expected):
    """Assert that the weights in two directories are bitwise equal."""
    names = {path.name for path in directory.glob("*.safetensors")}
    assert names == {path.name for path in expected.glob("*.safetensors")} != set()
    for file in names:
        a, b = load_file(directory / file), load_file(expected / file)
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name
