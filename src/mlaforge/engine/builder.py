"""Builds what an engine runs: the model on its paged cache, and its drafter."""

from __future__ import annotations

from pathlib import Path

from mlaforge.checkpoint.converted_config import is_sparse
from mlaforge.checkpoint.draft_head import DraftHead, read_head
from mlaforge.checkpoint.eagle3 import check_head
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.engine.cache.block_tables import BlockTables
from mlaforge.engine.cache.device_tables import DeviceTables
from mlaforge.engine.cache.kv_cache import Cache
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.config_checks import check_config, check_deterministic
from mlaforge.engine.execution.attention import make_paged_attention
from mlaforge.engine.execution.batch import Batch, Chunk, make_batch
from mlaforge.engine.execution.model import EngineModel, choose_format
from mlaforge.engine.execution.runner import Runner
from mlaforge.engine.execution.step_bytes import StepBytesModel
from mlaforge.engine.memory import cache_layout
from mlaforge.engine.scheduler import Scheduler
from mlaforge.engine.speculation.block import BlockDrafter
from mlaforge.engine.speculation.drafter import Drafter, TreeDrafter
from mlaforge.engine.speculation.eagle3 import EagleDrafter
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from mlaforge.engine.speculation.policy import Policy
from mlaforge.engine.speculation.sparse_view import SparseView, SparseViewConfig, sparse_view_format
from mlaforge.engine.speculation.speculation import Speculation
from mlaforge.modeling.block_head import BlockHead
from mlaforge.ops import tuned
from mlaforge.ops.token_selection import KEY_TILE
from mlaforge.runtime import UserError, log, resolve_device


