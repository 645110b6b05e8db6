"""Report of `plan`: estimated savings of a conversion and physical limits, from a config.json alone, as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlaforge.config import by_keywords, whole_number
from mlaforge.families.spec import LayerSpec, ModelSpec, capture_boundaries
from mlaforge.ops.row_formats import common_tokens
from mlaforge.planning.arrangements import arrangements, largest
from mlaforge.planning.code_plan import coded_plan
from mlaforge.planning.config import PlanConfig
from mlaforge.planning.costs import Gpu, experts_touched
from mlaforge.planning.forms import SELECTED_FROM
from mlaforge.planning.plan import (
    Plan,
    make_plan,
    plan_of,
    resolve_bits_or_budget,
    unconverted,
    window_choices,
)
from mlaforge.planning.ranks import Ranks
from mlaforge.planning.recommendation import Recommendation, analyse, recommend
from mlaforge.planning.roofline import Row, compare, decode_step, in_bytes, in_digits
from mlaforge.rendering.table import text_table
from mlaforge.runtime import UserError

# Default tokens of a request.
CONTEXT = 32 * 1024
# Tokens over which bytes per token are counted: whole units of every format.
UNIT = common_tokens()


def parse_context(text: str) -> int:
    """`32k` -> 32768, `1m` -> 1048576, `4096` -> 4096. Raise UserError for other text."""
    with suppress(ValueError):
        if (tokens := whole_number(text)) > 0:
            return tokens
    raise UserError(f"context {text!r} must be a number of tokens above 0 such as 4096, 32k or 1m")


def run(model: str, config: PlanConfig) -> PlanReport:
    """Estimate the savings and limits of converting MODEL from its config.json.

    Return a report whose `rows` hold the numbers and whose `render()` returns the tables as text. Raise UserError for
    invalid input.
    """
    # Imported here because they load torch.
    from mlaforge.checkpoint.converted_config import is_converted
    from mlaforge.checkpoint.resolve import find_config
    from mlaforge.checkpoint.source_model import read_spec

    model_config = find_config(model)
    spec = read_spec(model_config)
    return run_plan(spec, config, plan_of(model_config, spec) if is_converted(model_config) else None)


def run_plan(spec: ModelSpec, options: PlanConfig, converted: Plan | None = None, gpu: Gpu | None = None) -> PlanReport:
    """Report for an original. converted: plan of a model that is converted already. gpu: replaces that of the options.
    Raise UserError for options out of range."""
    requested_context = parse_context(options.context) if options.context else CONTEXT
    if options.budget is not None and options.kv_lora_rank is not None:
        raise UserError(f"budget {options.budget}, kv_lora_rank {options.kv_lora_rank}: give one of the two")
    if options.bits is not None and {options.budget, options.kv_lora_rank} != {None}:
        raise UserError(f"bits {options.bits:g} determines the ranks: leave out budget and kv_lora_rank")
    if gpu is None:
        from mlaforge.planning import machines

        gpu = machines.by_name(options.gpu)
    gpu = gpu.with_overrides(options.memory, options.bandwidth)
    # The engine runs weights stored in fp32 in bf16.
    spec = dataclasses.replace(spec, bits=min(spec.bits, 16.0), layers=tuple(
        dataclasses.replace(layer, mlp_bits=min(layer.mlp_bits, 16.0)) for layer in spec.layers))  # fmt: skip
    context = min(requested_context, spec.max_position_embeddings)
    ranks = Ranks(options.tensor_parallel, options.context_parallel)
    ranks.check(spec)
    if options.tensor_parallel > 1 and not gpu.link_gbs:
        raise UserError(f"tensor_parallel {options.tensor_parallel} is for GPUs: name one, such as --gpu h100")
    rows, notes = compare(spec, gpu, context, options.batch, options.drafts, layers=options.layers, ranks=ranks)
    if options.context and context < requested_context:
        notes.insert(0, f"the model supports {context:,} positions: planned for these, not for {requested_context:,}")
    if (weights := rows[0].weight_bytes) > gpu.memory_gib * 2**30:
        notes.insert(0, f"the weights alone take {in_bytes(weights)}, and the machine has {gpu.memory_gib:g} GiB")
    if gpu.name != "cpu":
        notes.append(
            "times on a GPU are predicted, none was measured (docs/reference/kernel-times.md); losses of selections "
            f"were measured at {SELECTED_FROM:,} tokens; int4 rows and coded rows of latent_rope are for CPUs"
        )
    recommendation, requested = recommend(rows), None
    if plan := _requested_plan(spec, options, converted):
        row = Row(plan, gpu, context, options.batch, options.drafts, ranks=ranks)
        requested = next((existing for existing in rows if existing.plan == plan), row)
        rows += [] if any(existing is requested for existing in rows) else [requested]
    report = PlanReport(rows, requested, recommendation, notes)
    if (gpus := ranks.tensor) > 1:
        for row in report.compared():
            most = largest(row, gpus)
            notes.append(f"{gpus} {gpu.name} hold most requests of {row.label} as {most.label}: {most.requests:,}")
    return report


def _requested_plan(spec: ModelSpec, options: PlanConfig, converted: Plan | None) -> Plan | None:
    """Plan of the user's options or of the converted model; None without either."""
    ranks = (options.kv_lora_rank, options.qk_rope_head_dim)
    conversion = {options.bits, options.budget, options.layout, *ranks} != {None}
    stored = options.kv_cache_dtype or "bf16"
    if converted:
        if conversion:
            raise UserError("MODEL is already converted and has its row: leave out the options of a conversion")
        stored = "coded" if converted.stored == "coded" else stored
        return dataclasses.replace(converted, spec=spec, stored=stored)
    if not conversion:
        return unconverted(spec, stored) if options.kv_cache_dtype else None
    layout = options.layout or "latent"
    bits, budget = resolve_bits_or_budget(layout, options.bits, options.budget, options.kv_lora_rank is not None)
    if bits is not None:
        plan = coded_plan(spec, bits, layout, options.layers, options.qk_rope_head_dim)
        return dataclasses.replace(plan, stored=stored) if options.kv_cache_dtype else plan
    assert budget is not None
    return make_plan(spec, budget, layout, options.layers, *ranks, stored=stored)


