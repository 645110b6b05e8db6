"""`draft compare`: a head in the engine beside another runtime, or plain PyTorch in fp64, part by part.

A difference in acceptance says that something is wrong; this says where it begins. Both read the same text and, so that
the head alone is compared, the same states of the target: the reference's. What the engine's own target would have
captured is compared beside it.

A reference is a safetensors file (docs/speculation.md has a recipe for making one). Row i of T - 1 is of the state at
token i and of token i + 1, at position i:

input_ids           int [T]
aux_hidden_states   [T, S], the captured states side by side; without it the target's own, in fp64
fc_out              [T - 1, C], what `fc` makes of them
attn_out, ffn_out   [T - 1, C], outputs of self_attn and mlp before they are added to anything
pre_head_hidden     [T - 1, C], what lm_head reads
logits              [T - 1, V], or as wide as the target's vocabulary

Any but input_ids may be absent, not all. All may have a batch of one before the rest.
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
from mlaforge.engine.speculation.eagle3 import EagleDrafter, head_format
from mlaforge.modeling.eagle3 import Eagle3Head
from mlaforge.runtime import UserError, resolve_device

IDS, STATES = "input_ids", "aux_hidden_states"
# In the order in which they are computed.
STAGES = ("fc_out", "attn_out", "ffn_out", "pre_head_hidden", "logits")


def run(directory: Path, target: str, reference: Path | None, config: DraftCompareConfig) -> dict[str, Any]:
    """Differences of the head in `directory`, as the engine runs it, from the reference, and which tolerances failed.

    Raises UserError for a head of another model and a reference that is not as described above.
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
            # Torch's grouped product has no fp64.
            stream.config._experts_implementation = "eager"
            (captured,), _ = target_states(stream, [ids], set(head.config.boundaries))
            stages[STATES] = torch.cat([captured[b] for b in head.config.boundaries], dim=-1)
            if reference is None:
                embedded = stream.embed(ids[None, 1:])[0]
                stages |= plain_stages(head.to(embedded.device), stages[STATES], embedded, ids)
    engine = _engine(model, directory, config, len(ids))
    ours = engine_stages(engine, ids.tolist(), stages[STATES])
    rows = [{"stage": name, **measures(ours[name], stages[name], config.top_k if name == "logits" else None)}
            for name in (STATES, *STAGES) if name in stages]  # fmt: skip
    return {
        "stages": rows, "rows": len(ids) - 1, "states": states_of, "dtype": engine.model.format,
        "head_dtype": head_format(engine.model.format, engine.device),
        "judged": rows[-1]["stage"], "failed": failed(rows[-1], config),
    }  # fmt: skip


def read_reference(path: Path, head: Eagle3Head) -> dict[str, Tensor]:
    """The tensors of a reference; UserError where they cannot be those of this head."""
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
    wanted = {IDS: (T,), STATES: (T, width), **dict.fromkeys(STAGES, (T - 1, config.layer.hidden_size))}
    wanted["logits"] = T - 1, config.draft_vocab_size
    for name, tensor in tensors.items():
        if tensor.ndim == len(wanted[name]) + 1 and len(tensor) == 1:
            tensor = tensor[0]
        if name == "logits" and tensor.shape[-1] == config.layer.vocab_size:
            tensor = tensor[..., head.target_ids]
        if tensor.shape != wanted[name] or tensor.is_floating_point() == (name == IDS):
            kind = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
            raise UserError(f"{path}: {name} is {kind}; this head and {T} tokens make {list(wanted[name])}")
        tensors[name] = tensor.long() if name == IDS else tensor
    if T < 2:
        raise UserError(f"{path}: {IDS} has {T} tokens; a row needs two")
    return tensors