class Builder:
    """The parts of an engine, loaded from `model`, a directory (original or converted), a .gguf file or a hub id.

    Raises UserError for a model that cannot be loaded, an invalid setting, or a cache that is too small for one
    sequence.
    """

    def __init__(self, model: str | Path | SourceModel, config: EngineConfig):
        self.device = resolve_device(config.device)
        self.config = config = check_config(config, self.device)
        block_size = config.block_size
        assert block_size is not None
        self.source = source = SourceModel.open(model).with_selection(config.dense, config.topk)
        if is_sparse(source.config) and block_size % KEY_TILE:
            raise UserError(f"block_size = {block_size} must be a multiple of {KEY_TILE} for a sparse model")
        format = choose_format(config.dtype, source, self.device)
        if config.deterministic:
            check_deterministic(format)
        tuned.load(self.device, config.tuned)
        self.model = EngineModel(source, format, self.device)
        longest = source.spec.max_position_embeddings
        self.max_model_len = min(config.max_model_len or longest, longest)
        self.head = self._read_head() if config.speculative not in ("none", "ngram") else None
        self.layers, groups = cache_layout(self.model, self.head, config, self.max_model_len, source.path.name)
        # CUDA graphs write the padding rows of a batch to a scratch block, which is not part of the budget.
        num_scratch = 1 if self.device.type == "cuda" else 0
        self.cache = Cache(self.layers, groups, block_size, self.model.dtype, self.device, num_scratch)
        # A CPU reads the tables that the host builds. For other devices a step uploads the changes of the tables.
        self.tables = (
            BlockTables(groups, block_size, config.prefix_caching)
            if self.device.type == "cpu"
            else DeviceTables(groups, block_size, config.prefix_caching, device=self.device)
        )
        self._load(self.model)
        # A sequence ends before it outgrows the cache, as at the end of the context.
        full = [group.num_blocks for group in groups if group.window is None]
        if full and min(full) * block_size < self.max_model_len:
            self.max_model_len = min(full) * block_size
            log(f"context limited to {self.max_model_len} tokens, the size of the cache; see --cache-bytes")
        self.runner = Runner(self.model, self.cache.scratch, config.max_num_seqs)
        self._runners = {self.model.format: (self.model, self.runner)}

    def scheduler(self) -> Scheduler:
        """Return a scheduler on the tables."""
        assert self.config.max_num_batched_tokens is not None
        # Sparse and latent layers compute prompt tokens and generated ones in different forms.
        replays = is_sparse(self.source.config) or any(layer.kind != "gqa" for layer in self.layers)
        return Scheduler(self.tables, self.config.max_num_seqs, self.config.max_num_batched_tokens, replays)

    def step_bytes(self, model: EngineModel) -> StepBytesModel:
        """Return the model of bytes that steps of `model` read from this cache."""
        return StepBytesModel(model, self.layers, [group.window for group in self.tables.groups])

    def drafter(self) -> Drafter | None:
        """Return the drafter of option `speculative`."""
        if self.config.speculative == "ngram":
            return PromptLookupDrafter()
        if self.head is None:
            return None
        group = len(self.tables.groups) - 1

        def draft_batch(chunks: list[Chunk]) -> Batch:
            return make_batch(chunks, self.tables, self.device, (group,))

        if isinstance(self.head, BlockHead):
            rows = self.cache.rows[-len(self.head.layers) :]
            return BlockDrafter(self.head, self.model, rows, draft_batch)
        return EagleDrafter(self.head, self.model, self.cache.rows[-1], draft_batch, self.runner.graphs)

    def speculation(
        self, drafter: Drafter, config: EngineConfig, prompt_lookup: bool, view: SparseViewConfig | None = None
    ) -> Speculation:
        """Return the modes of a drafter and the policy that chooses among them. view: of sparse-view steps, instead of
        the option's."""
        length, lookup_tokens, lookup = config.max_draft_tokens, config.max_lookup_tokens, None
        if drafter.longest is not None:
            length = min(config.num_speculative_tokens or drafter.longest, drafter.longest)
        if prompt_lookup:
            lookup = drafter if isinstance(drafter, PromptLookupDrafter) else PromptLookupDrafter()
        modes: list[Drafter] = [drafter]
        if config.speculative_tree_tokens:
            modes.append(TreeDrafter(drafter, config.speculative_tree_tokens, length))
        self.model.boundaries = drafter.boundaries
        if config.specpv:
            model, runner = self._sparse_view_runner(sparse_view_format(config, self.model))
            model.boundaries = drafter.boundaries
            view = view or SparseViewConfig.from_options(config, self.model.layers)
            modes.append(SparseView(
                view, drafter, length, lookup, lookup_tokens, model, runner, self.step_bytes(model), self.tables
            ))  # fmt: skip
        return Speculation(drafter, Policy(modes, length, config.adaptive_speculation, lookup, lookup_tokens))

    def _sparse_view_runner(self, format: str) -> tuple[EngineModel, Runner]:
        """The model of sparse-view steps and its runner, on the same cache: this model, or a copy with quantized
        weights."""
        if format not in self._runners:
            model = EngineModel(self.source, format, self.device)
            self._load(model)
            model.embedding = self.model.embedding
            self._runners[format] = model, Runner(model, self.cache.scratch, self.config.max_num_seqs)
        return self._runners[format]

    def _load(self, model: EngineModel) -> None:
        """Load the model's weights, with its attention on this cache."""
        layers, rows, specs = self.layers, self.cache.rows, model.spec.layers
        model.load(lambda index, attention: make_paged_attention(
            attention, layers[index].kind, layers[index].group, rows[index], specs[index].sinks, model.format
        ))  # fmt: skip

    def _read_head(self) -> DraftHead:
        directory, spec = Path(self.config.speculative), self.source.spec
        if not directory.is_dir():
            raise UserError(
                f"speculative = {self.config.speculative!r} must be none, ngram, or the directory of a draft head"
            )
        head = read_head(directory, spec.num_layers)
        check_head(head.config, spec.hidden_size, spec.vocab_size)
        one_pass = isinstance(head, BlockHead) or head.config.mask_token_id is not None
        if one_pass and self.config.speculative_tree_tokens:
            raise UserError(f"{directory} drafts in one pass, and no trees; speculative_tree_tokens must be 0")
        return head
