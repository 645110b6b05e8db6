"""What a plan costs in time and memory on a machine, and whether bytes or FLOPs are the limit.

A roofline is a bound, not a prediction: every part of a step runs at full bandwidth or at the achievable
FLOP/s, whichever takes longer, and parts run one after another. Activations, launches and drafting are free.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlaforge.config import nearest, option
from mlaforge.families import read_spec
from mlaforge.plan import (
    CONTEXTS,
    GPUS,
    LATENT_LAYOUTS,
    Cost,
    Gpu,
    LayerPlan,
    Plan,
    attention_op,
    lm_head,
    make_plan,
    mlp,
    projections,
    select_layers,
    unconverted,
    weight_bytes,
    window_choices,
)
from mlaforge.runtime import UserError
from mlaforge.spec import LayerSpec, ModelSpec

PARTS = ("attention", "projections", "mlp", "lm_head")
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
        """Where most of the time goes."""
        return max(self.limits, key=lambda name: self.limits[name])

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights that the step reads."""
        return sum(cost.bytes for part, cost in self.costs.items() if part != "attention")


def decode_step(plan: Plan, gpu: Gpu, context: int, batch: int, queries: int = 1) -> Step:
    """One step of `batch` requests with `queries` tokens each on top of `context` cached ones."""
    tokens = batch * queries
    costs = dict.fromkeys(PARTS, Cost(0.0, 0.0))
    seconds, limits = dict.fromkeys(PARTS, 0.0), defaultdict[str, float](float)

    def run(part: str, cost: Cost) -> None:
        costs[part] += cost
        seconds[part] += gpu.seconds(cost)
        names = CACHE_LIMITS if part == "attention" else WEIGHT_LIMITS
        limits[names[gpu.bound(cost)]] += gpu.seconds(cost)

    for layer, chosen in zip(plan.spec.layers, plan.layers, strict=True):
        run("attention", attention_op(layer, chosen, context, batch, queries))
        run("projections", projections(plan.spec, layer, chosen, tokens))
        run("mlp", mlp(layer, tokens))
    run("lm_head", lm_head(plan.spec, tokens))
    return Step(costs, seconds, dict(limits))


