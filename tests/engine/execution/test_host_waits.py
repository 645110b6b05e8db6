"""A decode step waits for the device once, for its tokens. Waits of every layout's layers: test_kernel_count.py."""

import pytest
import torch

from mlaforge.bench.host_waits import count_host_waits
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.sampling.params import SamplingParams

# The simulated device is slow.
SLOW = () if torch.cuda.is_available() else pytest.mark.slow
# The second is longer than what sparse layers read.
PROMPTS = ([*range(3, 12)], [*range(60, 90)])


def waits_of_decoding(model, steps=2, **options):
    """Lines at which a decode step waited, and those where the simulated device would."""
    config = {"device": "cuda", "dtype": "float32", "cache_bytes": 1 << 22, "block_size": 16, "max_model_len": 128}
    engine = Engine(model, EngineConfig(**config, **options))
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    while not all(sequence.decoding for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    # Captures, where the layout has graphs.
    engine.step()
    with count_host_waits(engine.device) as waits:
        for _ in range(steps):
            engine.step()
    return waits.lines


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("layout", ["gqa", *(pytest.param(x, marks=SLOW) for x in ("latent_rope", "latent", "coded"))])
def test_a_dense_decode_step_waits_once(layout, tiny_models, converted):
    options = {"bits": 6} if layout == "coded" else {}
    model = (
        tiny_models["llama"] if layout == "gqa" else converted("llama", layout if not options else "latent", **options)
    )
    lines = waits_of_decoding(model)
    assert [line.partition(":")[0] for line in lines] == ["engine/speculation/verification.py"] * 2, lines


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("layout", ["gqa", *(pytest.param(x, marks=SLOW) for x in ("latent", "latent_rope", "coded"))])
def test_a_sparse_decode_step_waits_once(layout, sparse):
    lines = waits_of_decoding(sparse("llama", layout, topk=24))
    assert [line.partition(":")[0] for line in lines] == ["engine/speculation/verification.py"] * 2, lines
