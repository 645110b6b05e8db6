"""What `tune` measures on a GPU beside attention and experts: every candidate gives the reference's result, launches
look up the case's key, and a run on the simulated device writes entries for all ops."""

import dataclasses
import json

import pytest
import torch

from mlaforge.bench import kernels
from mlaforge.bench.gemm_shapes import Shape, Shapes
from mlaforge.ops import latent_attention_gpu, token_selection_triton, tuned, vector_product_triton
from mlaforge.ops.gpu_properties import GpuProperties
from mlaforge.tuning import gpu_cases, sweep, tune
from mlaforge.tuning.cases import Case, VectorProductCase, WrongResult, make_case
from mlaforge.tuning.config import TuneConfig
from mlaforge.tuning.gpu_cases import LatentCase, SelectionCase, case_of_launch
from support.paged_steps import need_interpreter

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    need_interpreter()
    monkeypatch.setattr(tuned, "_state", tuned._State())
    yield
    tuned.use([], CPU)


def latent_key(format="fp32", T=1, reading="dense"):
    return ("latent", 16, 64, 4, 2, format, T, 4, 128, reading)


@pytest.mark.parametrize(
    ("format", "T", "reading"),
    [("fp32", 1, "dense"), ("fp32", 2, "dense"), ("coded", 1, "dense"), ("fp32", 1, "sparse")],
)
def test_latent(format, T, reading):
    case = LatentCase(latent_key(format, T, reading), CPU, torch.float32, cold=0)
    default, *rest = case.candidates()
    assert default == {} and len(rest) > 8 and len({tuple(one.items()) for one in rest}) == len(rest)
    for configuration in (default, rest[0], rest[-1]):
        # On a CPU a candidate may not change the result to the bit, which these do within rounding.
        out, expected = case._with(configuration, case.result), case.expected()
        assert float((out.float() - expected).norm() / expected.norm()) < 1e-2
    assert {key for op, key in tuned.seen() if op == "latent"} == {case.key}
    assert case.seconds(rest[0]) > 0


@pytest.mark.parametrize("key", [(4, 16, 4, 512), (6, 32, 1, 64)])
def test_selections(key, monkeypatch):
    case = SelectionCase(key, CPU, torch.float32, cold=0)
    assert case.candidates() == [{}, *({"stretch": one} for one in token_selection_triton.STRETCHES)]
    assert max(map(case.error, case.candidates())) < 1e-2
    assert {key for op, key in tuned.seen() if op == "selection"} == {case.key}
    assert case.seconds({}) > 0
    wrong = case.expected().flip(0)
    monkeypatch.setattr(case, "expected", lambda: wrong)
    with pytest.raises(WrongResult, match=r"selection .* elements differ"):
        case.error({})