@dataclass(frozen=True)
class Row:
    """One configuration on one machine: `plain` decodes one token per request, `verify` takes 1 + drafts."""

    plan: Plan
    gpu: Gpu
    context: int
    batch: int
    drafts: int

    @property
    def chosen(self) -> LayerPlan:
        """The LayerPlan of the converted layers (all alike), or of the first layer where none is."""
        return self.plan.layers[self.plan.converted[0] if self.plan.converted else 0]

    @property
    def label(self) -> str:
        """Layout and ranks, `latent_rope 448+64`."""
        chosen = self.chosen
        rope = f"+{chosen.qk_rope_head_dim}" if chosen.qk_rope_head_dim else ""
        return "gqa" if chosen.layout == "gqa" else f"{chosen.layout} {chosen.kv_lora_rank}{rope}"

    @cached_property
    def plain(self) -> Step:
        return decode_step(self.plan, self.gpu, self.context, self.batch)

    @cached_property
    def verify(self) -> Step:
        return decode_step(self.plan, self.gpu, self.context, self.batch, 1 + self.drafts)

    def attention(self, queries: int) -> Cost:
        """The attention op of the converted layers (of every layer where none is) for one request."""
        spec, layers = self.plan.spec, self.plan.converted or range(self.plan.spec.num_layers)
        costs = (attention_op(spec.layers[i], self.plan.layers[i], self.context, 1, queries) for i in layers)
        return sum(costs, Cost(0.0, 0.0))

    @property
    def verify_ratio(self) -> float:
        """Time of a step with drafts over a step without."""
        return self.verify.total / self.plain.total

    @property
    def perfect_speedup(self) -> float:
        """The ceiling of speculation: all drafts accepted (length 1 + drafts), and drafting costs nothing."""
        return (1 + self.drafts) / self.verify_ratio

    @property
    def requests(self) -> int:
        """Requests of `context` tokens that fit beside the weights; activations will take some of that."""
        free = self.gpu.memory_gib * 2**30 - weight_bytes(self.plan)
        return max(0, int(free // self.plan.cache_bytes(self.context)))


def compare(
    spec: ModelSpec,
    gpu: Gpu,
    context: int,
    batch: int,
    drafts: int,
    budgets: Sequence[float],
    layouts: Sequence[str] = LATENT_LAYOUTS,
    layers: str = "auto",
) -> tuple[list[Row], list[str]]:
    """The unconverted model, then each layout at each budget; and a line for each pair that no rank fits, or for a
    layout that fits at no budget for one reason."""
    select_layers(spec, layers)
    rows, left_out = [Row(unconverted(spec), gpu, context, batch, drafts)], []
    for layout in layouts:
        reasons = {}
        for budget in budgets:
            try:
                rows.append(Row(make_plan(spec, budget, layout, layers), gpu, context, batch, drafts))
            except UserError as error:
                reasons[budget] = str(error)
        if len(reasons) == len(budgets) and len(set(reasons.values())) == 1:
            left_out.append(f"{layout} is left out: {reasons[budgets[0]]}")
        else:
            left_out += [f"{layout} at {budget} is left out: {reason}" for budget, reason in reasons.items()]
    return rows, left_out


# Steps closer to each other than this are alike: a roofline is no better.
ALIKE = 1.05


def recommend(rows: Sequence[Row]) -> tuple[Row, str]:
    """The row to convert to, and why, in a paragraph that names the physical limit. `rows[0]` is unconverted.

    The ranks are the widest that halve the cache: what a narrower one gains in time costs fidelity, which no
    roofline sees. The layout is `latent` where that is as fast as anything, since it keeps all of RoPE; else
    `latent_rope` if its attention over 1 + drafts tokens takes no longer than GQA's; else the faster.
    """
    gqa, T = rows[0], 1 + rows[0].drafts
    halved = [row for row in rows[1:] if row.plan.converted_fraction <= 0.5 + 1e-9] or list(rows[1:])
    if not halved:
        return gqa, "no standard rank fits this model; give kv_lora_rank."
    halved.sort(key=lambda row: -row.plan.converted_fraction)
    latent, rope = ([row for row in halved if row.chosen.layout == layout] for layout in LATENT_LAYOUTS)
    widest = [layout[0] for layout in (latent, rope) if layout]
    best = min(widest, key=lambda row: row.verify.total)
    keeps_up = [row for row in reversed(widest) if slowdown(row, gqa, T) <= 1.0]
    if latent and latent[0].verify.total <= ALIKE * min(row.verify.total for row in [gqa, *widest]):
        best = latent[0]
        why = "the step is limited elsewhere, so keeping all of RoPE costs no time"
        if gqa.gpu.name != "cpu":
            why += " (given a kernel that decompresses keys on chip; FlashMLA and its kin want latent_rope)"
    elif keeps_up:
        best = keeps_up[0]
        over = best.attention(T).intensity > best.gpu.ridge
        why = f"its attention is {'compute-bound, yet not behind GQA' if over else 'cache-bandwidth-bound'}"
    else:
        why = "attention over latents is compute-bound here: it saves memory, not attention time"
        able = [k for k in range(gqa.drafts) if slowdown(best, gqa, 1 + k) <= 1.0]
        why += f"; it keeps up with GQA up to {1 + able[-1]} query token(s)" if able else ""
        narrow = [row.label for row in rope if slowdown(row, gqa, T) <= 1.0]
        why += f"; {narrow[0]} would keep up, at a price in fidelity" if narrow else ""
    return best, f"{best.label}: {why}. {analyse(best, gqa)}"


def slowdown(row: Row, gqa: Row, queries: int) -> float:
    """Time of attention over the cache, over GQA's; the layers that stay GQA count in both."""
    mine, theirs = (decode_step(r.plan, r.gpu, r.context, r.batch, queries) for r in (row, gqa))
    return mine.seconds["attention"] / theirs.seconds["attention"]


def analyse(row: Row, gqa: Row) -> str:
    """What limits a configuration, in sentences: attention against the ridge, step, memory, speculation."""
    T = 1 + row.drafts
    text = (
        f"At {T} query token(s) its attention does {_number(row.attention(T).intensity)} FLOP per cache byte "
        f"(ridge {_number(row.gpu.ridge)}) in {slowdown(row, gqa, T):.2f} x GQA's time. "
    )
    for each in (row, gqa):
        share = each.verify.limits[each.verify.limit] / each.verify.total
        total = _number(each.verify.total * 1e3)
        text += f"A step of {each.label} takes {total} ms, {share:.0%} of it limited by {each.verify.limit}. "
    text += (
        f"{row.requests} requests of this context (GQA: {gqa.requests}) fit beside the weights, which take "
        f"{_size(weight_bytes(row.plan))} of {row.gpu.memory_gib:g} GiB."
    )
    if row.drafts:
        reads = row.verify.weight_bytes / row.plain.weight_bytes
        text += (
            f" Verifying {row.drafts} draft(s) reads {reads:.2f} x the weight bytes and takes "
            f"{row.verify_ratio:.2f} x a plain step; speculation gains at most {row.perfect_speedup:.2f} x "
            "(every draft accepted and free)."
        )
    return text


@dataclass
class PlanConfig:
    """Options of `plan`: the workload and the machine; budget, layout and ranks add a row of your own."""

    context: str = option("32k", "tokens in the cache of each request; k is 1024, m is 1024²", "tokens")
    batch: int = option(4, "requests decoded together", "requests")
    gpu: str = option("h200", "machine to compute for", choices=tuple(GPUS))
    drafts: int = option(3, "draft tokens that a speculative step verifies", "tokens")
    budget: float | None = option(None, "share of the converted layers' GQA cache to keep", "0 to 1")
    layout: str | None = option(None, "cache layout of the converted layers", choices=LATENT_LAYOUTS)
    kv_lora_rank: int | None = option(None, "latent numbers per token, in place of a budget", "numbers")
    qk_rope_head_dim: int | None = option(None, "rotary key numbers per token (latent_rope)", "numbers")
    layers: str = option(
        "auto", "layers to convert: all, full, auto (full beside sliding ones) or a list such as 0,2,5-9"
    )


BUDGETS = (0.75, 0.5, 0.4375, 0.25)


def parse_context(text: str) -> int:
    """`32k` -> 32768, `1m` -> 1048576, `4096` -> 4096. Raises UserError."""
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower(), re.ASCII)
    if not match or not int(match[1]):
        raise UserError(f"context {text!r} must be a number of tokens above 0 such as 4096, 32k or 1m")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2]]


