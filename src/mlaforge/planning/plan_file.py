"""plan.json: the plan of every layer, written by `diagnose` and read by `convert --plan`.

A file written by hand needs the keys `model` and `layers`; the others record its provenance.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from mlaforge.config import nearest
from mlaforge.families.spec import ModelSpec
from mlaforge.planning.plan import LATENT_LAYOUTS, LayerPlan, Plan, make_plan
from mlaforge.runtime import UserError

PLAN = "plan.json"
KEYS = ("kv_lora_rank", "qk_rope_head_dim")


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """A plan file as read. passages: hashes of the text that the plan was tuned on, which no evaluation may use."""

    plan: Plan
    sha256: str
    passages: list[int]


def shape(spec: ModelSpec) -> dict[str, Any]:
    """Properties that a model must share with the model of a plan."""
    sizes = {"model_type": spec.model_type, "hidden_size": spec.hidden_size, "num_layers": spec.num_layers}
    return {**sizes, "cached": [layer.cached for layer in spec.layers]}


def write(path: Path, plan: Plan, provenance: dict[str, Any], losses: list[float | None], passages: list[int]) -> None:
    """Write plan.json, one line per layer. provenance: top-level keys, including `model`; losses: predicted, nats per
    token."""
    body = {**provenance, "model": {**provenance.get("model", {}), **shape(plan.spec)}}
    lines = [f' "{key}": {json.dumps(value)},' for key, value in body.items()]
    layers = [
        json.dumps({"layer": i, **dataclasses.asdict(chosen), "predicted_loss": loss})
        for i, (chosen, loss) in enumerate(zip(plan.layers, losses, strict=True))
    ]
    rows = ",\n  ".join(layers)
    text = "\n".join(["{", *lines, f' "layers": [\n  {rows}\n ],', f' "passages": {json.dumps(passages)}', "}", ""])
    path.write_text(text, encoding="utf-8")


def read(source: str, spec: ModelSpec) -> PlanFile:
    """Read a plan file, or that in a directory written by `diagnose`, for the model of `spec`.

    Raise UserError if it is invalid, is for another model, or requests ranks that a layer does not support.
    """
    path = Path(source).expanduser()
    path = path / PLAN if path.is_dir() else path
    try:
        raw = path.read_bytes()
        body = json.loads(raw)
    except OSError as error:
        raise UserError(f"plan {path} cannot be read ({error.strerror}); give plan.json or a folder that "
                        "`mlaforge diagnose` wrote") from error  # fmt: skip
    except ValueError as error:
        raise UserError(f"plan {path} is not JSON: {' '.join(str(error).split())}") from error
    try:
        layers, model, passages = body["layers"], body["model"], body.get("passages", [])
        kinds = (isinstance(layers, list), isinstance(model, dict), all(isinstance(p, int) for p in passages))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"plan {path} needs the keys 'model' and 'layers', as `mlaforge diagnose` writes them"
        ) from error
    if not all(kinds):
        raise UserError(f"plan {path}: 'layers' must be a list, 'model' an object, 'passages' a list of whole numbers")
    for key, value in shape(spec).items():
        if key in model and model[key] != value:
            raise UserError(f"plan {path} is for another model: its {key} is {model[key]}, this model's is {value}")
    if len(layers) != spec.num_layers:
        raise UserError(f"plan {path} has {len(layers)} layers, the model has {spec.num_layers}; it needs one for each")
    try:
        plan = Plan(spec, tuple(_layer(spec, i, layer) for i, layer in enumerate(layers)))
    except UserError as error:
        raise UserError(f"plan {path}: {error}") from error
    layouts = {(layer.layout, layer.qk_rope_head_dim) for layer in plan.layers if layer.layout != "gqa"}
    if len(layouts) != 1:
        problem = "several layouts or rotary key sizes; all converted layers need the same" if layouts else "no layer"
        raise UserError(f"plan {path} converts {problem}")
    digest = hashlib.sha256(json.dumps([[vars(layer) for layer in plan.layers], passages]).encode()).hexdigest()
    return PlanFile(plan, digest, passages)


def _layer(spec: ModelSpec, index: int, entry: Any) -> LayerPlan:
    """Parse one entry with the checks of `convert`'s options."""
    if not isinstance(entry, dict) or entry.get("layer", index) != index:
        raise UserError(f"entry {index} of 'layers' must be an object whose 'layer' is {index}")
    layout, known = entry.get("layout"), ("gqa", *LATENT_LAYOUTS)
    if layout not in known:
        raise UserError(
            f"layer {index}: layout {layout!r} must be one of {', '.join(known)}{nearest(str(layout), known)}"
        )
    rank, rope = (entry.get(key, 0) for key in KEYS)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (rank, rope)):
        raise UserError(f"layer {index}: kv_lora_rank and qk_rope_head_dim must be whole numbers")
    if layout == "gqa":
        return LayerPlan("gqa")
    if entry.get("code"):
        raise UserError(f"layer {index}: `convert --bits` chooses bits from calibration text; remove the key code")
    if layout == "latent_rope" and not rope:
        raise UserError(f"layer {index}: layout latent_rope needs a qk_rope_head_dim")
    return make_plan(spec, 0.5, layout, str(index), rank, rope or None).layers[index]
