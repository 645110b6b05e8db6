"""`draft import`: convert a head written by another tool into the format of `read_head`; block heads in
drafting/import_block.py.

Differences between tools are resolved from the tensors and the target, never guessed:

names           `layers.0.*` for `midlayer.*`, both with or without the prefix `model.`
layer           fields in `transformer_layer_config`, as written by `speculators`, or at the top level
sizes           missing fields of config.json (vocabularies, head_dim, biases, norms before fc) follow from shapes
d2t             offsets, or target ids in any order, as in the frequency maps of FR-Spec; the rows of lm_head are then
                sorted by target id. It is an error if both readings are possible
t2d             derived from d2t if missing, else checked
lm_head         the target's rows if missing
embed_tokens    dropped if equal to the target's
int8            stays int8 (checkpoint/head_reader.py)

Legend: V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import Manifest, finished, writing
from mlaforge.checkpoint.draft_head import DraftHead, write_head
from mlaforge.checkpoint.eagle3 import (
    ARCHITECTURE,
    CONVENTIONS,
    VOCABULARY,
    buffers,
    check_head,
    head_config,
    target_ids,
)
from mlaforge.checkpoint.head_reader import HeadReader, dequantize, quantize
from mlaforge.checkpoint.reader import Reader
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.drafting import import_block
from mlaforge.drafting.config import DraftImportConfig
from mlaforge.modeling.eagle3 import Eagle3Head
from mlaforge.runtime import UserError, log, timed

EMBEDDING, HEAD, QUERY = "embed_tokens.weight", "lm_head.weight", "midlayer.self_attn.q_proj."
GATE = "midlayer.mlp.gate_proj.weight"
# Key of the layer's fields in configs of the library `speculators`.
NESTED = "transformer_layer_config"


def run(src: str, out: Path, target: str, config: DraftImportConfig, overwrite: bool = False) -> Manifest:
    """Convert the head `src` for the model `target` into the new directory `out`.

    Raises UserError if it is not an EAGLE-3 head of this model, or is ambiguous.
    """
    source, model = SourceModel.open(src), SourceModel.open(target)
    manifest = Manifest(
        "draft import",
        config=dataclasses.asdict(config),
        inputs={"head": source.record, "target": model.record},
    )
    if previous := finished(out, manifest, overwrite, (source.path, model.path)):
        return previous
    with timed(manifest.seconds, "import"), HeadReader(source.path) as reader, Reader(model.path) as target_reader:
        head: DraftHead
        if import_block.is_block_head(source):
            head, dtype, manifest.metrics = import_block.convert_head(source, reader, model, target_reader)
        else:
            head, dtype, manifest.metrics = _Import(source, reader, model, target_reader, config).head()
        with writing(out, manifest) as partial:
            write_head(head, partial, dtype)
    return manifest


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the layer's fields at the top level, and defaults as in vLLM's reader of `speculators`
    (vllm/transformers_utils/configs/speculators/algos.py)."""
    layer = config.get(NESTED)
    if layer is None:
        return config
    if not isinstance(layer, dict):
        raise UserError(f"config.json: {NESTED} must be an object")
    others = {name: value for name, value in config.items() if name != NESTED}
    return {"norm_before_residual": True, **{k: v for k, v in layer.items() if k != "architectures"}, **others}