_percent = "{:.2%}".format


def _loss(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.1f} %"


def _gqa_bytes(row: Row) -> int:
    return dataclasses.replace(row, plan=unconverted(row.plan.spec)).cache_bytes(1)


# title -> key -> (two-line heading, value of a row, format). T is 1 + drafts query tokens.
TABLES: dict[str, dict[str, tuple[str, Callable[[Row], Any], Callable[[Any], str]]]] = {
    "Forms": {
        "model_fraction": ("of GQA's|bytes", lambda r: r.cache_bytes(1) / _gqa_bytes(r), _percent),
        "bytes_per_token": ("bytes|per token", lambda r: r.plan.cache_bytes(UNIT) / UNIT, "{:,.0f}".format),
        "cache_bytes": ("cache of|the batch", lambda r: r.cache_bytes(r.batch), in_bytes),
        "requests": ("requests|that fit", lambda r: r.requests, "{:,}".format),
        "step_ms": ("ms a|step", lambda r: r.plain.total * 1e3, in_digits),
        "tokens_per_second": ("tokens/s|", lambda r: r.batch / r.plain.total, in_digits),
        "typical_loss": ("typical|loss", lambda r: r.form and r.form.percent, _loss),
        "limit": ("limit|", lambda r: r.plain.limit, str),
    },
    "Physics": {
        "converted_fraction": ("of GQA's|converted", lambda r: r.plan.converted_fraction, _percent),
        "cached_per_token": ("elements|per token", lambda r: r.plan.cached_per_token, "{:,}".format),
        "bits": ("bits of a|GQA element", lambda r: r.plan.bits, "{:.4g}".format),
        "weight_bytes": ("weights|", lambda r: r.weight_bytes, in_bytes),
        "intensity": ("FLOP/byte|1 query", lambda r: r.attention(1).intensity, in_digits),
        "intensity_verify": ("FLOP/byte|T queries", lambda r: r.attention(1 + r.drafts).intensity, in_digits),
        "attention_ms": ("attention|ms", lambda r: r.plain.seconds["attention"] * 1e3, in_digits),
        "attention_ms_verify": ("attention|ms, T", lambda r: r.verify.seconds["attention"] * 1e3, in_digits),
    },
    "A step with drafts": {
        "step_ms_verify": ("ms|T queries", lambda r: r.verify.total * 1e3, in_digits),
        "verify_ratio": ("ms ratio|T to 1", lambda r: r.verify_ratio, "{:.2f}".format),
        "verify_speedup_ceiling": ("speed-up if all|are accepted", lambda r: r.perfect_speedup, in_digits),
        "limit_verify": ("limit|T queries", lambda r: r.verify.limit, str),
    },
}


