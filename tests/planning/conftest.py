"""Models and a machine for plans."""

import pytest

from mlaforge.families import read_spec
from mlaforge.families.spec import ModelSpec
from mlaforge.planning.costs import Gpu
from mlaforge.planning.machines import decoding_cpu
from support.configs import GPT_OSS, LLAMA


@pytest.fixture
def gpt_oss() -> ModelSpec:
    return read_spec(GPT_OSS)


@pytest.fixture
def llama() -> ModelSpec:
    return read_spec(LLAMA)


@pytest.fixture
def cpu() -> Gpu:
    """Two cores with AMX, as measured in benchmarks/speed.json."""
    return decoding_cpu(1.198e12, 20.46e9, 23.5, 2)
