"""Options of `heal`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import DTYPES, SHORTEST_WINDOW, Options, option

SUBSETS = ("projections", "attention", "all")


@dataclasses.dataclass(frozen=True)
class HealConfig(Options):
    """Options of `heal`. A coded student (`convert --bits`) needs none: it is trained and evaluated as it is served,
    with rounded rows and a straight-through estimator for the gradients."""

    first = ("text", "steps", "seqlen", "subset", "learning_rate")

    text: tuple[str, ...] = option(("embedded",), "training text: a file, a folder or embedded; do not evaluate on it")
    swa_text: tuple[str, ...] | None = option(None, "second phase: training text for layers with a sliding window only")
    full_text: tuple[str, ...] | None = option(None, "second phase: training text for layers without a window only")
    targeted: float = option(0.2, "the second phase's share of all steps, if it has text", "fraction", least=0, below=1)
    steps: int = option(200, "optimiser steps; 0: only the closed-form refits", "steps", least=0)
    batch_tokens: int = option(4096, "batch size of a step", "tokens", least=1)
    micro_tokens: int = option(2048, "micro-batch size; gradients accumulate over a batch", "tokens", least=1)
    seqlen: tuple[int, ...] = option(
        (512,), "length of packed rows; a list such as 512,2048,8192 grows in equal shares of the steps", "tokens",
        least=SHORTEST_WINDOW,
    )  # fmt: skip
    subset: tuple[str, ...] = option(
        ("projections",), "trained parameters: projections (created by conversion), attention or all; a list such as "
        "projections,attention unfreezes the next when the validation KL stops falling", choices=SUBSETS,
    )  # fmt: skip
    patience: int = option(3, "evaluations without 1 % improvement before the next unfreezing", "evaluations", least=1)
    temperature: float = option(2.0, "temperature of the KL divergence", above=0)
    kl_weight: float = option(1.0, "weight of the KL divergence from the teacher", least=0)
    lm_weight: float = option(0.0, "weight of the cross-entropy with the text", least=0)
    hidden_weight: float = option(0.0, "weight of the error of every layer's output", least=0)
    attention_weight: float = option(0.0, "weight of the error of every attention's output", least=0)
    learning_rate: float = option(1e-3, "peak learning rate, relative to the size of each row of a matrix", above=0)
    warm_up: float = option(
        0.05, "fraction of the steps with linear warm-up; cosine decay to zero follows", "fraction", least=0, below=1
    )
    weight_decay: float = option(0.0, "weight decay of AdamW; 0, as the weights start close to the optimum", least=0)
    refit: str = option(
        "auto", "closed-form refits before the first step; auto: only if they lower the validation KL",
        choices=("auto", "on", "off"),
    )  # fmt: skip
    evaluate_every: int = option(25, "steps between evaluations on the validation text", "steps", least=1)
    checkpoint_every: int = option(
        25, "steps between checkpoints, from which an interrupted run resumes", "steps", least=1
    )
    validation_tokens: int = option(8192, "text held out for validation", "tokens", least=SHORTEST_WINDOW)
    teacher_cache: str = option(
        "off", "run the teacher once over the text and cache its final hidden states (hidden, exact) or its largest "
        "logits (topk)", choices=("off", "hidden", "topk"),
    )  # fmt: skip
    top_k: int = option(64, "number of logits in a teacher-cache topk", "logits", least=1)
    teacher_dtype: str = option("auto", "dtype of the frozen teacher; nf4: bitsandbytes", choices=(*DTYPES, "nf4"))
    dtype: str = option(
        "auto", "compute dtype of the student; its optimiser works in float32. auto: float32 on a CPU, else bfloat16",
        choices=DTYPES[:3],
    )  # fmt: skip
    gradient_checkpointing: bool = option(False, "recompute layers in the backward pass: less memory, a third slower")
    tensorboard: str | None = option(None, "folder for TensorBoard logs")
    device: str = option("auto", "device: auto, cpu, cuda, cuda:1, ...")
    seed: int = option(0, "seed of every random choice")
