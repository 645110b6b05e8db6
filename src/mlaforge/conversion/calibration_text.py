"""The windows that layers are calibrated on, of one text or of several by equal shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from mlaforge.artifact import record_name
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus, overlap
from mlaforge.runtime import log
from mlaforge.synthesis.self_generated_text import SelfGenerationError, self_generated_text

# What a model is calibrated on that nothing is said of, and where it writes no text itself.
DEFAULT, WITHOUT_SELF = (corpus.SELF, corpus.EMBEDDED), (corpus.EMBEDDED,)

# Layers -> the windows that they are calibrated on.
Tuned = dict[tuple[int, ...], corpus.Windows]


def calibration_windows(
    source: SourceModel, converted: Sequence[int], config: ConvertConfig, judged: corpus.Windows | None
) -> Tuned:
    """The windows of every converted layer.

    Of calibration sets, layers with a sliding window take the one of short texts, all others that of long passages.
    The model is asked for text of its own that holds none of what is judged. Raises UserError where a text gives no
    window; a model that writes none does so only where it was asked for.
    """
    if config.calibration:
        return _windows(source, converted, config, config.calibration, judged)
    try:
        return _windows(source, converted, config, DEFAULT, judged)
    except SelfGenerationError as error:
        log(f"{error}; calibrating on the embedded English and Python (--calibration takes other text)")
        return _windows(source, converted, config, WITHOUT_SELF, judged)


def _windows(
    source: SourceModel, converted: Sequence[int], config: ConvertConfig, texts: Sequence[str],
    judged: corpus.Windows | None,
) -> Tuned:  # fmt: skip
    sets = {text: corpus.calibration_sets(text) for text in texts}
    kinds = {"": tuple(converted)}
    if any(sets.values()):
        sliding = tuple(i for i in converted if source.spec.layers[i].window is not None)
        kinds = {"full": tuple(i for i in converted if i not in sliding), "swa": sliding}
    return {
        layers: _mixed(source, [sets[text].get(kind, text) for text in texts], config, judged)
        for kind, layers in kinds.items() if layers
    }  # fmt: skip


def _mixed(
    source: SourceModel, texts: Sequence[str], config: ConvertConfig, judged: corpus.Windows | None
) -> corpus.Windows:
    """Windows of every text in turn; what one has too few of, the others after it make up for."""
    parts: list[corpus.Windows] = []
    missing = config.nsamples
    # The model's own text may be short.
    for left, text in zip(range(len(texts), 0, -1), sorted(texts, key=lambda text: text != corpus.SELF), strict=True):
        count = -(-missing // left)
        if not count:
            break
        if text == corpus.SELF:
            known = overlap.passages(judged) if judged else []
            own = self_generated_text(source, count * config.seqlen, config.seed, config.device, known)
            parts.append(own.windows(count, config.seqlen))
        else:
            parts.append(corpus.windows(source.tokenizer, text, count, config.seqlen, seed=config.seed))
        missing -= len(parts[-1].ids)
    rows = [part.ids[i] for i in range(max(len(part.ids) for part in parts)) for part in parts if i < len(part.ids)]
    # Of a single one the place is known, by which two sets are told apart.
    name = parts[0].source if len(parts) == 1 else ", ".join(record_name(part.source) for part in parts)
    return corpus.Windows(torch.stack(rows), name)


def passages(tuned: Tuned) -> list[int]:
    """What to remember of all windows that any layer is calibrated on."""
    return sorted({passage for windows in tuned.values() for passage in overlap.passages(windows)})


def named(texts: Iterable[str] | None) -> str:
    """The texts as a person calls them."""
    return ", ".join(texts or DEFAULT)


def described(tuned: Tuned) -> dict[str, Any]:
    """What the manifest records of the calibration text; of two sets, each by its name."""
    by_name = {Path(windows.source).stem: windows.describe() for windows in tuned.values()}
    return by_name if len(by_name) > 1 else next(iter(by_name.values()))
