"""Commands and trainings in processes of their own, to be killed.

They are forked from one process that has imported what takes seconds to import, and done nothing else.
"""

import importlib
import multiprocessing
import os
import sys

import torch
from safetensors.torch import load_file

PROCESSES = multiprocessing.get_context("forkserver")
IMPORTED = [
    "mlaforge.conversion.convert", "mlaforge.healing.heal", "mlaforge.drafting.train",
    "transformers.models.llama.modeling_llama", "transformers.models.gpt_oss.modeling_gpt_oss",
]  # fmt: skip
PROCESSES.set_forkserver_preload(IMPORTED)


def started(function, *arguments):
    """function(*arguments), which can be imported by its name, in a process of its own."""
    process = PROCESSES.Process(target=function, args=arguments)
    process.start()
    return process


def command(*arguments):
    """The command line, which ends the process."""
    from mlaforge.cli.main import main

    sys.argv = ["mlaforge", *map(str, arguments)]
    main()


def finish_artifact(out, manifest, moment):
    """Ends a resumable artifact, and itself before the change of the file system that has the number `moment`."""
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
    """It waits for the test after every checkpoint (training/loop.py)."""
    from mlaforge.training import loop

    whole = loop.Trainer._save

    def slow(self):
        whole(self)
        test.send(self.optimizer.step)
        test.recv()

    loop.Trainer._save = slow
    torch.set_num_threads(threads)
    importlib.import_module(stage).run(*map(str, models), out, config)


def killed_after(steps, stage, models, out, config):
    """Runs stage.run(*models, out, config), whose checkpoints come after `steps`, and kills it after the last one."""
    ours, theirs = PROCESSES.Pipe()
    # The same bits are promised for the same number of threads.
    process = started(_train, stage.__name__, models, out, config, torch.get_num_threads(), theirs)
    theirs.close()
    for step in steps:
        assert ours.poll(120) and ours.recv() == step
        if step != steps[-1]:
            ours.send("go on")
    process.kill()
    process.join()
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