@dataclass(frozen=True)
class PlanReport:
    """Result of `plan`. rows[0]: the unconverted model; requested: the user's configuration."""

    rows: list[Row]
    requested: Row | None
    recommendation: Recommendation
    notes: list[str]

    @property
    def best(self) -> Row:
        return self.recommendation.best

    def compared(self) -> list[Row]:
        """The original, the best and the requested row, without repetitions."""
        return list({row.label: row for row in (self.rows[0], self.best, self.requested) if row}.values())

    def record(self) -> dict[str, str]:
        """Descriptions of model, machine and workload."""
        row, spec, gpu = self.rows[0], self.rows[0].plan.spec, self.rows[0].gpu

        def distinct(describe: Callable[[LayerSpec], str]) -> str:
            return " or ".join(dict.fromkeys(describe(layer) for layer in spec.layers))

        sliding = [layer for layer in spec.layers if layer.window is not None]
        rope = {k: v for k, v in spec.rope.parameters.items() if k not in ("rope_type", "type", "rope_theta")}
        return {
            "model": f"{spec.model_type}, {spec.num_params / 1e9:.2f}e9 parameters",
            "hidden size": str(spec.hidden_size),
            "heads": distinct(lambda la: f"{la.num_heads} query, {la.num_kv_heads} KV, head_dim {la.head_dim}"),
            "layers": f"{spec.num_layers}: {spec.num_layers - len(sliding)} full, {len(sliding)} sliding",
            "window": distinct(lambda la: f"{la.window} tokens" if la.window is not None else "none"),
            "GQA cache": distinct(lambda la: f"{la.cached}") + " elements per token and layer (K and V)",
            "RoPE": f"{spec.rope.kind}, theta {spec.rope.theta:g}, cos and sin x "
            + ", ".join([f"{spec.rope.attention_scaling:.4g}", *(f"{key} {rope[key]}" for key in rope)]),
            "experts": distinct(lambda la: f"{la.moe.num_experts}, {la.moe.top_k} a token" if la.moe else "none"),
            "EAGLE-3": f"captures at layers {', '.join(map(str, capture_boundaries(spec.num_layers)))}"
            if spec.num_layers > 5
            else "too few layers to capture from",
            "machine": f"{gpu.name}: {gpu.bf16_tflops:.3g} dense TFLOP/s x {gpu.achievable:g} achievable, "
            f"{gpu.bandwidth_tbs:.3g} TB/s x {gpu.read:g}, {gpu.memory_gib:g} GiB; ridge {gpu.ridge:.3g} FLOP/byte",
            "source": gpu.source,
            **({"GPUs": f"{row.machine}; bytes and costs are those of one"} if row.ranks.tensor > 1 else {}),
            "workload": f"{row.batch} x {row.context} tokens; T = {1 + row.drafts} query token(s)",
        }

    def render(self) -> str:
        """Text for the terminal: recommendation, tables (`>` marks the requested row, `*` the best), record."""
        drafts = self.rows[0].drafts
        lines = [self.recommendation.sentence, *self.recommendation.reasons]
        if self.requested and self.requested is not self.best:
            lines += [f"Requested (>): {self.requested.label}: {analyse(self.requested, self.rows[0])}"]
        lines += [f"Note: {note}" for note in self.notes]
        for title, columns in TABLES.items():
            if not (shown := [columns[key] for key in columns if drafts or "verify" not in key]):
                continue
            table = [[head.split("|")[line] for head in ("|", *(c[0] for c in shown))] for line in (0, 1)]
            for row in self.rows:
                mark = "> " * (row is self.requested) + "* " * (row is self.best)
                table.append([mark + row.label, *(show(value(row)) for _, value, show in shown)])
            lines += ["", title, text_table(table, "<>")]
        table = [["", *["read", "GFLOP", "ms"] * 2], ["", *["1 query"] * 3, *["T queries"] * 3]]
        for part in self.rows[0].plain.costs:
            for row in self.compared():
                table.append([f"{part}, {row.label}"])
                for step in (row.plain, row.verify):
                    cost, ms = step.costs[part], step.seconds[part] * 1e3
                    table[-1] += [in_bytes(cost.bytes), in_digits(cost.flops / 1e9), in_digits(ms)]
        lines += ["", "Parts of a step", text_table(table if drafts else [line[:4] for line in table], "<>")]
        if entries := self.arrangements():
            table = [["", "", "cache of a", "requests", "ms a"], ["", "", "request", "that fit", "step"]]
            for entry in entries:
                table.append([entry["configuration"], entry["arrangement"], in_bytes(entry["cache_bytes"])])
                table[-1] += [f"{entry['requests']:,}", in_digits(entry["step_ms"])]
            title = f"Arrangements of {self.rows[0].ranks.tensor} GPUs, cache per GPU, step of the batch on a replica"
            lines += ["", title, text_table(table, "<<>")]
        if reads := self.weight_reads():
            table = [
                ["tokens", "experts of", "weights", "of them", "tokens/s"],
                ["", "a layer", "read", "a token", "at most"],
            ]
            for entry in reads:
                read, tokens = entry["bytes"], entry["tokens"]
                cells = f"{tokens:g}", f"{entry['experts']:.1f}", in_bytes(read), in_bytes(read / tokens)
                table.append([*cells, in_digits(entry["tokens_per_second"])])
            lines += ["", "Weights of a step of several tokens", text_table(table, ">>")]
        if choices := window_choices(self.best.plan) if self.best.plan.converted else {}:
            heads = [f"{tokens // 1024}K" for tokens in next(iter(choices.values()))]
            table = [["layers converted", *heads], *([name, *map(in_bytes, b.values())] for name, b in choices.items())]
            lines += ["", f"Cache of one request, {self.best.label}", text_table(table, "<>")]
        if len(layers := self.layers()) > 1:
            table = [["layer", "layout", "elements", "bits of a GQA element", "bytes per token"]]
            table += [[str(n), layer["layout"], f"{layer['cached']}", f"{layer['bits']:.3g}", f"{layer['bytes']:g}"]
                      for n, layer in enumerate(layers)]  # fmt: skip
            lines += ["", "Layers of the requested configuration (>)", text_table(table, "><>")]
        return "\n".join([*lines, "", *(f"{key:<13}{value}" for key, value in self.record().items())])

    def weight_reads(self) -> list[dict[str, float]]:
        """Experts and weight bytes that a step of the original reads, by its number of tokens (batch times drafts), and
        tokens/s at memory bandwidth. Empty without experts, as every step then reads all weights."""
        row = self.rows[0]
        mixture = next((layer.moe for layer in row.plan.spec.layers if layer.moe), None)
        if mixture is None:
            return []
        entries = []
        for tokens in sorted({1, 2, 4, 8, 16, 64, row.batch, row.batch * (1 + row.drafts)}):
            read = decode_step(row.plan, row.gpu, 1, tokens).weight_bytes
            rate = tokens * row.gpu.bandwidth / read
            touched = experts_touched(mixture, tokens)
            entries.append({"tokens": tokens, "experts": touched, "bytes": read, "tokens_per_second": rate})
        return entries

    def arrangements(self) -> list[dict[str, Any]]:
        """What the GPUs of several ranks hold in every arrangement, of the original, the best and the requested row:
        cache bytes of a request per GPU, requests of all GPUs, ms of a step of the batch. Empty for one GPU."""
        if (gpus := self.rows[0].ranks.tensor) == 1:
            return []
        return [
            {"configuration": row.label, "arrangement": arrangement.label, "replicas": arrangement.replicas,
             "tensor_parallel": arrangement.row.ranks.tensor, "context_parallel": arrangement.row.ranks.context,
             "cache_bytes": arrangement.row.cache_bytes(1), "requests": arrangement.requests,
             "step_ms": arrangement.row.plain.total * 1e3}
            for row in self.compared()
            for arrangement in arrangements(row, gpus)
        ]  # fmt: skip

    def layers(self) -> list[dict[str, Any]]:
        """Cached elements, bytes and bits per token of each layer of the requested configuration; empty if all layers
        are alike."""
        if self.requested is None or len(set(self.requested.plan.layers)) == 1:
            return []
        plan = self.requested.plan
        return [
            {
                "layout": chosen.layout,
                "cached": chosen.cached(layer),
                "bytes": (size := chosen.cached_bytes(layer, UNIT, plan.stored_as(chosen)) / UNIT),
                "bits": 8 * size / layer.cached,
                "code": list(chosen.code),
            }
            for chosen, layer in zip(plan.layers, plan.spec.layers, strict=True)
        ]

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON: sizes in bytes, times in ms; rows[0] is the unconverted model."""
        rows = []
        for row in self.rows:
            cells: dict[str, Any] = {"configuration": row.label, **dataclasses.asdict(row.chosen)}
            cells |= {"stored": row.plan.stored, "asked": row is self.requested, "recommended": row is self.best}
            for columns in TABLES.values():
                cells |= {key: value(row) for key, (_, value, _) in columns.items()}
            for name, step in (("parts", row.plain), ("parts_verify", row.verify)):
                costs = {part: dataclasses.asdict(cost) for part, cost in step.costs.items()}
                cells[name] = {part: {**costs[part], "ms": step.seconds[part] * 1e3} for part in costs}
            rows.append(cells)
        return {"recommendation": self.recommendation.sentence, "reasons": self.recommendation.reasons,
                "notes": self.notes,
                "record": self.record(), "rows": rows, "layers": self.layers(),
                "several_tokens": self.weight_reads(), "arrangements": self.arrangements(),
                "window_choices": window_choices(self.best.plan) if self.best.plan.converted else {}}  # fmt: skip


plan = by_keywords(run, PlanConfig)