@torch.no_grad()
def plain_stages(head: Eagle3Head, states_TS: Tensor, embedded_RC: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """The stages by modeling/eagle3.py in fp64 (norms and angles are transformers', in fp32)."""
    head = head.double()
    layer, kept = head.midlayer, {}
    for name, module in (("fc_out", head.fc), ("attn_out", layer.self_attn), ("ffn_out", layer.mlp)):
        module.register_forward_hook(lambda _, inputs, out, name=name: kept.update({name: out[0]}))
    if head.config.has_embed_tokens:
        embedded_RC = head.embed_tokens(ids[1:].to(embedded_RC.device))
    kept["pre_head_hidden"] = head.norm(whole_pass(head, states_TS, embedded_RC))[0]
    kept["logits"] = head.lm_head(kept["pre_head_hidden"])
    return kept


def _engine(model: SourceModel, head: Path, config: DraftCompareConfig, tokens: int) -> Engine:
    return Engine(model, EngineConfig(
        dtype=config.dtype, device=config.device, speculative=str(head), prefix_caching=False, max_num_seqs=1,
        max_num_batched_tokens=tokens,
    ))  # fmt: skip


@torch.inference_mode()
def engine_stages(engine: Engine, ids: list[int], states_TS: Tensor) -> dict[str, Tensor]:
    """What the engine's target captures of a text, and the stages of its head from the states that are given."""
    assert engine.speculation is not None and isinstance(engine.speculation.drafter, EagleDrafter)
    if len(ids) > engine.max_model_len:
        raise UserError(f"{len(ids)} tokens do not fit into the cache, which holds {engine.max_model_len}")
    tables = engine.tables
    tables.start(0, ids)
    assert tables.reserve(0, len(ids)) == []
    both = engine.runner(make_batch([Chunk(0, ids, 0, len(ids))], tables, engine.device))
    stages = {STATES: both[:, engine.model.spec.hidden_size :].clone()}
    rows = states_TS[:-1].to(engine.device, engine.model.dtype)
    stages |= engine.speculation.drafter.stages(rows, ids[1:], Chunk(0, ids, 0, len(ids) - 1))
    tables.free(0)
    return stages


def measures(ours: Tensor, reference: Tensor, top_k: int | None) -> dict[str, Any]:
    """Differences of two [R, W]: mean and largest absolute one and its row, the reference's size (root mean square),
    the mean and least cosine of rows, and for `top_k` the share of the reference's largest that are ours too. NaN where
    either is not finite."""
    a, b = ours.cpu().double(), reference.cpu().double()
    difference = (a - b).abs()
    # A row of zeros is like another of zeros.
    cosines = torch.where(difference.amax(-1) == 0, 1.0, torch.cosine_similarity(a, b, dim=-1))
    overlap = None
    if top_k is not None:
        k = min(top_k, a.shape[1])
        mine, theirs = a.topk(k, dim=-1).indices, b.topk(k, dim=-1).indices
        overlap = float((mine[:, :, None] == theirs[:, None]).any(-1).double().mean())
    return {
        "mean_difference": float(difference.mean()), "max_difference": float(difference.max()),
        "worst_row": int(difference.amax(-1).argmax()), "size": float(b.square().mean().sqrt()),
        "cosine": float(cosines.mean()), "worst_cosine": float(cosines.min()), "overlap": overlap,
    }  # fmt: skip


def failed(row: dict[str, Any], config: DraftCompareConfig) -> list[str]:
    """Which tolerances a stage misses, in words. NaN misses them all."""
    missed = []
    for name, least in (("cosine", config.cosine), ("overlap", config.overlap)):
        if least is not None and row[name] is not None and not row[name] >= least:
            missed.append(f"{row['stage']}: {name} {row[name]:.5f} is below {least:g}")
    most = config.max_difference
    if most is not None and not row["max_difference"] <= most:
        missed.append(f"{row['stage']}: largest difference {row['max_difference']:.3g} is above {most:g}")
    return missed


def table(differences: dict[str, Any]) -> str:
    """What `run` returns, for a terminal."""
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
