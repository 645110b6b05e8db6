"""stub until ops is merged"""

from mlaforge.ops.paged_attention_cpu import paged_attention_runs

paged_attention = paged_attention_runs
