"""The token index of a conversion: whether the result has one, and its computation from the calibration windows."""

from __future__ import annotations

import torch
from torch import Tensor

from mlaforge.checkpoint.converted_config import check_selection
from mlaforge.checkpoint.index_files import add_indexes, index_fields, layer_kinds
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.reader import read_config
from mlaforge.conversion.config import ConvertConfig
from mlaforge.factorization.observation import INDEX_SHARE, INDEX_TOKENS, learn_indexes
from mlaforge.families.spec import ModelSpec
from mlaforge.planning.plan import Plan
from mlaforge.planning.selection import index_width, sparse
from mlaforge.runtime import UserError
from mlaforge.tensor_store import TensorStore

# Options of the index.
INDEX_OPTIONS = ("topk", "width", "sink", "window")


def why_dense(spec: ModelSpec, config: ConvertConfig) -> str | None:
    """Return why the result has no index, None if it has one.

    Raises UserError for contradictory options, and for options of an index that the result cannot have: the defaults
    are left out with a message instead.
    """
    options = [name for name in INDEX_OPTIONS if getattr(config, name) != getattr(ConvertConfig, name)]
    forced = config.sink + config.window
    if config.dense:
        reason = "dense leaves it out"
    elif config.deepseek_style:
        reason = "DeepSeek's format (deepseek_style) has none"
    elif all(layer.window is not None for layer in spec.layers):
        reason = "every layer has a sliding window"
    elif config.topk + forced >= spec.max_position_embeddings:
        reason = (
            f"the model's context of {spec.max_position_embeddings} tokens is not above topk = {config.topk} and the "
            f"{forced} that are always read"
        )
    else:
        check_selection(config.topk, config.sink, config.window, config.width)
        return None
    if options:
        raise UserError(f"{options[0]} = {getattr(config, options[0])} is for an index, and {reason}; leave it out")
    return reason


def sparse_plan(plan: Plan, config: ConvertConfig) -> Plan:
    """Return the plan of a conversion with its index."""
    return sparse(plan, config.topk, config.width or index_width(plan))


def add_index(
    dense: LayerStream, plan: Plan, config: ConvertConfig, calibration_ids: Tensor, work: TensorStore,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Add an index to every layer without a window of the converted model `dense`, in its directory.

    plan: with the index; calibration_ids: token ids [N, T], of which the first windows are read. A resumed run reads
    the tensors from `work`.
    """
    directory = dense.source.path
    kinds, width = layer_kinds(dense.spec), max(layer.index for layer in plan.layers)
    if "index" not in work:
        windows, length = calibration_ids.shape
        count = max(1, min(INDEX_TOKENS // length, windows // INDEX_SHARE))
        work["index"] = learn_indexes(dense, calibration_ids[:count], kinds, width)
    fields = index_fields(kinds, config.topk, width, config.sink, config.window)
    add_indexes(directory, read_config(directory) | fields, work["index"], dtype)