def run_plan(config_json: Mapping[str, Any], options: PlanConfig) -> PlanReport:
    """All that `plan` knows of a model from its config.json. Raises UserError for options out of range."""
    spec, context = read_spec(config_json), parse_context(options.context)
    if options.gpu not in GPUS:
        raise UserError(f"gpu {options.gpu!r} must be one of {', '.join(GPUS)}{nearest(options.gpu, GPUS)}")
    if options.batch < 1 or options.drafts < 0:
        raise UserError(f"batch {options.batch} must be at least 1, drafts {options.drafts} at least 0")
    if options.budget is not None and options.kv_lora_rank is not None:
        raise UserError(f"budget {options.budget}, kv_lora_rank {options.kv_lora_rank}: give one of the two")
    gpu, asked = GPUS[options.gpu], None
    rows, notes = compare(spec, gpu, context, options.batch, options.drafts, BUDGETS, layers=options.layers)
    if {options.budget, options.layout, options.kv_lora_rank, options.qk_rope_head_dim} != {None}:
        budget, layout = 0.5 if options.budget is None else options.budget, options.layout or "latent"
        ranks = options.kv_lora_rank, options.qk_rope_head_dim
        plan = make_plan(spec, budget, layout, options.layers, *ranks)
        own = Row(plan, gpu, context, options.batch, options.drafts)
        asked = next((row for row in rows if row == own), own)
        rows += [] if asked in rows else [asked]
    if context > spec.max_position_embeddings:
        notes.append(f"context {context} is beyond the model's {spec.max_position_embeddings} positions")
    return PlanReport(rows, asked, *recommend(rows), notes)


