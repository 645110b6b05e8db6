"""Tasks of EleutherAI's lm-evaluation-harness, scored per question; local task files need no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlaforge.runtime import UserError, install


def scores(model: Any, tokenizer: Any, task: str, metric: str, limit: int | None) -> tuple[np.ndarray, bool, list[str]]:
    """Return a causal LM's score on every question of a task, whether higher is better, and the questions' texts.

    task: a YAML file, or the name of an lm-eval task. Raises UserError if lm-eval is missing, or has no such task or
    metric.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: {install('tasks')}") from error
    from mlaforge.config import nearest, read_recipe

    path, name = Path(task).expanduser(), task
    if path.suffix in (".yaml", ".yml"):
        name = str(read_recipe(path).get("task"))
        manager = TaskManager(include_path=str(path.parent.absolute()), include_defaults=False)
    else:
        manager = TaskManager()
    if name not in manager.all_tasks:
        raise UserError(f"lm-eval has no task {name!r}{nearest(name, manager.all_tasks)}")
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1), tasks=[name], task_manager=manager,
        limit=limit, bootstrap_iters=0, log_samples=True,
    )  # fmt: skip
    samples = results["samples"][name]
    if metric not in samples[0]:
        known = sorted(key for key in samples[0] if isinstance(samples[0][key], int | float) and key != "doc_id")
        raise UserError(f"task {name} has no metric {metric!r}; it has {', '.join(known)}")
    texts = [str(argument) for sample in samples for arguments in sample["arguments"] for argument in arguments]
    return np.array([float(s[metric]) for s in samples]), bool(results["higher_is_better"][name][metric]), texts
