"""What a user may set of `draft`'s verbs."""

from __future__ import annotations

import dataclasses

from mlaforge.config import DTYPES, Options, option
from mlaforge.engine.config import ENGINE_DTYPES, EngineConfig

# Shortest text of which `draft check` measures anything: a head's row needs two tokens.
SHORTEST = 3


@dataclasses.dataclass(frozen=True)
class RegenerateConfig(EngineConfig):
    """Options of `draft regenerate`."""

    first = ("prompts", "synthesize", "openings", "exclude", "max_new_tokens")

    prompts: tuple[str, ...] | None = option(
        None, 'files of prompts, .jsonl of {"turns": [text, ...]}: first turns', repeat=True
    )
    synthesize: int = option(0, "questions that the model draws itself, beside these", "prompts", least=0)
    openings: tuple[str, ...] | None = option(
        None, "files of how such questions begin, a line each: a domain's", repeat=True
    )
    exclude: tuple[str, ...] | None = option(
        None, "prompts (.jsonl) or text not to be asked: what will be judged on", repeat=True
    )
    max_new_tokens: int = option(256, "length of an answer", "tokens", least=1)
    temperature: float = option(0.0, "of the answers; 0 takes the likeliest token, as greedy decoding will")
    seed: int = option(0, "seed of every draw")


@dataclasses.dataclass(frozen=True)
class VocabularyConfig(Options):
    """Options of `draft vocab`."""

    size: int = option(8192, "tokens that a head can propose", "tokens")


@dataclasses.dataclass(frozen=True)
class DraftTrainConfig(Options):
    """Options of `draft train`."""

    first = ("text", "vocabulary", "init", "steps", "learning_rate")

    text: tuple[str, ...] | None = option(None, "what `draft regenerate` wrote with MODEL", repeat=True)
    vocabulary: str | None = option(None, "what `draft vocab` wrote; else the head proposes every token")
    init: str | None = option(
        None, "a head to start from, such as the original's for a converted model: sizes, vocabulary, window and "
        "boundaries are its own",
    )  # fmt: skip
    boundaries: tuple[int, ...] | None = option(
        None, "where MODEL's residual stream is captured, 3 of 0 (the embedding) to its number of layers (2, half, "
        "three before the last)", least=0,
    )  # fmt: skip
    sliding_window: int = option(2048, "tokens that the head's attention sees, 0 for all", "tokens", least=0)
    kv_heads: int = option(
        0, "key-value heads of a new head, 0: as many as MODEL; more copy better from the text, and are cached",
        "heads", least=0,
    )  # fmt: skip
    unroll: int = option(7, "drafted tokens in a row that training unrolls", "tokens", least=1)
    steps: int = option(1000, "steps of the optimiser", "steps", least=0)
    batch_tokens: int = option(2048, "text of a step, prompts and padding counted", "tokens", least=1)
    micro_tokens: int = option(2048, "of it, what goes through the models at once", "tokens", least=1)
    seqlen: int = option(512, "length of packed rows; longer conversations are cut", "tokens", least=4)
    learning_rate: float = option(
        3e-3, "after the warm-up; for a matrix's row it is a share of the row's own size", above=0
    )
    warm_up: float = option(
        0.05, "share of the steps over which the rate grows; a cosine takes it back to 0", "fraction", least=0, below=1
    )
    weight_decay: float = option(0.0, "decay of AdamW", least=0)
    cache: bool = option(
        True, "run MODEL over the text once and keep its states on disk, 8 bytes of each hidden number"
    )
    evaluate_every: int = option(100, "steps between evaluations on the answers kept back", "steps", least=1)
    checkpoint_every: int = option(100, "steps between checkpoints, from which a killed run goes on", "steps", least=1)
    dtype: str = option("auto", "dtype to compute in; auto: float32 on a CPU, else bfloat16", choices=DTYPES[:3])
    tensorboard: str | None = option(None, "folder for TensorBoard's logs")
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    seed: int = option(0, "seed of every random choice")


@dataclasses.dataclass(frozen=True)
class DraftImportConfig(Options):
    """Options of `draft import`."""

    convention: str | None = option(
        None, "what the numbers of captured layers count: boundary (the input of layer j), output (of layer j), or "
        "hidden_states (transformers': the last one comes after the final norm); else what the config says, else "
        "boundary", choices=("boundary", "output", "hidden_states"),
    )  # fmt: skip
    d2t: str = option(
        "auto", "how d2t is read: offsets (target = draft + d2t[draft]) or the target's ids; auto: as only one of them "
        "is possible", choices=("auto", "offsets", "ids"),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DraftExportConfig(Options):
    """Options of `draft export`."""

    dtype: str = option(
        "float16", "dtype of the written matrices: float16, which other runtimes read, or int8 with a scale per row, "
        "half the size", choices=("float16", "int8"),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DraftCheckConfig(Options):
    """Options of `draft check`."""

    text: str = option(
        "embedded", "text to measure on: what `draft regenerate` wrote, a file, a folder, or embedded (its held-out "
        "part)",
    )  # fmt: skip
    windows: int = option(8, "windows from the start of the text, or answers", "windows", least=1)
    seqlen: int = option(512, "length of a window, or of a prompt with its answer", "tokens", least=SHORTEST)
    dtype: str = option("auto", "dtype the target computes in; the head computes in float32", choices=DTYPES)
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")


@dataclasses.dataclass(frozen=True)
class DraftCompareConfig(Options):
    """Options of `draft compare`."""

    first = ("text", "tokens", "cosine", "max_difference", "dtype")

    text: str = option("embedded", "without --reference: text that both read, a file, a folder, or embedded")
    tokens: int = option(256, "of it, so many", "tokens", least=2)
    cosine: float = option(0.98, "least cosine with the reference's logits, a mean over rows")
    max_difference: float | None = option(None, "largest difference of any logit (none)")
    overlap: float | None = option(None, "least share of the reference's top logits that are among ours (none)")
    top_k: int = option(10, "how many top logits that is", "logits", least=1)
    dtype: str = option("auto", "weights of the engine that is compared, as in `generate`", choices=ENGINE_DTYPES)
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
