"""Settings of an engine that contradict each other, whatever the model."""

from __future__ import annotations

import dataclasses

from mlaforge.engine.config import EngineConfig
from mlaforge.ops.row_format import INT4_TOKENS
from mlaforge.runtime import UserError


def checked(config: EngineConfig) -> EngineConfig:
    """With its block size. UserError for settings that contradict each other."""
    tree, stored, size = config.speculative_tree_tokens, config.kv_cache_dtype, config.block_size
    if stored == "int4" and size not in (None, INT4_TOKENS):
        raise UserError(
            f"block_size = {size} must be {INT4_TOKENS}, the tokens that kv_cache_dtype int4 packs together"
        )
    if stored == "int4" and tree:
        raise UserError(
            "kv_cache_dtype int4 packs one text's tokens together; speculative_tree_tokens must be 0, a chain"
        )
    if tree and tree < config.drafted:
        raise UserError(
            f"speculative_tree_tokens = {tree} must be 0 (no trees) or at least num_speculative_tokens = "
            f"{config.drafted}"
        )
    if tree and config.speculative in ("none", "ngram"):
        raise UserError(f"speculative = {config.speculative!r} drafts no trees; speculative_tree_tokens needs a head")
    if config.specpv != "off" and config.speculative == "none":
        raise UserError(f"specpv = {config.specpv} judges drafted tokens; speculative must be ngram or a head")
    if config.specpv != "off" and stored == "int4":
        raise UserError(
            f"specpv = {config.specpv} reads tokens one by one, and kv_cache_dtype int4 packs several; use int8"
        )
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise UserError(
            f"max_num_batched_tokens = {config.max_num_batched_tokens} must be at least max_num_seqs = "
            f"{config.max_num_seqs}: every running sequence takes one"
        )
    return dataclasses.replace(config, block_size=size or (INT4_TOKENS if stored == "int4" else 16))
