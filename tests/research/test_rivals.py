"""Rivals' rounding: levels and rotations as the literature has them, the engine's own int4, bytes, and a cache that
gives back what was rounded and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from mlaforge.checkpoint.loading import load_model
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.evaluation.divergence import comparisons
from mlaforge.ops.row_formats.int4 import Int4
from research import rivals

WINDOWS = torch.randint(0, 200, (2, 70), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tiny_models):
    return load_model(tiny_models["llama"], "float32")


@pytest.fixture(scope="module")
def layer(tiny_models):
    return SourceModel.open(tiny_models["llama"]).spec.layers[0]


def losses(model, rival):
    states = list(rivals.rounded_states(model, rival, WINDOWS)), model.lm_head.weight
    return torch.stack(comparisons(states, states, WINDOWS))[:, 0]


# J. Max, "Quantizing for minimum distortion" (1960): the positive levels, and the error.
@pytest.mark.parametrize(
    ("levels", "error"),
    [
        ([0.7980], 0.3634),
        ([0.4528, 1.510], 0.1175),
        ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
        ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
    ],
)
def test_lloyd_max_levels_of_a_gaussian(levels, error):
    at = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    density = torch.exp(-at.square() / 2)
    fitted = rivals.lloyd_max(density, at, len(levels).bit_length())
    torch.testing.assert_close(fitted[len(levels) :], torch.tensor(levels, dtype=at.dtype), rtol=0, atol=3e-3)
    torch.testing.assert_close(fitted, -fitted.flip(0), rtol=0, atol=1e-3)
    nearest = fitted[torch.bucketize(at, (fitted[1:] + fitted[:-1]) / 2)]
    assert float(((at - nearest).square() * density).sum() / density.sum()) == pytest.approx(error, rel=2e-3)


@pytest.mark.parametrize("size", [1, 2, 64])
def test_hadamard_is_orthogonal(size):
    matrix = rivals.hadamard(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))
    assert matrix.abs().unique().numel() == 1


@pytest.mark.parametrize(("bits", "error"), [(4, 0.0095), (3, 0.0345), (2, 0.1175)])
def test_rotated_errs_as_its_levels_do_whatever_the_vector(bits, error):
    """A few large channels, which a scale for all of a vector could not bear, cost no more than noise."""
    x = torch.randn(1, 3, 500, 64, generator=torch.Generator().manual_seed(1))
    outliers = x * torch.where(torch.arange(64) % 8 == 5, 100.0, 1.0)
    for numbers, least in ((x, 0.85), (outliers, 0.5)):
        read, _ = rivals.Rotated(bits).read(0, 0, numbers, numbers)
        assert least * error < (read - numbers).square().sum() / numbers.square().sum() < 1.1 * error


def test_blocks_of_four_bits_are_the_engines_int4():
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(1, 3, 32, 64, generator=generator) for _ in range(2))
    stored = Int4(3, 64)
    rows = stored.empty(1, torch.device("cpu"))
    row = torch.stack((keys, values), 1)[0].permute(2, 0, 1, 3).flatten(1)
    stored.write(rows, torch.tensor([0]), row)
    read = rivals.Blocks(4, group=64).read(0, 0, keys, values)
    read = torch.stack(read, 1)[0].permute(2, 0, 1, 3).flatten(1)
    assert torch.equal(read.bfloat16(), stored.read(rows, torch.tensor([0])))


def test_bytes_are_all_of_them(layer, model):
    import dataclasses

    llm = dataclasses.replace(layer, num_heads=9, num_kv_heads=3, head_dim=64)
    # As the engine counts its own int4 of 2048 tokens, in 30 layers (benchmarks/kv_cache.json).
    assert 30 * rivals.Blocks(4, group=64, exempt=0).bytes(llm, 2048) == 14_008_320
    # A token: six vectors of 64 numbers and a norm. Four tokens of 384 numbers in bf16 beside them.
    assert rivals.Rotated(3).bytes(llm, 2048) == 2044 * 6 * (24 + 2) + 4 * 768
    # 32 tokens: codes; of 192 key channels, and of each token's six groups of 32 values, a scale and a minimum.
    assert rivals.Blocks(2, exempt=0).bytes(llm, 33) == 2 * (2 * 32 * 192 // 4 + 192 * 4 + 32 * 6 * 4)
    # The codes, a norm of every value, and a norm for every width of a key: 3 bits; 8, 3 and 2 bits.
    widths = rivals.PairWidths(3, torch.tensor([[[1.0] * 8, [1e9] + [1.0] * 7]]))
    assert [len(w.unique()) for w in widths.widths[0]] == [1, 3]
    small = dataclasses.replace(layer, num_heads=2, num_kv_heads=2, head_dim=16)
    assert widths.bytes(small, 10) == 6 * (64 * 3 // 8 + 2 * (4 + 2)) + 4 * 128
    # Rows of 16 bytes, the smallest for these 32 keys and 32 values.
    code = rivals.PlainCode(4, model, rivals.plain_bases(model, WINDOWS), exempt=0)
    size = layer.cached * 4 / 8 * 64
    assert size - 64 * 2 <= code.bytes(layer, 64) <= size


class Exact:
    """Rounds nothing."""

    exempt, chunk = 0, None

    def read(self, index, first, keys, values):
        return keys, values


def test_a_cache_that_rounds_nothing_changes_nothing(model):
    plain = losses(model, None)
    torch.testing.assert_close(losses(model, Exact()), plain, rtol=0, atol=2e-5)
    chunked = Exact()
    chunked.chunk = 32
    torch.testing.assert_close(losses(model, chunked), plain, rtol=0, atol=2e-5)


def test_first_tokens_and_the_newest_block_are_read_as_they_are(model):
    class Zeros(Exact):
        exempt = 4

        def read(self, index, first, keys, values):
            assert first >= 4
            return torch.zeros_like(keys), torch.zeros_like(values)

    plain, rounded = losses(model, None), losses(model, Zeros())
    torch.testing.assert_close(rounded[:, :4], plain[:, :4], rtol=0, atol=2e-5)
    assert not torch.allclose(rounded[:, 4:], plain[:, 4:], atol=1e-3)
    newest = Zeros()
    newest.chunk = 32
    rounded = losses(model, newest)
    torch.testing.assert_close(rounded[:, :32], plain[:, :32], rtol=0, atol=2e-5)
    assert not torch.allclose(rounded[:, 32:], plain[:, 32:], atol=1e-3)


@pytest.mark.parametrize("form", ["blocks", "rotated", "plain code", "pair widths"])
def test_more_bits_lose_less(model, form):
    bases, energies = rivals.plain_bases(model, WINDOWS), rivals.pair_energies(model, WINDOWS)
    make = {
        "blocks": lambda bits: rivals.Blocks(bits, group=16), "rotated": rivals.Rotated,
        "plain code": lambda bits: rivals.PlainCode(bits, model, bases),
        "pair widths": lambda bits: rivals.PairWidths(bits, energies),
    }[form]  # fmt: skip
    plain = losses(model, None)
    # The rows of a code grow by 16 bytes, here 4 bits per element.
    steps = (4, 8, 12) if form == "plain code" else (3, 5, 7)
    lost = [float((losses(model, make(bits)) - plain).abs().mean()) for bits in steps]
    assert lost[0] > 2 * lost[1] > 4 * lost[2] > 0


def best_widths(energy, bits):
    """Widths of least error by exhaustive search."""
    choices = itertools.product(range(1, 9), repeat=len(energy))
    return min(
        (w for w in choices if sum(w) == bits * len(energy)),
        key=lambda w: sum(e * 4.0**-b for e, b in zip(energy, w, strict=True)),
    )


@pytest.mark.parametrize("bits", [2, 3])
def test_pair_widths_have_the_least_error(bits):
    """Greedy steps are optimal, because each further bit of a pair gains less than the one before."""
    for seed in range(5):
        energy = torch.randn(5, generator=torch.Generator().manual_seed(seed)).mul(2).exp()
        widths = rivals.pair_widths(energy, bits)
        assert tuple(widths.tolist()) == best_widths(energy.tolist(), bits)


def test_pair_energies_are_those_of_rotated_queries_and_keys(model, monkeypatch):
    """As attention reads them: query heads of a group counted together, first tokens left out."""
    from transformers.models.llama import modeling_llama

    rotated = []
    rope = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda *args, **more: rotated.append(rope(*args, **more)) or rotated[-1]
    )
    energies = rivals.pair_energies(model, WINDOWS[:1])
    for (q, k), energy in zip(rotated, energies, strict=True):
        q_pairs, k_pairs = (x[0, :, 4:].unflatten(-1, (2, -1)).square().mean((1, 2)) for x in (q, k))
        expected = q_pairs.unflatten(0, (len(k_pairs), -1)).mean(1) * k_pairs
        torch.testing.assert_close(energy.float(), expected, rtol=1e-4, atol=0)


def test_principal_components_are_those_of_keys_before_rope(model):
    """In a basis of all components, at many bits, what is read is what was cached."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(WINDOWS[:1], past_key_values=cache, use_cache=True)
    code = rivals.PlainCode(9, model, rivals.plain_bases(model, WINDOWS), exempt=0)
    k, v = cache.layers[1].keys[:, :, 4:], cache.layers[1].values[:, :, 4:]
    for read, exact in zip(code.read(1, 4, k, v), (k, v), strict=True):
        assert (read - exact).norm() / exact.norm() < 0.02
    # Positions matter: the same keys elsewhere are others before RoPE.
    assert not torch.allclose(code.read(1, 0, k, v)[0], code.read(1, 4, k, v)[0], atol=1e-3)