def test_keys_of_launches_have_cases(monkeypatch):
    monkeypatch.setattr(gpu_cases.kernels, "COLD", 0)
    assert case_of_launch("latent", latent_key("int8"), CPU) is None
    assert isinstance(case_of_launch("latent", latent_key("bf16"), CPU), LatentCase)
    assert isinstance(case_of_launch("selection", (4, 16, 1, 64), CPU), SelectionCase)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_candidates_of_latent_fit_into_shared_memory(capability):
    gpu = GpuProperties.of_capability(*capability, multiprocessors=100)
    for rows, G, D, K, item in ((8 * 32768, 8, 64, 832, 2), (1024, 8, 64, 896, 1), (8192, 8, 128, 1024, 1)):
        candidates = latent_attention_gpu.candidates(rows, G, D, K, item, gpu)
        usual = latent_attention_gpu.logit_tiles(rows, G, D // 2, item, gpu)
        assert (usual.rows, usual.warps, usual.stages) in {
            (one["rows"], one["num_warps"], one["num_stages"]) for one in candidates
        }
        for one in candidates:
            tiles = usual.tuned(one)
            assert tiles.stages * tiles.step * (tiles.rows + tiles.heads * D) * item < gpu.shared_memory


def test_products_of_a_few_rows(cuda):
    """On the simulated device, whose default is F.linear."""
    shape = Shape("qkv", 3, 40, 300, "float16", "cuda")
    case = make_case(shape)
    assert isinstance(case, VectorProductCase) and ("vector_product", case.key) == shape.key
    default, *rest = case.candidates()
    assert default == {} and {one["splits"] for one in rest} == {1, 2}
    for configuration in (default, rest[0], rest[-1]):
        cuda.kernels.clear()
        assert case.error(configuration) < 2**-7
        assert ("vector_product_kernel" in cuda.kernels) == bool(configuration)
        assert ("split_sum_kernel" in cuda.kernels) == (configuration.get("splits", 1) > 1)
    assert vector_product_triton.candidates(64) == [{"splits": 1, "BLOCK_O": size} for size in (16, 32, 64)]


def test_a_sweep_on_a_gpu_is_of_all_kernels(cuda, monkeypatch):
    monkeypatch.setattr(kernels, "LAYOUTS", {"tiny": kernels.Layout(4, 2, 16)})
    monkeypatch.setattr(sweep, "STEPS", ((1, 64, 1, False), (2, 32, 1, True)))
    monkeypatch.setattr(sweep, "LAUNCHES", (("latent", latent_key("coded")), ("selection", (4, 16, 4, 64))))
    cases = list(sweep._cases(torch.device("cuda:0"), small=True))
    assert {case.op for case, _ in cases} == {"vector_product", "experts", "attention", "latent", "selection"}
    assert all(cost.bytes > 0 and cost.flops > 0 and case.candidates()[0] == {} for case, cost in cases)


class Planted(Case):
    """A candidate takes half of the default's time, another one even less, with a wrong result."""

    def __init__(self, op, key):
        self.op, self.key = op, key

    def candidates(self):
        return [{}, {"num_warps": 4}, {"num_warps": 8}]

    def result(self):
        return torch.ones(1)

    expected = result

    def run(self):
        return 1

    def error(self, configuration, expected=None):
        if configuration == {"num_warps": 4}:
            raise WrongResult("num_warps 4")
        return 0.0

    def seconds(self, configuration):
        return {8: 1.0, 4: 0.5}.get(configuration.get("num_warps"), 2.0)


def test_a_run_on_a_gpu_covers_all_kernels(cuda, tmp_path, monkeypatch):
    """The launches that this process has made, longer ones of the same sizes, and the products of a file; a second run
    measures none of them again."""
    monkeypatch.setattr(tune, "case_of_launch", lambda op, key, device: Planted(op, key))
    gqa = tuned.attention_key("gqa", 16, 16, 4, 2, "bfloat16", 1, 1, 64, False)
    launched = [("attention", gqa), ("latent", latent_key("coded")), ("selection", (4, 16, 4, 64))]
    for op, key in launched:
        tuned.config(op, key)
    shapes, file, table = Shapes(), tmp_path / "gemm_shapes.json", tmp_path / "table.json"
    few = Shape("qkv", 3, 40, 300, "bfloat16", "cuda")
    for shape in (few, dataclasses.replace(few, M=64), dataclasses.replace(few, dtype="float32")):
        shapes.add(shape, 3, 1.0)
    shapes.write(file)
    config = TuneConfig(shapes=str(file), device="cuda", share=1.0)
    tuning = tune.run(None, config, table, lambda shape: Planted(*shape.key))
    measured = {(row["op"], row["key"]) for row in tuning.rows}
    assert len(measured) == len(tuning.rows) == 3 * (1 + len(tune.LONG_STEPS)) + 1
    entries = json.loads(table.read_text())
    assert entries.keys() == {"_metadata", "attention", "latent", "selection", "vector_product"}
    assert all(entries[op][key]["configuration"] == {"num_warps": 8} for op, key in measured)
    assert list(entries["vector_product"]) == ["bfloat16,40,300"]
    tuned.load(torch.device("cuda:0"), str(table))
    longer = [("attention", (*gqa[:6], 1, 1, 32768, "dense")), ("selection", (4, 16, 4, 8192)), few.key]
    assert all(tuned.config(op, key) == {"num_warps": 8} for op, key in (*launched, *longer))
    again = tune.run(None, config, table, lambda shape: Planted(*shape.key))
    assert not again.rows and again.resumed == len(tuning.rows)
    tuned.load(torch.device("cuda:0"), str(table))
    # Other buckets of the same sizes have the default: no miss.
    assert tuned.config("latent", (*latent_key("coded")[:6], 8, 16, 1024, "dense")) is None and not tuned.missing()
