"""MiMo-7B: qwen2 in all that its logits depend on, and layers beside it that draft further tokens.

XiaomiMiMo/MiMo-7B's own code subclasses qwen2's model and never calls `mtp_layers` from its forward. transformers has
no class of its own for it, so that qwen2's computes it and the drafting layers are left out.
"""

from __future__ import annotations

from mlaforge.families.family import Family
from mlaforge.families.qwen2 import DEFAULTS, read_spec

FAMILY = Family("mimo", read_spec, computed_by="qwen2", left_out=("model.mtp_layers.",), defaults=DEFAULTS)
