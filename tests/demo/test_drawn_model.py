"""Models whose weights are drawn on the device: the tensors of a written checkpoint, and every converted form."""

import pytest
import torch

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.demo import geometry
from mlaforge.demo.drawn_model import DrawnModel, Latent, converted
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.gpu_verification.drawn_engine import TINY

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def settings():
    return geometry.settings("20b", 2) | TINY


def test_tensors_are_those_of_the_written_checkpoint(tmp_path):
    drawn = DrawnModel.of(settings(), CPU)
    geometry.Random(drawn.config, seed=0).write(tmp_path)
    written = SourceModel.open(tmp_path)
    with written.weights() as files:
        tensors = drawn.weights()
        assert set(files) == set(tensors)
        assert all(torch.equal(files[name], tensors[name]) for name in files)
    options = {"device": "cpu", "dtype": "float32", "cache_bytes": 1 << 22}
    answers = [LLM(model, **options).generate([[1, 2, 3] * 9], GREEDY)[0] for model in (drawn, written)]
    tokens = [answer.outputs[0].token_ids for answer in answers]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 6


FORMS = (
    Latent("latent_rope", 32, 8), Latent("latent", 48), Latent("latent", 48, bits=4),
    Latent("latent", 48, bits=4, topk=96),
)  # fmt: skip


@pytest.mark.parametrize("latent", FORMS, ids=str)
def test_converted_forms_run(latent):
    drawn = DrawnModel.of(converted(settings(), latent), CPU)
    assert drawn.converted and drawn.spec.num_layers == 2
    llm = LLM(drawn, device="cpu", dtype="float32", cache_bytes=1 << 22)
    assert len(llm.generate([[1, 2, 3] * 60], GREEDY)[0].outputs[0].token_ids) == 6
    kinds = [layer.kind for layer in llm.engine.cache.layers]
    assert kinds == ["gqa", latent.layout]
    assert (llm.engine.model.layers[1].attention.sparse is not None) == bool(latent.topk)