def _size(count: float) -> str:
    """Bytes in IEC units."""
    power = min(4, (max(1, int(count)).bit_length() - 1) // 10)
    return f"{count / 1024**power:,.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_percent = "{:.2%}".format
# title -> key -> heading over two lines, value of a row, how it is printed. T is 1 + drafts query tokens.
TABLES: dict[str, dict[str, tuple[str, Callable[[Row], Any], Callable[[Any], str]]]] = {
    "Cache and memory": {
        "converted_fraction": ("of GQA cache|converted", lambda r: r.plan.converted_fraction, _percent),
        "model_fraction": ("of GQA cache|model", lambda r: r.plan.model_fraction(r.context), _percent),
        "cached_per_token": ("numbers|per token", lambda r: r.plan.cached_per_token, "{:,}".format),
        "cache_bytes": ("cache of|the batch", lambda r: r.plan.cache_bytes(r.context, r.batch), _size),
        "weight_bytes": ("weights|", lambda r: weight_bytes(r.plan), _size),
        "requests": ("requests|that fit", lambda r: r.requests, "{:,}".format),
    },
    "Attention over the cache": {
        "intensity": ("FLOP/byte|1 query", lambda r: r.attention(1).intensity, _number),
        "intensity_verify": ("FLOP/byte|T queries", lambda r: r.attention(1 + r.drafts).intensity, _number),
        "attention_ms": ("ms|1 query", lambda r: r.plain.seconds["attention"] * 1e3, _number),
        "attention_ms_verify": ("ms|T queries", lambda r: r.verify.seconds["attention"] * 1e3, _number),
    },
    "Decode step": {
        "step_ms": ("ms|1 query", lambda r: r.plain.total * 1e3, _number),
        "tokens_per_second": ("tokens/s|1 query", lambda r: r.batch / r.plain.total, _number),
        "limit": ("limit|1 query", lambda r: r.plain.limit, str),
        "step_ms_verify": ("ms|T queries", lambda r: r.verify.total * 1e3, _number),
        "verify_ratio": ("ms ratio|T to 1", lambda r: r.verify_ratio, "{:.2f}".format),
        "verify_speedup_ceiling": ("speed-up if all|are accepted", lambda r: r.perfect_speedup, _number),
        "limit_verify": ("limit|T queries", lambda r: r.verify.limit, str),
    },
}


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return ["  ".join(line).rstrip() for line in aligned]


@dataclass(frozen=True)
class PlanReport:
    """What `plan` answers: `rows[0]` is the unconverted model, `asked` the user's own configuration."""

    rows: list[Row]
    asked: Row | None
    best: Row
    reason: str
    notes: list[str]

    def record(self) -> dict[str, str]:
        """The model, the machine and the workload in words."""
        row, spec, gpu = self.rows[0], self.rows[0].plan.spec, self.rows[0].gpu

        def each(words: Callable[[LayerSpec], str]) -> str:
            return " or ".join(dict.fromkeys(words(layer) for layer in spec.layers))

        sliding = [layer for layer in spec.layers if layer.window is not None]
        rope = {k: v for k, v in spec.rope.parameters.items() if k not in ("rope_type", "type", "rope_theta")}
        return {
            "model": f"{spec.model_type}, {spec.num_params / 1e9:.2f}e9 parameters",
            "hidden size": str(spec.hidden_size),
            "heads": each(lambda la: f"{la.num_heads} query, {la.num_kv_heads} KV, head_dim {la.head_dim}"),
            "layers": f"{spec.num_layers}: {spec.num_layers - len(sliding)} full, {len(sliding)} sliding",
            "window": each(lambda la: f"{la.window} tokens" if la.window is not None else "none"),
            "GQA cache": each(lambda la: f"{la.cached}") + " numbers per token and layer (K and V)",
            "RoPE": f"{spec.rope.kind}, theta {spec.rope.theta:g}, cos and sin x "
            + ", ".join([f"{spec.rope.attention_scaling:.4g}", *(f"{key} {rope[key]}" for key in rope)]),
            "experts": each(lambda la: f"{la.moe.num_experts}, {la.moe.top_k} a token" if la.moe else "none"),
            "machine": f"{gpu.name}: {gpu.bf16_tflops:g} dense TFLOP/s x {gpu.achievable:g} achievable, "
            f"{gpu.bandwidth_tbs:g} TB/s, {gpu.memory_gib:g} GiB; ridge {gpu.ridge:.3g} FLOP/byte",
            "source": gpu.source,
            "workload": f"{row.batch} x {row.context} tokens in bf16; T = {1 + row.drafts} query token(s)",
        }

    def render(self) -> str:
        """For the terminal: the record, the tables (`>` marks the user's row, `*` the best), the advice."""
        lines = [f"{key:<13}{value}" for key, value in self.record().items()]
        drafts = self.rows[0].drafts
        for title, columns in TABLES.items():
            shown = [columns[key] for key in columns if drafts or "verify" not in key]
            table = [[head.split("|")[line] for head in ("|", *(c[0] for c in shown))] for line in (0, 1)]
            for row in self.rows:
                mark = "> " * (row is self.asked) + "* " * (row is self.best)
                table.append([mark + row.label, *(show(value(row)) for _, value, show in shown)])
            lines += ["", title, *_table(table)]
        table = [["", *["read", "GFLOP", "ms"] * 2], ["", *["1 query"] * 3, *["T queries"] * 3]]
        for part in PARTS:
            for label, row in {r.label: r for r in (self.rows[0], self.best, self.asked) if r}.items():
                table.append([f"{part}, {label}"])
                for step in (row.plain, row.verify):
                    cost, ms = step.costs[part], step.seconds[part] * 1e3
                    table[-1] += [_size(cost.bytes), _number(cost.flops / 1e9), _number(ms)]
        parts = _table(table if drafts else [line[:4] for line in table])
        lines += ["", "Parts of a step", *parts]
        if choices := window_choices(self.best.plan) if self.best.plan.converted else {}:
            heads = [f"{tokens // 1024}K" for tokens in CONTEXTS]
            table = [["layers converted", *heads], *([name, *map(_size, b.values())] for name, b in choices.items())]
            lines += ["", f"Cache of one request, {self.best.label}", *_table(table)]
        lines += ["", f"Recommended (*): {self.reason}"]
        if self.asked and self.asked is not self.best:
            lines += [f"Yours (>): {self.asked.label}: {analyse(self.asked, self.rows[0])}"]
        return "\n".join(lines + [f"Note: {note}" for note in self.notes])

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON: sizes in bytes, times in ms; `rows[0]` is the unconverted model."""
        rows = []
        for row in self.rows:
            cells: dict[str, Any] = {"configuration": row.label, **dataclasses.asdict(row.chosen)}
            cells |= {"asked": row is self.asked, "recommended": row is self.best}
            for columns in TABLES.values():
                cells |= {key: value(row) for key, (_, value, _) in columns.items()}
            for name, step in (("parts", row.plain), ("parts_verify", row.verify)):
                costs = {part: dataclasses.asdict(cost) for part, cost in step.costs.items()}
                cells[name] = {part: {**costs[part], "ms": step.seconds[part] * 1e3} for part in costs}
            rows.append(cells)
        return {"record": self.record(), "rows": rows, "reason": self.reason, "notes": self.notes,
                "window_choices": window_choices(self.best.plan) if self.best.plan.converted else {}}  # fmt: skip
