"""Options of the `draft` commands."""

from __future__ import annotations

import dataclasses

from mlaforge.config import DTYPES, Options, option
from mlaforge.engine import vllm_names
from mlaforge.engine.config import ENGINE_DTYPES, MAX_DRAFT_TOKENS, EngineConfig

# Minimum text length of `draft check` in tokens: a row of the head needs two, and its prediction a third.
SHORTEST = 3


@dataclasses.dataclass(frozen=True)
class RegenerateConfig(EngineConfig):
    """Options of `draft regenerate`."""

    other_names = vllm_names.GENERATION
    first = ("prompts", "synthesize", "openings", "exclude", "max_new_tokens")

    prompts: tuple[str, ...] | None = option(
        None, 'files of prompts, .jsonl of {"turns": [text, ...]}; the first turns are used', repeat=True
    )
    synthesize: int = option(0, "additional prompts sampled from the model", "prompts", least=0)
    openings: tuple[str, ...] | None = option(
        None, "files with openings of sampled prompts for a domain, one per line", repeat=True
    )
    exclude: tuple[str, ...] | None = option(
        None, "evaluation prompts (.jsonl) or text; overlapping prompts are skipped", repeat=True
    )
    max_new_tokens: int = option(256, "maximum length of an answer", "tokens", least=1)
    temperature: float = option(0.0, "sampling temperature of the answers; 0: greedy decoding")
    seed: int = option(0, "seed for sampling")


@dataclasses.dataclass(frozen=True)
class VocabularyConfig(Options):
    """Options of `draft vocab`."""

    size: int = option(8192, "size of the draft vocabulary", "tokens")


@dataclasses.dataclass(frozen=True)
class DraftTrainConfig(Options):
    """Options of `draft train`."""

    first = ("text", "kind", "vocabulary", "init", "steps")

    text: tuple[str, ...] | None = option(None, "output of `draft regenerate` with MODEL", repeat=True)
    kind: str = option(
        "eagle3", "eagle3: one drafted token a pass; in one pass, with less acceptance: parallel, an EAGLE-3 head with "
        "masked inputs, and block, masked places that see each other", choices=("eagle3", "parallel", "block"),
    )  # fmt: skip
    vocabulary: str | None = option(None, "output of `draft vocab`; default: the whole vocabulary")
    init: str | None = option(
        None, "head to initialise from, such as the original's for a converted model; it defines sizes, vocabulary, "
        "window and boundaries",
    )  # fmt: skip
    boundaries: tuple[int, ...] | None = option(
        None, "3 boundaries at which MODEL's residual stream is captured, from 0 (the embedding) to its number of "
        "layers (default: 2, half, three before the last)", least=0,
    )  # fmt: skip
    sliding_window: int = option(2048, "attention window of the head, 0: unlimited", "tokens", least=0)
    kv_heads: int = option(
        0, "key-value heads of a new head, 0: as many as MODEL; more heads copy better but need more cache",
        "heads", least=0,
    )  # fmt: skip
    unroll: int = option(7, "consecutive drafts that training unrolls (eagle3, parallel)", "tokens", least=1)
    block_size: int = option(
        4, "tokens of a block, of which one is known and the others are drafted (block)", "tokens", least=2,
        most=MAX_DRAFT_TOKENS + 1,
    )  # fmt: skip
    layers: int = option(1, "layers of a new head (block)", "layers", least=1)
    markov_rank: int = option(
        64, "rank of the correction of a place by the token drafted before it, 0: none (block, parallel); where --init "
        "has one, that is used", "dimensions", least=0,
    )  # fmt: skip
    steps: int = option(1000, "optimiser steps", "steps", least=0)
    batch_tokens: int = option(2048, "batch size of a step, with prompts and padding", "tokens", least=1)
    micro_tokens: int = option(2048, "micro-batch size; gradients accumulate over a batch", "tokens", least=1)
    seqlen: int = option(512, "length of packed rows; longer conversations are truncated", "tokens", least=4)
    learning_rate: float = option(3e-3, "peak learning rate, relative to the size of each row of a matrix", above=0)
    warm_up: float = option(
        0.05, "fraction of the steps with linear warm-up; cosine decay to zero follows", "fraction", least=0, below=1
    )
    weight_decay: float = option(0.0, "weight decay of AdamW", least=0)
    cache: bool = option(
        True, "run MODEL over the text once and cache its states on disk, 8 bytes per hidden element and token"
    )
    evaluate_every: int = option(100, "steps between evaluations on the validation answers", "steps", least=1)
    checkpoint_every: int = option(
        100, "steps between checkpoints, from which an interrupted run resumes", "steps", least=1
    )
    dtype: str = option("auto", "compute dtype; auto: float32 on a CPU, else bfloat16", choices=DTYPES[:3])
    tensorboard: str | None = option(None, "folder for TensorBoard logs")
    device: str = option("auto", "device: auto, cpu, cuda, cuda:1, ...")
    seed: int = option(0, "seed of all random choices")


@dataclasses.dataclass(frozen=True)
class DraftImportConfig(Options):
    """Options of `draft import`."""

    convention: str | None = option(
        None, "meaning of the captured layer numbers: boundary (input of layer j), output (of layer j), or "
        "hidden_states (as in transformers: the last one is after the final norm); default: from the config, else "
        "boundary", choices=("boundary", "output", "hidden_states"),
    )  # fmt: skip
    d2t: str = option(
        "auto", "meaning of d2t: offsets (target = draft + d2t[draft]) or target ids; auto: whichever is possible, if "
        "only one is", choices=("auto", "offsets", "ids"),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DraftExportConfig(Options):
    """Options of `draft export`."""

    dtype: str = option(
        "float16", "dtype of the matrices: float16, for other runtimes, or int8 with a scale per row, half the size",
        choices=("float16", "int8"),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DraftCheckConfig(Options):
    """Options of `draft check`."""

    text: str = option(
        "embedded", "evaluation text: output of `draft regenerate`, a file, a folder, or embedded (its held-out part)"
    )
    windows: int = option(8, "windows from the start of the text, or answers", "windows", least=1)
    seqlen: int = option(512, "length of a window, or of a prompt with its answer", "tokens", least=SHORTEST)
    dtype: str = option("auto", "compute dtype of the target; the head computes in float32", choices=DTYPES)
    device: str = option("auto", "device: auto, cpu, cuda, cuda:1, ...")


@dataclasses.dataclass(frozen=True)
class DraftCompareConfig(Options):
    """Options of `draft compare`."""

    first = ("text", "tokens", "cosine", "max_difference", "dtype")

    text: str = option("embedded", "input text without --reference: a file, a folder, or embedded")
    tokens: int = option(256, "length of the text", "tokens", least=2)
    cosine: float = option(0.98, "minimum cosine with the reference's logits, averaged over rows")
    max_difference: float | None = option(None, "maximum difference of any logit (default: no limit)")
    overlap: float | None = option(None, "minimum overlap with the reference's top logits (default: no limit)")
    top_k: int = option(10, "number of top logits for --overlap", "logits", least=1)
    dtype: str = option("auto", "weight dtype of the engine, as in `generate`", choices=ENGINE_DTYPES)
    device: str = option("auto", "device: auto, cpu, cuda, cuda:1, ...")
