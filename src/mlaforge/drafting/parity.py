"""`draft compare`: compare a head in the engine with another runtime, or with plain PyTorch in fp64, stage by stage.

A lower acceptance shows that something is wrong; this shows where. Both read the same text and the same target states,
the reference's, so that only the head is compared. The states that the engine captures are compared separately.

A reference is a safetensors file (docs/speculation.md has a recipe for one). Row i of T - 1 belongs to the state at
token i and to token i + 1, at position i:

input_ids           int [T]
aux_hidden_states   [T, S], concatenated captured states; default: the target's, in fp64
fc_out              [T - 1, C], output of `fc`
attn_out, ffn_out   [T - 1, C], outputs of self_attn and mlp before the residual additions
pre_head_hidden     [T - 1, C], input of lm_head
logits              [T - 1, V], or over the target's vocabulary

At least input_ids and one other tensor are required. A leading batch dimension of 1 is allowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mlaforge.checkpoint.eagle3 import check_head, read_head
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data import corpus
from mlaforge.drafting.check import target_states, whole_pass
from mlaforge.drafting.config import DraftCompareConfig
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.execution.batch import Chunk, make_batch
from mlaforge.engine.execution.draft_head import head_format
from mlaforge.engine.speculation.eagle3 import EagleDrafter
from mlaforge.modeling.eagle3 import Eagle3Head
from mlaforge.runtime import UserError, resolve_device

IDS, STATES = "input_ids", "aux_hidden_states"
# In the order of computation.
STAGES = ("fc_out", "attn_out", "ffn_out", "pre_head_hidden", "logits")


def run(directory: Path, target: str, reference: Path | None, config: DraftCompareConfig) -> dict[str, Any]:
    """Return the differences of the head in `directory`, run by the engine, from the reference, and failed tolerances.

    Raises UserError for a head of another model, and for an invalid reference.
    """
    model = SourceModel.open(target)
    spec = model.spec
    head = read_head(directory, spec.num_layers)
    check_head(head.config, spec.hidden_size, spec.vocab_size)
    stages = {} if reference is None else read_reference(reference, head)
    if reference is None:
        text = corpus.windows(model.tokenizer, config.text, 1, config.tokens, evaluation=True)
        stages[IDS] = text.ids[0]
    ids = stages[IDS]
    if len(ids) > spec.max_position_embeddings:
        raise UserError(f"{len(ids)} tokens are more than the model's {spec.max_position_embeddings}")
    model.check_tokens(ids)
    states_of = "the reference"
    if STATES not in stages:
        states_of = "the target in float64"
        with LayerStream(model, torch.float64, resolve_device(config.device)) as stream:
            # torch's grouped matrix product does not support fp64.
            stream.config._experts_implementation = "eager"
            (captured,), _ = target_states(stream, [ids], set(head.config.boundaries))
            stages[STATES] = torch.cat([captured[b] for b in head.config.boundaries], dim=-1)
            if reference is None:
                embedded = stream.embed(ids[None, 1:])[0]
                stages |= plain_stages(head.to(embedded.device), stages[STATES], embedded, ids)
    engine = _engine(model, directory, config, len(ids))
    engine_values = engine_stages(engine, ids.tolist(), stages[STATES])
    rows = [{"stage": name, **measures(engine_values[name], stages[name], config.top_k if name == "logits" else None)}
            for name in (STATES, *STAGES) if name in stages]  # fmt: skip
    return {
        "stages": rows, "rows": len(ids) - 1, "states": states_of, "dtype": engine.model.format,
        "head_dtype": head_format(engine.model.format, engine.device),
        "judged": rows[-1]["stage"], "failed": failed_tolerances(rows[-1], config),
    }  # fmt: skip


def read_reference(path: Path, head: Eagle3Head) -> dict[str, Tensor]:
    """Read the tensors of a reference. Raises UserError if they do not fit this head."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in (IDS, STATES, *STAGES) if name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is no safetensors file: {error}") from error
    if IDS not in tensors or not set(STAGES) & set(tensors):
        raise UserError(f"{path} must hold {IDS} and at least one of {', '.join(STAGES)}")
    config = head.config
    T = tensors[IDS].numel()
    width = len(config.boundaries) * config.target_hidden_size
    expected = {IDS: (T,), STATES: (T, width), **dict.fromkeys(STAGES, (T - 1, config.layer.hidden_size))}
    expected["logits"] = T - 1, config.draft_vocab_size
    for name, tensor in tensors.items():
        if tensor.ndim == len(expected[name]) + 1 and len(tensor) == 1:
            tensor = tensor[0]
        if name == "logits" and tensor.shape[-1] == config.layer.vocab_size:
            tensor = tensor[..., head.target_ids]
        if tensor.shape != expected[name] or tensor.is_floating_point() == (name == IDS):
            kind = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
            raise UserError(f"{path}: {name} is {kind}; this head and {T} tokens need {list(expected[name])}")
        tensors[name] = tensor.long() if name == IDS else tensor
    if T < 2:
        raise UserError(f"{path}: {IDS} has {T} tokens; at least two are needed")
    return tensors


