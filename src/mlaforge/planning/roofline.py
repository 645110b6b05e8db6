"""Roofline of a plan on a machine: time and memory of a decode step, and its limiting resource.

Every part of a step runs at the machine's bandwidth or achievable FLOP/s, whichever takes longer, and parts run one
after another. Activations, launches and drafting are free. On a CPU both rates are those that measured steps reach
(machines.py); on a GPU kernels reach predicted shares of them (costs.SHARES).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mlaforge.families.spec import ModelSpec
from mlaforge.planning.costs import Cost, Gpu, attention_op, index_op
from mlaforge.planning.forms import FORMS, Form
from mlaforge.planning.plan import LayerPlan, Plan, select_layers
from mlaforge.planning.ranks import ONE_GPU, Ranks
from mlaforge.runtime import UserError

PARTS = ("attention", "projections", "mlp", "lm_head")
# A further part if several GPUs share out a model, and its limit.
EXCHANGE, LINK_LIMIT = "exchange", "link bandwidth"
# The limits of attention over the cache, and of every other part, by what bounds it.
CACHE_LIMITS = {"bandwidth": "cache bandwidth", "compute": "attention compute"}
WEIGHT_LIMITS = {"bandwidth": "weight bandwidth", "compute": "weight compute"}


@dataclass(frozen=True)
class Step:
    """One decode step: cost and seconds of each part, and the seconds spent under each limit."""

    costs: dict[str, Cost]
    seconds: dict[str, float]
    limits: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(self.seconds.values())

    @property
    def limit(self) -> str:
        """Limit under which most of the time is spent."""
        return max(self.limits, key=lambda name: self.limits[name])

    @property
    def weight_bytes(self) -> float:
        """Weight bytes read by the step."""
        return sum(cost.bytes for part, cost in self.costs.items() if part not in ("attention", EXCHANGE))


def decode_step(plan: Plan, gpu: Gpu, context: int, batch: int, queries: int = 1, ranks: Ranks = ONE_GPU) -> Step:
    """One step of `batch` requests with `queries` new tokens each and `context` cached ones, on each of `ranks`."""
    tokens, share = batch * queries, ranks.share(plan)
    costs = dict.fromkeys(PARTS, Cost(0.0, 0.0))
    seconds, limits = dict.fromkeys(PARTS, 0.0), defaultdict[str, float](float)

    def run(part: str, cost: Cost, rows: str = "") -> None:
        costs[part] += cost
        seconds[part] += gpu.seconds(cost, rows)
        names = CACHE_LIMITS if part == "attention" else WEIGHT_LIMITS
        limits[names[gpu.bound(cost, rows)]] += gpu.seconds(cost, rows)

    parts = zip(plan.spec.layers, plan.layers, share.spec.layers, share.layers, strict=True)
    for layer, chosen, heads, cached in parts:
        stored = plan.stored_as(chosen)
        by_layout = stored == "bf16" and chosen.layout in {**gpu.row_bandwidths, **gpu.shares}
        rows, rank_tokens = chosen.layout if by_layout else stored, ranks.tokens(context, layer)
        run("attention", attention_op(heads, cached, rank_tokens, batch, queries, stored, gpu.caches_keys), rows)
        run("attention", index_op(heads, cached, rank_tokens, batch), "index")
        run("projections", ranks.projections(plan.spec, layer, chosen, tokens), "weights")
        run("mlp", ranks.mlp(layer, tokens), "experts" if layer.moe and layer.mlp_bits < 8 else "weights")
    run("lm_head", ranks.lm_head(plan.spec, tokens), "weights")
    if ranks != ONE_GPU:
        costs[EXCHANGE] = Cost(0.0, ranks.exchanged_bytes(plan, tokens))
        limits[LINK_LIMIT] = seconds[EXCHANGE] = costs[EXCHANGE].bytes / gpu.link
    return Step(costs, seconds, dict(limits))


@dataclass(frozen=True)
class Row:
    """One configuration on one machine. plain: step of one token per request; verify: step of 1 + drafts tokens. form:
    None for a configuration of the user. ranks: the GPUs that share it out; bytes and costs are those of one."""

    plan: Plan
    gpu: Gpu
    context: int
    batch: int
    drafts: int
    form: Form | None = None
    ranks: Ranks = ONE_GPU

    @property
    def chosen(self) -> LayerPlan:
        """LayerPlan of the converted layers (all are alike), or of the first layer if none is converted."""
        return self.plan.layers[self.plan.converted[0] if self.plan.converted else 0]

    @property
    def label(self) -> str:
        """Layout, ranks, storage of the rows, and the number read by a selection: `latent_rope 448+64`, `latent 304, 4
        bits`, `gqa, int8, 1024 read`."""
        chosen = self.chosen
        packed = "" if self.plan.stored in ("bf16", "coded") else f", {self.plan.stored}"
        topk = max(layer.topk for layer in self.plan.layers)
        read = f", {topk} read" if topk else ""
        if chosen.layout == "gqa":
            return f"gqa{packed}{read}"
        ranks = sorted({self.plan.layers[i].kv_lora_rank for i in self.plan.converted})
        rank = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else ranks[0]
        rope = f"+{chosen.qk_rope_head_dim}" if chosen.qk_rope_head_dim else ""
        return f"{chosen.layout} {rank}{rope}" + (f", {self.plan.bits:.3g} bits" if chosen.code else packed) + read

    @cached_property
    def plain(self) -> Step:
        return decode_step(self.plan, self.gpu, self.context, self.batch, 1, self.ranks)

    @cached_property
    def verify(self) -> Step:
        return decode_step(self.plan, self.gpu, self.context, self.batch, 1 + self.drafts, self.ranks)

    def attention(self, queries: int) -> Cost:
        """Cost of the attention op of the converted layers (of every layer if none is) for one request."""
        plan, pairs = self.plan, list(zip(self.plan.spec.layers, self.plan.layers, strict=True))
        costs = (
            attention_op(*pairs[i], self.context, 1, queries, plan.stored_as(plan.layers[i]))
            + index_op(*pairs[i], self.context)
            for i in plan.converted or range(len(pairs))
        )
        return sum(costs, Cost(0.0, 0.0))

    @property
    def verify_ratio(self) -> float:
        """Time of a step with drafts over that of a plain step."""
        return self.verify.total / self.plain.total

    @property
    def perfect_speedup(self) -> float:
        """Upper bound of speculation: all drafts accepted (length 1 + drafts) and drafting free."""
        return (1 + self.drafts) / self.verify_ratio

    @property
    def fits(self) -> bool:
        """Whether weights and the cache of the batch fit into the machine's memory."""
        return self.requests >= self.batch

    @property
    def requests(self) -> int:
        """Maximum requests of `context` tokens in the memory that the weights leave, ignoring activations."""
        return max(0, int((self.gpu.memory_gib * 2**30 - self.weight_bytes) // self.cache_bytes(1)))

    @property
    def machine(self) -> str:
        """Name of the machine: `h100`, or `8 h100 (TP 8, CP 2)`."""
        ranks = self.ranks
        return self.gpu.name if ranks == ONE_GPU else f"{ranks.tensor} {self.gpu.name} ({ranks.label})"

    @property
    def weight_bytes(self) -> float:
        """Bytes of a GPU's weights."""
        return self.ranks.weight_bytes(self.plan)

    def cache_bytes(self, batch: int) -> int:
        """Bytes of a GPU's cache of so many requests."""
        return self.ranks.cache_bytes(self.plan, self.context, batch)


def compare(
    spec: ModelSpec,
    gpu: Gpu,
    context: int,
    batch: int,
    drafts: int,
    forms: Sequence[Form] = FORMS,
    layers: str = "all",
    ranks: Ranks = ONE_GPU,
) -> tuple[list[Row], list[str]]:
    """Return a row for each of `forms` that the engine reads directly on such a machine, and a note for each layout
    that the model does not support."""
    select_layers(spec, layers)
    rows: list[Row] = []
    excluded = dict[str, str]()
    for form in forms:
        readable = ("cpu" if gpu.name == "cpu" else "gpu") in form.devices and (gpu.fp8 or form.stored != "fp8")
        if readable and form.topk(context) < context:
            try:
                row = Row(form.plan(spec, layers, context), gpu, context, batch, drafts, form, ranks)
                # At the length where selections were measured, a share of the context is one of the fixed numbers.
                if all(row.plan != other.plan for other in rows):
                    rows.append(row)
            except UserError as error:
                # One reason per layout: the errors of its smaller budgets repeat the first.
                excluded.setdefault(form.layout, f"{form.layout} is left out: {error}")
    return rows, [note for layout, note in excluded.items() if layout not in {row.chosen.layout for row in rows}]


def slowdown(row: Row, gqa: Row, queries: int) -> float:
    """Time of attention over the cache relative to GQA's; layers that stay GQA count in both."""
    step, gqa_step = (decode_step(r.plan, r.gpu, r.context, r.batch, queries, r.ranks) for r in (row, gqa))
    return step.seconds["attention"] / gqa_step.seconds["attention"]


def in_bytes(count: float) -> str:
    """Bytes in IEC units."""
    power = min(4, (max(1, int(count)).bit_length() - 1) // 10)
    return f"{count / 1024**power:,.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def in_digits(value: float) -> str:
    """Three significant digits, or the whole number from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
