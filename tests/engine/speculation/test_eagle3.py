"""EAGLE-3 heads: files, and drafts as plain PyTorch makes them.

The reference of drafts is modeling/eagle3.py on whole texts, with transformers' own hidden states.
"""

import dataclasses
import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from mlaforge.checkpoint.eagle3 import check_head, read_head, write_head
from mlaforge.engine import builder
from mlaforge.engine.cache.device_tables import DeviceTables
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.eagle3 import sample_distribution
from mlaforge.modeling.eagle3 import Eagle3Config, Eagle3Head
from mlaforge.runtime import UserError
from support.eagle3_heads import HEADS, LAYER, check_drafts, draft_logits, make, recorded, saved
from support.engine_driver import Oracle, greedy, idle, random_prompts, renew, watched
from support.host_reads import host_reads
from support.speculating import check_identities, speculate

BASES = random_prompts(40, 40, seed=4)


@pytest.mark.parametrize(
    ("name", "family", "layout"),
    [
        *((name, "llama", None) for name in HEADS),
        ("plain", "mistral", "latent_rope"),
        ("window", "gpt_oss", None),
        ("all norms", "qwen3", "latent"),
        ("window", "gpt_oss", "latent"),
    ],
)
def test_drafts_match_the_reference_head_and_tokens_plain_decoding(
    name, family, layout, tiny_models, converted, tmp_path
):
    """Also after chunks, rejected drafts, a found prefix and preemption."""
    directory = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
    oracle, folder = Oracle(directory), saved(tmp_path / "head", **HEADS[name])
    llm = watched(directory, speculative=str(folder), adaptive_speculation=False)
    head, engine = read_head(folder, 3), llm.engine
    seen = recorded(engine.speculation.drafter)
    assert engine.tables.groups[-1].name == "draft"
    renew(engine, 60, 80, block_size=4, max_step=7)
    for prompts in ([BASES[0]], [BASES[0] + oracle.continuation(BASES[0], 2) + [3, 4]]):
        for output in llm.generate(prompts, greedy(12)):
            oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 12)
    assert output.num_cached_tokens >= 36
    speculate(engine, engine.speculation.drafter, 5)
    before = engine.stats().preemptions
    renew(engine, 4, 40 + 12, block_size=4, max_step=16, caching=False)
    for output in llm.generate([*BASES, BASES[0][:9]], greedy(12)):
        oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 12)
    assert engine.stats().preemptions > before
    check_drafts(seen, head, oracle)
    check_identities(engine.stats().speculation)
    idle(engine)


@pytest.mark.parametrize("early", [True, False])
def test_draft_ends_before_an_unlikely_path(early, tiny_models, tmp_path):
    """By the product of the reference's highest probabilities: while it is drafted as on a CPU, or afterwards as on a
    GPU."""
    directory, folder, least = tiny_models["llama"], saved(tmp_path / "head"), 0.15
    oracle, head = Oracle(directory), read_head(folder, 3)
    llm = watched(directory, speculative=str(folder), adaptive_speculation=False, num_speculative_tokens=4)
    llm.engine.speculation.drafter.stops_early = early
    seen = recorded(llm.engine.speculation.drafter, least)
    for output in llm.generate([*BASES, *random_prompts(9, 30, 21)], greedy(12)):
        oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 12)
    check_drafts([record for record in seen if record[2].token_ids], head, oracle)
    for text, count, draft in seen:
        # One token more than was drafted, whichever.
        logits = draft_logits(head, oracle, text, [*draft.token_ids, 0])
        likely = logits.softmax(-1).amax(-1).cumprod(0)
        assert (likely[:-1] > least - 1e-4).all()
        assert len(draft.token_ids) == count or likely[-1] < least + 1e-4
    assert {0, 1, 2} <= {len(draft.token_ids) for _, _, draft in seen}
    check_identities(llm.engine.stats().speculation)
    idle(llm.engine)


def test_host_reads_chains_once_per_step(tiny_models, tmp_path, monkeypatch):
    """As on a GPU, where every read is a wait, and so is an index that is a host list; texts of several lengths end at
    several depths."""
    monkeypatch.setattr(builder, "BlockTables", DeviceTables)
    llm = watched(
        tiny_models["llama"], speculative=str(saved(tmp_path / "head")), adaptive_speculation=False,
        num_speculative_tokens=4,
    )  # fmt: skip
    drafter, proposals, limit = llm.engine.speculation.drafter, [], {}
    drafter.stops_early = False
    propose = drafter.propose

    def counted(budgets, _):
        with host_reads() as reads:
            drafts = propose(budgets, limit["least"])
        if any(draft is not None for draft in drafts):
            proposals.append((reads, {len(draft.token_ids) for draft in drafts if draft is not None}))
        return drafts

    drafter.propose = counted
    for limit["least"], temperature in itertools.product((0.0, 0.15), (0.0, 1.0)):
        proposals.clear()
        how = [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, seed=n) for n in (9, 12, 14)]
        llm.generate(random_prompts(9, 30, 21), how)
        assert len(proposals) > 5 and all(names == ["tolist"] for names, _ in proposals), proposals
        assert max(len(lengths) for _, lengths in proposals) > 1
    idle(llm.engine)


