"""Rotations of a step's tokens equal those of the model's rotary module, whatever was looked up before."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mlaforge.engine.execution.rotary_embedding import INITIAL_POSITIONS, RotaryEmbedding

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e4}, YARN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_table_equals_rotary_module(rope, dtype):
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=rope)
    rotary = LlamaRotaryEmbedding(config)
    angles = RotaryEmbedding(rotary, 16, dtype)
    assert angles(torch.empty(0, dtype=torch.int64), 0).shape == (0, 1, 8)
    for positions in (
        [0, 5, 3],
        [INITIAL_POSITIONS - 1],
        [INITIAL_POSITIONS, 7],
        [3 * INITIAL_POSITIONS + 1, 3 * INITIAL_POSITIONS + 1],
    ):
        at_N = torch.tensor(positions)
        turn = angles(at_N, max(positions) + 1)
        cos, sin = (table[0, :, :8] for table in rotary(torch.empty(1, dtype=dtype), at_N[None]))
        assert turn.shape == (len(positions), 1, 8) and turn.dtype == torch.complex64
        torch.testing.assert_close(turn.real[:, 0], cos.float(), rtol=0, atol=0)
        torch.testing.assert_close(turn.imag[:, 0], sin.float(), rtol=0, atol=0)
    assert len(angles.table_LP) == 4 * INITIAL_POSITIONS
