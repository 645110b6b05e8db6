"""MiMo-7B: qwen2 with additional layers that draft further tokens.

The code of XiaomiMiMo/MiMo-7B subclasses qwen2's model and never calls `mtp_layers` from its forward. transformers has
no class for it: qwen2's computes the model, and the drafting layers are left out.
"""

from __future__ import annotations

from mlaforge.families.family import Family
from mlaforge.families.qwen2 import DEFAULTS, read_spec

FAMILY = Family("mimo", read_spec, computed_by="qwen2", left_out=("model.mtp_layers.",), defaults=DEFAULTS)