@torch.no_grad()
def plain_stages(head: Eagle3Head, states_TS: Tensor, embedded_RC: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Return the stages computed by modeling/eagle3.py in fp64 (transformers' norms and rotary tables in fp32)."""
    head = head.double()
    layer, stages = head.midlayer, {}
    for name, module in (("fc_out", head.fc), ("attn_out", layer.self_attn), ("ffn_out", layer.mlp)):
        module.register_forward_hook(lambda _, inputs, out, name=name: stages.update({name: out[0]}))
    if head.config.has_embed_tokens:
        embedded_RC = head.embed_tokens(ids[1:].to(embedded_RC.device))
    stages["pre_head_hidden"] = head.norm(whole_pass(head, states_TS, embedded_RC))[0]
    stages["logits"] = head.lm_head(stages["pre_head_hidden"])
    return stages


def _engine(model: SourceModel, head: Path, config: DraftCompareConfig, tokens: int) -> Engine:
    return Engine(model, EngineConfig(
        dtype=config.dtype, device=config.device, speculative=str(head), prefix_caching=False, max_num_seqs=1,
        max_num_batched_tokens=tokens,
    ))  # fmt: skip


@torch.inference_mode()
def engine_stages(engine: Engine, ids: list[int], states_TS: Tensor) -> dict[str, Tensor]:
    """Return the states that the engine captures for a text, and the stages of its head for the given states."""
    assert engine.speculation is not None and isinstance(engine.speculation.drafter, EagleDrafter)
    if len(ids) > engine.max_model_len:
        raise UserError(f"{len(ids)} tokens do not fit into the cache of {engine.max_model_len}")
    tables = engine.tables
    tables.start(0, ids)
    assert tables.reserve(0, len(ids)) == []
    states = engine.runner(make_batch([Chunk(0, ids, 0, len(ids))], tables, engine.device))
    stages = {STATES: states[:, engine.model.spec.hidden_size :].clone()}
    rows = states_TS[:-1].to(engine.device, engine.model.dtype)
    stages |= engine.speculation.drafter.stages(rows, ids[1:], Chunk(0, ids, 0, len(ids) - 1))
    tables.free(0)
    return stages


def measures(engine_values: Tensor, reference: Tensor, top_k: int | None) -> dict[str, Any]:
    """Return the differences of two [R, W] tensors.

    Mean and maximum absolute difference, the row of the maximum, the reference's root mean square, mean and minimum
    cosine over rows, and with `top_k` the share of the reference's largest that are among the engine's. NaN if either
    is not finite.
    """
    a, b = engine_values.cpu().double(), reference.cpu().double()
    difference = (a - b).abs()
    # Equal rows have cosine 1, rows of zeros too.
    cosines = torch.where(difference.amax(-1) == 0, 1.0, torch.cosine_similarity(a, b, dim=-1))
    overlap = None
    if top_k is not None:
        k = min(top_k, a.shape[1])
        engine_top, reference_top = a.topk(k, dim=-1).indices, b.topk(k, dim=-1).indices
        overlap = float((engine_top[:, :, None] == reference_top[:, None]).any(-1).double().mean())
    return {
        "mean_difference": float(difference.mean()), "max_difference": float(difference.max()),
        "worst_row": int(difference.amax(-1).argmax()), "size": float(b.square().mean().sqrt()),
        "cosine": float(cosines.mean()), "worst_cosine": float(cosines.min()), "overlap": overlap,
    }  # fmt: skip


def failed_tolerances(row: dict[str, Any], config: DraftCompareConfig) -> list[str]:
    """Describe the tolerances that a stage exceeds; NaN exceeds all of them."""
    failures = []
    for name, minimum in (("cosine", config.cosine), ("overlap", config.overlap)):
        if minimum is not None and row[name] is not None and not row[name] >= minimum:
            failures.append(f"{row['stage']}: {name} {row[name]:.5f} is below {minimum:g}")
    maximum = config.max_difference
    if maximum is not None and not row["max_difference"] <= maximum:
        failures.append(f"{row['stage']}: largest difference {row['max_difference']:.3g} is above {maximum:g}")
    return failures


def table(differences: dict[str, Any]) -> str:
    """Format the result of `run` for a terminal."""
    lines = [f"{'stage':18} {'mean |d|':>9} {'max |d|':>9} {'row':>5} {'size':>9} {'cosine':>8} {'worst':>8} top-k"]
    for row in differences["stages"]:
        overlap = "" if row["overlap"] is None else f" {row['overlap']:.3f}"
        lines.append(
            f"{row['stage']:18} {row['mean_difference']:9.2e} {row['max_difference']:9.2e} {row['worst_row']:5} "
            f"{row['size']:9.2e} {row['cosine']:8.5f} {row['worst_cosine']:8.5f}{overlap}"
        )
    dtypes = f"engine in {differences['dtype']}, head in {differences['head_dtype']}"
    lines.append(f"{differences['rows']} rows, states of {differences['states']}, {dtypes}")
    return "\n".join([*lines, "; ".join(differences["failed"]) or f"{differences['judged']} agrees"])