def test_sampling_equals_multinomial():
    """Which waits for the device: to the bit the same tokens of the same random numbers."""
    for seed in range(60):
        p_V = (3 * torch.randn(87, generator=torch.Generator().manual_seed(seed))).softmax(-1)
        ours, theirs = (torch.Generator().manual_seed(seed) for _ in range(2))
        assert sample_distribution(p_V, ours) == torch.multinomial(p_V, 1, generator=theirs)[0]
        assert torch.equal(ours.get_state(), theirs.get_state())


# Files


@pytest.mark.parametrize("name", HEADS)
def test_head_round_trips(name, tmp_path):
    head = make(**HEADS[name])
    write_head(head, tmp_path, torch.float32)
    again = read_head(tmp_path, 3)
    assert dataclasses.replace(again.config, layer=None) == dataclasses.replace(head.config, layer=None)
    assert again.config.layer.rope_parameters == head.config.layer.rope_parameters
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key])


def test_tensor_names_and_shapes_match_published_heads(tmp_path):
    """GPT-OSS's, on the meta device; and a file that says layers.0, without our fields."""
    layer = LlamaConfig(**{**LAYER, "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
                           "head_dim": 64, "intermediate_size": 17280, "vocab_size": 201088})  # fmt: skip
    with torch.device("meta"):
        head = Eagle3Head(Eagle3Config(layer, 2880, 32000, (1, 17, 32)))
    assert {name: list(tensor.shape) for name, tensor in head.state_dict().items()} == {
        "fc.weight": [2880, 8640], "midlayer.hidden_norm.weight": [2880], "midlayer.input_layernorm.weight": [2880],
        "midlayer.self_attn.q_proj.weight": [4096, 5760], "midlayer.self_attn.k_proj.weight": [512, 5760],
        "midlayer.self_attn.v_proj.weight": [512, 5760], "midlayer.self_attn.o_proj.weight": [2880, 4096],
        "midlayer.post_attention_layernorm.weight": [2880], "midlayer.mlp.gate_proj.weight": [17280, 2880],
        "midlayer.mlp.up_proj.weight": [17280, 2880], "midlayer.mlp.down_proj.weight": [2880, 17280],
        "norm.weight": [2880], "lm_head.weight": [32000, 2880], "d2t": [32000], "t2d": [201088],
    }  # fmt: skip
    folder = saved(tmp_path / "head", norm_before_residual=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    ours = ("eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_convention", "norm_before_residual")
    config = {k: v for k, v in config.items() if k not in (*ours, "rope_parameters")} | {"rope_theta": 500.0}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    head = read_head(folder, 3)
    assert head.config.boundaries == (1, 2, 3) and not head.config.norm_before_residual
    assert head.config.layer.rope_parameters["rope_theta"] == 500.0
    config["eagle_config"] = {"eagle_aux_hidden_state_convention": "output", "eagle_aux_hidden_state_layer_ids": [0, 1]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"fc.weight.*shape"):
        read_head(folder, 3)
    del config["eagle_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_head(folder, 30).config.boundaries == (2, 15, 27)


def damage(tensors, config, what):
    if what == "missing":
        del tensors["midlayer.mlp.up_proj.weight"]
    elif what == "extra":
        tensors["midlayer.self_attn.q_proj.scale"] = torch.ones(1)
    elif what == "shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, :64].clone()
    elif what == "absolute ids":
        tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    elif what == "t2d":
        tensors["t2d"][4] = True
    elif what == "nan":
        tensors["fc.weight"][0, 0] = torch.nan
    else:
        config.update(what)


DAMAGES = [
    ("missing", "lacks the tensor 'midlayer.mlp.up_proj.weight'"), ("extra", "q_proj.scale"), ("shape", "'fc.weight'"),
    ("absolute ids", "d2t must be offsets"), ("t2d", "other tokens than t2d marks"), ("nan", "holds NaN"),
    ({"architectures": ["LlamaForCausalLM"]}, "no EAGLE-3 head"), ({"num_hidden_layers": 2}, "num_hidden_layers = 2"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, "captures boundary 4; the target has 3 layers"),
    ({"eagle_aux_hidden_state_convention": "after"}, "'after'"), ({"target_hidden_size": 60}, "shape"),
    ({"hidden_size": "many"}, "config.json"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "words"), DAMAGES, ids=str)
def test_refuses_a_damaged_head(what, words, tmp_path):
    folder = saved(tmp_path / "head")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    damage(tensors, config, what)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refusal:
        read_head(folder, 3)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_refuses_a_head_of_another_model(tiny_models, tmp_path, refused):
    folder = saved(tmp_path / "head", layer={"vocab_size": 300})
    asked = ("generate", tiny_models["llama"], "--dtype", "float32", "--speculative")
    refused(("vocab_size is 300", "260"), *asked, folder)
    with pytest.raises(UserError, match="embed_tokens"):
        check_head(make(layer={"hidden_size": 48}).config, 64, 260)
    refused(("speculative = 'ngrams'", "EAGLE-3"), *asked, "ngrams")
