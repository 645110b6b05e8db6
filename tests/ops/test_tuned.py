"""Tables of tuned kernels: which entry a call takes, why a table is refused, and that no result changes."""

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge import runtime
from mlaforge.ops import native, tuned
from mlaforge.ops.rounded_weights import packed4, packed8

CPU = torch.device("cpu")
ENTRY = {"configuration": {"ahead": 1024, "task": 64}, "us": 1.0, "default_us": 2.0, "error": 0.0, "date": "2026-01-01"}
SHAPE = tuned.product_key("bfloat16", 96, 64, 1)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A function that writes a table; afterwards this process uses none."""
    monkeypatch.setenv("MLAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLAFORGE_TUNED", raising=False)
    monkeypatch.setattr(tuned, "PACKAGED", tmp_path / "packaged")
    monkeypatch.setattr(tuned, "_state", tuned._State())

    def write(path=None, entries=None, **changes):
        facts = copy.deepcopy(tuned.metadata(CPU)) | changes
        path = path or tmp_path / "table.json"
        tuned.save(path, facts, {"product": {tuned.text(SHAPE): ENTRY}} if entries is None else entries)
        return path

    yield write
    tuned.use([], CPU)


def outcomes(op):
    return dict(tuned.counts().get(op, {}))


def test_an_entry_is_a_hit_and_a_shape_without_one_a_miss(tables):
    tuned.load(CPU)
    assert tuned.config("product", SHAPE) is None and not tuned.is_tuned("product")
    tuned.load(CPU, str(tables()))
    other = tuned.product_key("bfloat16", 96, 64, 2)
    assert tuned.config("product", SHAPE) == ENTRY["configuration"]
    assert tuned.config("product", other) is None and tuned.config("attention", other) is None
    assert tuned.missing() == {("product", tuned.text(other)): 1}
    assert outcomes("attention") == {"default": 1}


def test_the_file_goes_before_the_cache_and_the_cache_before_the_package(tables, monkeypatch):
    facts = tuned.metadata(CPU)
    places = [tuned.PACKAGED / tuned.file_name(facts), tuned.cache_file(facts), tables()]
    hashes = set()
    for ahead, path in enumerate(places, start=1):
        entry = ENTRY | {"configuration": {"ahead": ahead}}
        tables(path, {"product": {tuned.text(SHAPE): entry}})
        monkeypatch.setenv("MLAFORGE_TUNED", str(path) if path == places[-1] else "")
        tuned.load(CPU)
        assert tuned.config("product", SHAPE) == {"ahead": ahead}
        hashes.add(tuned.identity()["hash"])
    assert len(hashes) == 3
    tuned.load(CPU, "none")
    assert tuned.identity() == {"hash": None, "entries": 0, "files": []}


def test_a_table_is_logged_once(tables, capfd):
    path = tables()
    for _ in range(2):
        tuned.load(CPU, str(path))
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"tuned kernels: 1 entries for {runtime.processor_name()} ({path})"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "Another CPU"}, "was tuned for device Another CPU"),
        ({"threads": 96}, "was tuned for threads 96"),
        ({"sources": {}}, "is damaged"),
    ],
)
def test_another_machines_table_is_refused(tables, capfd, changes, reason):
    path = tables(**changes)
    with pytest.raises(runtime.UserError, match=reason):
        tuned.load(CPU, str(path))
    cached = tuned.cache_file(tuned.metadata(CPU))
    tables(cached, **changes)
    tuned.load(CPU)
    assert reason in capfd.readouterr().err and not tuned.is_tuned("product")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"_metadata": {}, "product": {}}'])
def test_a_damaged_file_is_refused(tables, tmp_path, content):
    path = tmp_path / "damaged.json"
    path.write_text(content)
    with pytest.raises(runtime.UserError, match="damaged"):
        tuned.load(CPU, str(path))
    with pytest.raises(runtime.UserError, match="cannot be read"):
        tuned.load(CPU, str(tmp_path / "nothing.json"))


def test_a_configuration_of_words_is_refused(tables):
    for wrong in ("many", -1, True):
        path = tables(entries={"product": {tuned.text(SHAPE): ENTRY | {"configuration": {"ahead": wrong}}}})
        with pytest.raises(runtime.UserError, match="damaged: product"):
            tuned.load(CPU, str(path))
    for key in ("bfloat16,96,64", "fp7,96,64,1", "bfloat16,96,sixty,1"):
        with pytest.raises(runtime.UserError, match="damaged"):
            tuned.load(CPU, str(tables(entries={"product": {key: ENTRY}})))


def test_entries_of_another_source_are_misses(tables):
    sources = {**tuned.sources("cpu"), "product": "0" * 16}
    tuned.load(CPU, str(tables(sources=sources)))
    assert tuned.config("product", SHAPE) is None
    assert list(tuned.missing()) == [("product", tuned.text(SHAPE))]


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_buckets_grow_with_what_they_count(small, large):
    small, large = sorted((small, large))
    for bucket in (tuned.rows_bucket, tuned.sequences_bucket, tuned.span_bucket):
        assert bucket(small) <= bucket(large)
    assert large <= tuned.span_bucket(large) < 2 * large
    assert tuned.rows_bucket(large) == 128 or large <= tuned.rows_bucket(large) <= 16


def products(N):
    """Calls of the compiled products on N rows with 96 outputs and 64 inputs, and what they return."""
    torch.manual_seed(0)
    x, weight = torch.randn(N, 64).bfloat16(), torch.randn(96, 64)
    linear, eight, four = (native.kernel(name) for name in ("linear", "linear_int8", "linear_int4"))
    return {
        "bfloat16": lambda: linear(x, native.pack(weight), 96, None, None),
        "int8": lambda: eight(x, *packed8(weight), 96, None, None),
        "int4": lambda: four(x, *packed4(weight), 96, None, None),
    }


@pytest.mark.skipif(native.why_not() is not None, reason="needs compiled kernels")
@pytest.mark.parametrize("N", [1, 7, 40])
def test_compiled_products_take_their_entry_and_give_the_same_result(tables, N):
    tuned.use([], CPU)
    expected = {format: run() for format, run in products(N).items()}
    for configuration in (
        {},
        {"ahead": 1 << 20},
        {"panel": 1},
        {"task": 4096},
        {"ahead": 64, "panel": 999, "task": 17},
    ):
        keys = [tuned.text(tuned.product_key(format, 96, 64, N)) for format in expected]
        path = tables(entries={"product": {key: ENTRY | {"configuration": configuration} for key in keys}})
        tuned.load(CPU, str(path))
        for format, run in products(N).items():
            assert torch.equal(run(), expected[format]), (format, configuration)
        assert outcomes("product") == {"hit": 3, "miss": 0}
    # Without its entry, a call counts as a miss.
    path = tables(entries={"product": dict.fromkeys(keys[1:], ENTRY)})
    tuned.load(CPU, str(path))
    products(N)["bfloat16"]()
    assert outcomes("product") == {"hit": 0, "miss": 1}


@pytest.mark.skipif(native.why_not() is not None, reason="needs compiled kernels")
def test_compiled_experts_take_their_entry_and_give_the_same_result(tables):
    E, K, C, I, N = 4, 2, 64, 96, 3  # noqa: E741
    torch.manual_seed(0)
    shapes = [(E, 2 * I, C // 32, 16), (E, 2 * I, C // 32), (E, 2 * I), (E, C, I // 32, 16), (E, C, I // 32), (E, C)]
    up, up_scales, up_bias, down, down_scales, down_bias = (
        torch.randn(shape) if len(shape) == 2 else torch.randint(119, 127, shape, dtype=torch.uint8) for shape in shapes
    )
    ids, weights = torch.rand(N, E).topk(K).indices, torch.rand(N, K)
    x = torch.randn(N, C).bfloat16()

    def run():
        kernel = native.kernel("mixture_mxfp4")
        return kernel(x, ids, weights, up, up_scales, up_bias, down, down_scales, down_bias, 1.7, 7.0)

    tuned.use([], CPU)
    expected = run()
    for task in (1, 16, 60, 4096):
        key = tuned.text(tuned.experts_key(E, K, C, I, N))
        tuned.load(CPU, str(tables(entries={"experts": {key: ENTRY | {"configuration": {"task": task}}}})))
        assert torch.equal(run(), expected), task
        assert outcomes("experts") == {"hit": 1, "miss": 0}


def test_a_table_is_a_line_for_each_entry(tables):
    lines = tables().read_text().splitlines()
    assert sum('"configuration"' in line for line in lines) == 1
    assert json.loads("\n".join(lines))["_metadata"]["threads"] == torch.get_num_threads()