class _Import:
    """The import of one head. stored: our name of a tensor -> its name in the file."""

    def __init__(
        self, source: SourceModel, reader: HeadReader, model: SourceModel, target_reader: Reader,
        config: DraftImportConfig,
    ):  # fmt: skip
        self.source, self.reader, self.target_reader, self.config = source, reader, target_reader, config
        self.spec = model.spec
        self.stored: dict[str, str] = {}
        for name in reader.weights:
            our_name = name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
            if our_name in self.stored:
                raise UserError(f"{source} has both {self.stored[our_name]!r} and {name!r}, two names of one tensor")
            self.stored[our_name] = name
        if "fc.weight" not in self.stored:
            raise UserError(f"{source} is not an EAGLE-3 head: it has no tensor 'fc.weight'")

    def head(self) -> tuple[Eagle3Head, torch.dtype, dict[str, Any]]:
        """Return the head, its stored dtype, and the manifest's metrics."""
        dtype = torch.int8 if self.reader.quantized else self._tensor("fc.weight").dtype
        embedding = self._tensor(EMBEDDING) if EMBEDDING in self.stored else None
        if embedding is not None and self._is_the_targets(embedding):
            log("embed_tokens equals the target's and is dropped")
            embedding = None
        settings = self._config()
        config = head_config(self.source.path, settings, self.spec.num_layers, embedding is not None)
        check_head(config, self.spec.hidden_size, self.spec.vocab_size)
        reading, ids_V = self._vocabulary()
        with torch.device("meta"):
            head = Eagle3Head(config)
        state = self._state(head, ids_V)
        if embedding is not None:
            state[EMBEDDING] = embedding
        head.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()}, assign=True)
        metrics = {
            "d2t": reading,
            "sorted": bool((ids_V.diff() < 0).any()),
            "draft_vocab_size": len(ids_V),
            "boundaries": list(config.boundaries),
            "convention": settings["eagle_config"]["eagle_aux_hidden_state_convention"],
            "lm_head": "its own" if HEAD in self.stored else "the target's",
            "embed_tokens": "its own" if embedding is not None else "the target's",
        }
        return head, dtype, metrics

    def _tensor(self, our_name: str) -> Tensor:
        return self.reader[self.stored[our_name]]

    def _rows(self, our_name: str) -> int:
        return self.reader.shape(self.stored[our_name])[0]

    def _is_the_targets(self, embedding: Tensor) -> bool:
        if embedding.shape != self.target_reader.shape(f"model.{EMBEDDING}"):
            return False
        expected = self.target_reader[f"model.{EMBEDDING}"]
        expected = dequantize(*quantize(expected)) if self.reader.quantized else expected.to(embedding.dtype)
        return torch.equal(embedding, expected)

    def _vocabulary(self) -> tuple[str | None, Tensor]:
        """Return how d2t was read (None without one), and the target id of every row of the file's lm_head, [V]."""
        vocabulary = self.spec.vocab_size
        if "d2t" not in self.stored:
            rows = self._rows(HEAD) if HEAD in self.stored else vocabulary
            if rows != vocabulary:
                raise UserError(
                    f"{self.source}: lm_head has {rows} rows, the target {vocabulary} tokens, and there is no d2t to "
                    "map them"
                )
            return None, torch.arange(vocabulary)
        t2d = self._tensor("t2d").bool() if "t2d" in self.stored else None
        try:
            return target_ids(self._tensor("d2t"), t2d, vocabulary, self.config.d2t)
        except UserError as error:
            raise UserError(f"{self.source}: {error}") from error

    def _config(self) -> dict[str, Any]:
        """Return config.json with missing fields derived from shapes."""
        settings = _flat(self.source.config)
        named = " ".join(map(str, settings.get("architectures") or ()))
        if "eagle3" not in named.lower():
            raise UserError(
                f"{self.source} is not an EAGLE-3 head: its architectures is {named!r}, not {ARCHITECTURE!r}"
            )
        if (layers := settings.get("num_hidden_layers", 1)) != 1:
            raise UserError(f"{self.source}: num_hidden_layers = {layers}; only heads with 1 layer are supported")
        for name in ("num_attention_heads", "rms_norm_eps"):
            if settings.get(name) is None:
                raise UserError(
                    f"{self.source}: config.json has no {name!r}, and it cannot be derived from tensors; add it"
                )
        derived: dict[str, Any] = {
            "vocab_size": self.spec.vocab_size,
            "target_hidden_size": self.spec.hidden_size,
            "attention_bias": f"{QUERY}bias" in self.stored,
            "hidden_size": self._rows("fc.weight"),
        }
        if GATE in self.stored:
            derived["intermediate_size"] = self._rows(GATE)
        heads = settings.get("num_attention_heads")
        if isinstance(heads, int) and heads > 0 and f"{QUERY}weight" in self.stored:
            derived["head_dim"] = self._rows(f"{QUERY}weight") // heads
        missing = {name: value for name, value in derived.items() if settings.get(name) is None}
        eagle = {**settings, **(settings.get("eagle_config") or {})}
        # Decided by the tensors alone, whatever config.json has.
        eagle |= {"norm_before_fc": "input_norm.weight" in self.stored, "fc_norm": "fc_norm.0.weight" in self.stored}
        convention = self.config.convention or eagle.get("eagle_aux_hidden_state_convention") or CONVENTIONS[0]
        eagle["eagle_aux_hidden_state_convention"] = convention
        size = next((self._rows(name) for name in ("d2t", HEAD) if name in self.stored), self.spec.vocab_size)
        return {**settings, **missing, "draft_vocab_size": size, "eagle_config": eagle}

    def _state(self, head: Eagle3Head, ids_V: Tensor) -> dict[str, Tensor]:
        """Return all tensors but the embedding, the rows of lm_head sorted by target id. Raises UserError for missing,
        extra and wrongly shaped tensors."""
        resolved = {"d2t", "t2d", EMBEDDING}
        shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items() if name not in resolved}
        if HEAD not in self.stored:
            del shapes[HEAD]
        expected = {self.stored.get(name, name): shape for name, shape in shapes.items()}
        expected |= {
            self.stored[name]: self.reader.shape(self.stored[name]) for name in resolved if name in self.stored
        }
        # Some tools write t2d as floating-point numbers.
        maps = {self.stored[name] for name in VOCABULARY if name in self.stored}
        self.reader.check(expected, whole=frozenset(n for n in maps if not self.reader.dtype(n).is_floating_point))
        state = {name: self._tensor(name) for name in shapes}
        order = ids_V.argsort()
        if HEAD in state:
            state[HEAD] = state[HEAD][order]
        else:
            tied = HEAD not in self.target_reader
            state[HEAD] = self.target_reader[f"model.{EMBEDDING}" if tied else HEAD][ids_V[order]]
        return state | buffers(head.config, ids_V[order])
