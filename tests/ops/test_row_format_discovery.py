"""A new row format is one Python file: registry, planning, cache, reference attention and engine take it as it is. With
compiled kernels it is also one header (test_new_row_format.py)."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.engine.cache.kv_cache import Cache, group_bytes, layer_caches
from mlaforge.engine.cache.view import make_views
from mlaforge.families import read_spec
from mlaforge.ops import packed_attention as op
from mlaforge.ops import row_formats
from mlaforge.ops.paged_attention import paged_attention
from mlaforge.planning.plan import LayerPlan, Plan, unconverted
from support.configs import LLAMA

FORMAT = '''"""8-bit rows whose groups share an exponent: the exponents of all groups, then the mantissas."""

import dataclasses
from typing import ClassVar

from mlaforge.ops.row_formats.format import RowFormat, as_bytes, consecutive


@dataclasses.dataclass(frozen=True)
class SharedExponent(RowFormat):
    group_sizes: tuple[int, ...]

    id: ClassVar = 90
    names: ClassVar = ("shared_exponent",)

    @classmethod
    def make(cls, name, group_sizes, counts):
        return cls(group_sizes)

    @property
    def sizes(self):
        return self.group_sizes

    @property
    def width(self):
        return sum(self.group_sizes)

    @property
    def parts(self):
        return consecutive(("exponents", 8, len(self.group_sizes)), ("mantissas", 8, self.width))

    def write(self, rows_UB, units_U, row_NW):
        import torch

        groups = row_NW.float().split(self.group_sizes, dim=1)
        exponents = torch.stack([group.abs().amax(1).frexp().exponent for group in groups], dim=1).to(torch.int8)
        mantissas = [
            (group * 2.0 ** (7.0 - exponents[:, i : i + 1])).round().clamp(-127, 127) for i, group in enumerate(groups)
        ]
        packed = torch.cat((as_bytes(exponents), as_bytes(torch.cat(mantissas, dim=1).to(torch.int8))), dim=1)
        rows_UB.index_copy_(0, units_U, packed)

    def read(self, rows_UB, units_U):
        import torch

        exponents, mantissas = (rows_UB[units_U][:, part.range].view(torch.int8).float() for part in self.parts)
        sizes = torch.tensor(self.group_sizes, device=rows_UB.device)
        return (mantissas * 2.0 ** (exponents - 7).repeat_interleave(sizes, dim=1)).bfloat16()
'''
NAME, CPU, SIZE = "shared_exponent", torch.device("cpu"), 16
SPEC = read_spec(LLAMA)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats" / "shared_exponent.py").write_text(FORMAT)
    return tmp_path / "formats"


@pytest.fixture
def registry(folder, monkeypatch):
    """The package of formats with one more file."""
    monkeypatch.setattr(row_formats, "__path__", [*row_formats.__path__, str(folder)])
    row_formats.row_format_types.cache_clear()
    yield
    row_formats.row_format_types.cache_clear()
    sys.modules.pop("mlaforge.ops.row_formats.shared_exponent", None)


def mixed():
    """A plan with layers of every layout, and the config of such a model."""
    layers = [LayerPlan("gqa")] * SPEC.num_layers
    layers[1], layers[2] = LayerPlan("latent", 40), LayerPlan("latent_rope", 32, 8)
    config = SimpleNamespace(
        mla_layer_types=[layer.layout for layer in layers], qk_rope_head_dim=8,
        mla_kv_lora_ranks=[layer.kv_lora_rank for layer in layers],
    )  # fmt: skip
    return Plan(SPEC, tuple(layers), NAME), config


def test_the_format_has_its_names_and_bytes(registry):
    assert row_formats.format_names()[-1] == NAME
    format = row_formats.row_format(NAME, (16,) * 4)
    assert format.descriptor == [90, 16, 16, 16, 16] and format.bytes(3) == 3 * 68
    rows = format.empty(4, CPU)
    row = torch.randn(2, 64)
    format.write(rows, torch.tensor([3, 1]), row)
    torch.testing.assert_close(format.read(rows, torch.tensor([3, 1])).float(), row, atol=2**-5, rtol=2**-8)


def test_planned_bytes_are_the_allocated_ones(registry):
    plan, config = mixed()
    layers, windows = layer_caches(SPEC, config, torch.float32, NAME)
    assert {type(layer.format).__name__ for layer in layers} == {"SharedExponent"}
    groups = [CacheGroup("full", 3, window) for window in windows]
    cache = Cache(layers, groups, SIZE, torch.float32, CPU)
    assert cache.bytes == plan.cache_bytes(3 * SIZE) == group_bytes(layers, groups, SIZE)
    assert plan.model_fraction(SIZE) < 1 < unconverted(SPEC, NAME).bits / 8 < 1.1


def test_attention_reads_the_rows(registry):
    (layer, *_), windows = layer_caches(SPEC, SimpleNamespace(), torch.float32, NAME)
    cache = Cache([layer], [CacheGroup("full", 3, windows[0])], SIZE, torch.float32, CPU)
    tables = SimpleNamespace(block_size=SIZE, groups=cache.groups, table=lambda seq, group: (0, [2, 0]))
    (view,) = make_views([(0, 0, 20)], tables, CPU)
    H, G, D = SPEC.layers[0].num_heads, SPEC.layers[0].num_kv_heads, SPEC.layers[0].head_dim
    (rows,), row, q = cache.rows, torch.randn(20, layer.width), torch.randn(20, H, D)
    rows.packed.fill_(255)
    rows.write(view.slots_N, row)
    decoded = rows.format.read(rows.packed, torch.arange(3 * SIZE)).float()
    assert not torch.equal(decoded[view.slots_N], row)
    expected = paged_attention(q, *decoded.view(-1, 2, G, D).unbind(1), view, 0.3)
    torch.testing.assert_close(op.packed_attention(q, rows, view, 0.3), expected)


ENGINE = f"""
import sys
import mlaforge.ops.row_formats as row_formats
row_formats.__path__.append(sys.argv[1])

from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.planning.config import PlanConfig
from mlaforge.planning.report import run

for model in sys.argv[2:]:
    report = run(model, PlanConfig(kv_cache_dtype="{NAME}", gpu="h100"))
    tokens = {{}}
    for stored in ("{NAME}", "int8"):
        llm = LLM(model, kv_cache_dtype=stored, dtype="float32", device="cpu", cache_bytes=1 << 20)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        tokens[stored] = llm.generate([list(range(2, 60))], params)[0].outputs[0].token_ids
        names = {{layer.format.name for layer in llm.engine.cache.layers}}
        assert names == {{stored}}, names
    assert report.requested.plan.stored == "{NAME}" and len(tokens["{NAME}"]) == 8
"""


def test_options_and_engine_take_the_format(folder, tiny_models, converted):
    models = tiny_models["llama"], converted("llama", "latent_rope", budget=0.75)
    completed = subprocess.run(
        [sys.executable, "-c", ENGINE, str(folder), *map(str, models)], capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
