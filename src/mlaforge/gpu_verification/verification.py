"""Stage verification: steps with several query tokens, drafting by a head, and selection and reading of tokens in
sparse attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from mlaforge.bench import kernels
from mlaforge.checkpoint.eagle3 import buffers, write_head
from mlaforge.engine.cache.view import select_view
from mlaforge.engine.engine import Engine
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.families.spec import capture_boundaries
from mlaforge.gpu_verification import drawn_engine
from mlaforge.gpu_verification.case import Case, Outcome, Prediction, Unsupported
from mlaforge.gpu_verification.context import Context
from mlaforge.modeling.eagle3 import Eagle3Config, Eagle3Head
from mlaforge.ops import paged_attention_triton as attention
from mlaforge.ops.token_selection import TokenIndex, empty_keys
from mlaforge.planning.costs import Cost

LAYERS, CONTEXT, TWIN_CONTEXT = 4, 8192, 96
QUERIES, TWIN_QUERIES = range(1, 10), (1, 4)
# A tree of 16 drafted tokens after the newest token: two children, then their children.
PARENTS = [-1, -1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10]
DRAFTED, DRAFTING_STEPS = 3, 8
# Expected milliseconds of drafting three tokens, and of a tree step, which no graph replays.
DRAFT_MS, TREE_MS = 2.5, 4.0
SELECTED, SELECT_CONTEXTS, TWIN_SELECT = 1024, (8192, 32768, 131072), (300,)
# Expected microseconds of a selection besides reading the index keys.
SELECT_US = 150.0


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    config, length = drawn_engine.config_of(context, LAYERS), TWIN_CONTEXT if context.twin else CONTEXT
    for T in TWIN_QUERIES if context.twin else QUERIES:
        roof, predicted = drawn_engine.predicted_seconds(context, config, length, 1, T)
        yield Case(
            f"T={T}, 1 x {length}", Prediction(predicted * 1e3, "ms", share=roof / predicted),
            functools.partial(step, context, [length], [T], roof),
        )  # fmt: skip
    ragged = [1, 4, 9, 2]
    roof, predicted = drawn_engine.predicted_seconds(context, config, length, 4, 4)
    yield Case(
        f"ragged T=1,4,9,2, 4 x {length}", Prediction(predicted * 1e3, "ms", share=roof / predicted),
        functools.partial(step, context, [length] * 4, ragged, roof),
    )  # fmt: skip
    yield Case(f"tree of 16, 1 x {length}", Prediction(TREE_MS, "ms"), functools.partial(tree, context, length))
    yield Case(
        f"draft of {DRAFTED} tokens by an EAGLE-3 head", Prediction(DRAFT_MS, "ms"),
        functools.partial(draft, context, length),
    )  # fmt: skip
    for length in TWIN_SELECT if context.twin else SELECT_CONTEXTS:
        predicted = context.roof.seconds(index_cost(length)) * 1e6 + SELECT_US
        yield Case(
            f"choose {SELECTED} of {length} tokens", Prediction(predicted, "us"),
            functools.partial(select, context, length, False),
        )  # fmt: skip
        yield Case(
            f"attend to {SELECTED} of {length} tokens", Prediction(20.0, "us"),
            functools.partial(select, context, length, True),
        )  # fmt: skip


def stage_engine(context: Context) -> Engine:
    """Engine without a drafter."""
    config = drawn_engine.config_of(context, LAYERS)
    return context.shared("engine", lambda: drawn_engine.with_graphs(drawn_engine.build(context, config)))


def step(context: Context, lengths: Sequence[int], queries: Sequence[int], roof: float) -> Outcome:
    """Time of a step. lengths, queries: cached and query tokens per sequence; roof: roofline seconds."""
    engine = stage_engine(context)
    seconds = drawn_engine.step_seconds(context, engine, drawn_engine.make_step(engine, lengths, queries))
    drawn_engine.stop(engine)
    return Outcome(seconds * 1e3, roof / seconds)


def tree(context: Context, length: int) -> Outcome:
    """Time of a step that verifies a tree of drafted tokens."""
    engine, rows = stage_engine(context), Draft([0] * len(PARENTS), parents=PARENTS).tree
    assert rows is not None
    batch = drawn_engine.make_step(engine, [length], [len(rows)], rows)
    seconds = drawn_engine.step_seconds(context, engine, batch)
    drawn_engine.stop(engine)
    return Outcome(seconds * 1e3)


def write_drawn_head(context: Context, directory: Path) -> Path:
    """Write an EAGLE-3 head with random weights for the stage's model. Return its directory."""
    config = drawn_engine.config_of(context, LAYERS)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    layer = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"], head_dim=config["head_dim"], vocab_size=vocabulary,
        max_position_embeddings=config["max_position_embeddings"], attention_bias=False,
    )  # fmt: skip
    drafted = min(32000, vocabulary // 2)
    boundaries = tuple(capture_boundaries(config["num_hidden_layers"]))
    head_config = Eagle3Config(layer, hidden, drafted, boundaries, has_embed_tokens=False)
    with torch.device("meta"):
        head = Eagle3Head(head_config)
    state: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        if name.endswith("norm.weight"):
            state[name] = torch.ones(tensor.shape)
        elif tensor.is_floating_point():
            state[name] = torch.randn(tensor.shape, dtype=torch.bfloat16) * 0.02
    head.load_state_dict(state | buffers(head_config, torch.arange(drafted)), assign=True)
    directory.mkdir()
    write_head(head, directory)
    return directory


def draft(context: Context, length: int) -> Outcome:
    """Milliseconds of a proposal, from the engine's statistics of decoding steps."""

    def make() -> Engine:
        directory = write_drawn_head(context, context.folder / "head")
        config = drawn_engine.config_of(context, LAYERS)
        options: dict[str, Any] = {"num_speculative_tokens": DRAFTED, "adaptive_speculation": False}
        return drawn_engine.build(context, config, speculative=str(directory), **options)

    engine = context.shared("drafting", make)
    drawn_engine.stop(engine)
    drawn_engine.decode(engine, [length], 200)
    for _ in range(4):
        drawn_engine.step(engine)
    assert engine.speculation is not None
    stats = engine.speculation.stats
    before = stats.draft_seconds, stats.engine_steps, stats.drafted
    for _ in range(DRAFTING_STEPS):
        drawn_engine.step(engine)
    drawn_engine.stop(engine)
    seconds, steps, drafted = (
        after - start
        for after, start in zip((stats.draft_seconds, stats.engine_steps, stats.drafted), before, strict=True)
    )
    if not drafted:
        raise Unsupported("the head drafted nothing in these steps")
    return Outcome(seconds / steps * 1e3, detail=f"{drafted / steps:.1f} tokens a step")


def index_cost(length: int) -> Cost:
    """Cost of reading a layer's index keys twice, and of their products with the queries of 64 heads."""
    width, heads = 64, 64
    return Cost(2.0 * 2 * heads * width * length, 2.0 * width * length)


def select(context: Context, length: int, attend: bool) -> Outcome:
    """Time in one layer to select tokens by their index keys, or with `attend` to attend to the selected ones."""
    choose, attend_selected = context.shared(f"selection {length}", lambda: selection_inputs(context, length))
    seconds = context.seconds(attend_selected if attend else choose, graph=attend)
    return Outcome(seconds * 1e6)


def selection_inputs(context: Context, length: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The two calls that `select` measures."""
    layout = kernels.LAYOUTS["gqa 64/8 x 64"]
    heads, width = (8, 16) if context.twin else (layout.heads, 64)
    layout = kernels.Layout(heads, layout.key_heads, layout.value)
    context.need(length * layout.row * context.dtype.itemsize)
    q, k, v, view, scale = kernels.make_inputs(layout, 1, length, 1, context.device.type, context.dtype)
    device, dim = context.device, layout.value
    index = TokenIndex(
        torch.randn(width, layout.key_heads * dim, device=device), torch.zeros(width, device=device),
        torch.randn(layout.key_heads, width, dim, device=device) / 800,
        torch.arange(width // 2, device=device) % (dim // 2), heads, sink=16, window=64, topk=SELECTED,
    )  # fmt: skip
    keys = empty_keys(len(k), width, device)
    keys.random_(-127, 128)
    angle = torch.randn(1, 1, dim // 2, device=device)
    turn, counts = torch.polar(torch.ones_like(angle), angle), (min(SELECTED, length // 2),)

    def choose() -> tuple[Tensor, Tensor]:
        if context.twin:
            return index.choose(keys, q.flatten(1), turn, view, counts, implementation="triton")
        return index.choose(keys, q.flatten(1), turn, view, counts)

    selected = select_view(view, *choose(), counts, False)
    return choose, lambda: attention.attend(q, k, v, selected, scale)
