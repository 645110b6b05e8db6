"""EAGLE-3 heads: files, drafts as plain PyTorch makes them, and the target's tokens whatever the head proposes.

The oracle of drafts is modeling/eagle3.py on whole texts, fed with transformers' own hidden states.
"""

import dataclasses
import json

import pytest
import torch
from engine_driver import Oracle, greedy, idle, random_prompts, renew, watched
from safetensors.torch import load_file, save_file
from test_speculation import check_identities, chi_square, outcomes, speculate
from transformers import LlamaConfig

from mlaforge.checkpoint.eagle3 import check_head, read_head, write_head
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.modeling.eagle3 import Eagle3Config, Eagle3Head
from mlaforge.runtime import UserError

LAYER = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "num_hidden_layers": 1, "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
ALL = {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True}
HEADS = {
    "plain": {},
    "all norms": {**ALL, "draft_vocab_size": 260},
    "window": {"sliding_window": 9, "norm_before_residual": True},
    "another size": {"layer": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20},
                     "own_embedding": True, "norm_before_residual": True},
}  # fmt: skip
BASES = random_prompts(40, 40, seed=4)


def make(layer=None, tokens=None, seed=0, **fields):
    """A random head. `tokens`: its vocabulary, by default every third token of the target."""
    torch.manual_seed(seed)
    tokens = list(range(0, 260, 3)) if tokens is None else tokens
    settings = {"target_hidden_size": 64, "draft_vocab_size": len(tokens), "boundaries": (0, 1, 2), **fields}
    head = Eagle3Head(Eagle3Config(LlamaConfig(**{**LAYER, **(layer or {})}), **settings))
    for name, parameter in head.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.25)
    if "d2t" in dict(head.named_buffers()):
        head.d2t += torch.tensor(tokens) - torch.arange(len(tokens))
        head.t2d[tokens] = True
    return head.requires_grad_(False).eval()


def saved(folder, **fields):
    folder.mkdir(exist_ok=True)
    write_head(make(**fields), folder, torch.float32)
    return folder


@torch.no_grad()
def draft_logits(head, oracle, token_ids, drafted):
    """Logits that the head proposes `drafted` from, and what follows, after token_ids: a whole pass per token."""
    ids, window = torch.tensor([token_ids]), head.config.sliding_window
    found = oracle.model(ids, output_hidden_states=True).hidden_states
    states = torch.cat([found[boundary] for boundary in head.config.boundaries], dim=-1)[:, :-1]
    embedding = head.embed_tokens if head.config.own_embedding else oracle.model.get_input_embeddings()
    hidden, rest, logits = head.fuse(states.float()), ids[:, 1:], []
    for token in [*drafted, None]:
        distance = torch.arange(hidden.shape[1])[:, None] - torch.arange(hidden.shape[1])
        mask = (distance >= 0) & (distance < (window or 10**6))
        out = head(hidden, embedding(rest), torch.arange(hidden.shape[1])[None], mask)
        logits.append(head.logits(out)[0, -1])
        hidden = torch.cat((hidden, head.fed_back(out[:, -1:])), dim=1)
        if token is not None:
            rest = torch.cat((rest, torch.tensor([[token]])), dim=1)
    return torch.stack(logits[:-1])


def recorded(drafter, least=0.0):
    """Every (text, how many tokens were asked for, draft) that it proposes from now on, likely by `least`."""
    seen, propose = [], drafter.propose

    def watching(asked, _):
        drafts = propose(asked, least)
        seen.extend((list(s.token_ids), count, d) for (s, count), d in zip(asked, drafts, strict=True))
        return drafts

    drafter.propose = watching
    return seen


def check_drafts(seen, head, oracle):
    """The likeliest tokens of the plain path, or as likely to 1e-3."""
    assert seen
    for text, _, draft in seen:
        assert draft is not None
        logits = draft_logits(head, oracle, text, draft.token_ids)
        own = [head.target_ids.tolist().index(token) for token in draft.token_ids]
        gap = logits.max(-1).values - logits[range(len(own)), own]
        assert float(gap.max()) < 1e-3, (len(text), draft.token_ids, gap)


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
def test_drafts_and_tokens(name, family, layout, tiny_models, converted, tmp_path):
    """Drafts are the plain path's, after chunks, refused drafts, a found prefix and preemption; tokens the target's."""
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


def test_a_draft_ends_before_what_is_unlikely(tiny_models, tmp_path):
    """By the product of the plain path's likeliest tokens."""
    directory, folder, least = tiny_models["llama"], saved(tmp_path / "head"), 0.15
    oracle, head = Oracle(directory), read_head(folder, 3)
    llm = watched(directory, speculative=str(folder), adaptive_speculation=False, num_speculative_tokens=4)
    seen = recorded(llm.engine.speculation.drafter, least)
    for output in llm.generate([*BASES, *random_prompts(9, 30, 21)], greedy(12)):
        oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 12)
    check_drafts([each for each in seen if each[2].token_ids], head, oracle)
    for text, count, draft in seen:
        # One token more than was drafted, whichever.
        logits = draft_logits(head, oracle, text, [*draft.token_ids, 0])
        likely = logits.softmax(-1).amax(-1).cumprod(0)
        assert (likely[:-1] > least - 1e-4).all()
        assert len(draft.token_ids) == count or likely[-1] < least + 1e-4
    assert {0, 1, 2} <= {len(draft.token_ids) for _, _, draft in seen}
    check_identities(llm.engine.stats().speculation)
    idle(llm.engine)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_what_is_accepted_is_the_targets(count, tiny_models, tmp_path):
    """Target and head confined to two tokens, so that some drafts are accepted: the tokens of plain decoding."""
    tokens = [40, 41]
    params = greedy(40, logit_bias=dict.fromkeys(tokens, 100.0), n=2)
    plain = watched(tiny_models["llama"]).generate(BASES, params)
    llm = watched(
        tiny_models["llama"], speculative=str(saved(tmp_path / "head", tokens=tokens)), num_speculative_tokens=count,
        adaptive_speculation=False,
    )  # fmt: skip
    for want, got in zip(plain, llm.generate(BASES, params), strict=True):
        assert [c.token_ids for c in got.outputs] == [c.token_ids for c in want.outputs]
    stats = llm.engine.stats().speculation
    assert 0.1 < stats.accepted / stats.drafted < 0.95
    check_identities(stats)
    idle(llm.engine)


@pytest.mark.parametrize("least", [0.0, 0.5])
def test_draws_from_a_draft_vocabulary_are_the_targets(least, tiny_models, tmp_path):
    """As test_speculation's, q being the head's own over its few tokens, with all drafts and with likely ones alone."""
    vocabulary, prompt = [20, 21, 22], BASES[1][:9]
    exact = outcomes(Oracle(tiny_models["llama"]), prompt, 4, vocabulary, 2.0)
    folder = saved(tmp_path / "head", tokens=[7, 20, 21, 22])
    llm = watched(tiny_models["llama"], speculative=str(folder), cache_bytes=16 << 20)
    renew(llm.engine, 2000, 40, block_size=4, max_step=2048, max_num_seqs=600)
    speculate(llm.engine, llm.engine.speculation.drafter, 2)
    seen = recorded(llm.engine.speculation.drafter, least)
    # One after another, as a continuation's first step has no draft.
    counts: dict = {}
    for seed in range(2):
        how = [
            SamplingParams(temperature=2.0, max_tokens=4, ignore_eos=True, seed=1000 * seed + i,
                           logit_bias=dict.fromkeys(vocabulary, 100.0)) for i in range(250)
        ]  # fmt: skip
        for output in llm.generate([prompt] * len(how), how):
            key = tuple(output.outputs[0].token_ids)
            counts[key] = counts.get(key, 0) + 1
    stats = llm.engine.stats().speculation
    assert 0.1 < stats.accepted / stats.drafted < 0.95
    lengths = {len(draft.token_ids) for _, count, draft in seen if draft is not None and count == 2}
    assert lengths == ({0, 1, 2} if least else {2})
    found, freedom = chi_square(counts, exact)
    assert freedom > 10
    assert ((found / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5 < 3.5


# Files


@pytest.mark.parametrize("name", HEADS)
def test_written_and_read(name, tmp_path):
    head = make(**HEADS[name])
    write_head(head, tmp_path, torch.float32)
    again = read_head(tmp_path, 3)
    assert dataclasses.replace(again.config, layer=None) == dataclasses.replace(head.config, layer=None)
    assert again.config.layer.rope_parameters == head.config.layer.rope_parameters
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key])


def test_names_and_shapes_are_those_in_the_wild(tmp_path):
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


def damage(folder, what):
    path = folder / "model.safetensors"
    tensors, config = load_file(path), json.loads((folder / "config.json").read_text())
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
    elif what == "architecture":
        config["architectures"] = ["LlamaForCausalLM"]
    elif what == "layers":
        config["num_hidden_layers"] = 2
    elif what == "boundary":
        config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 4]
    elif what == "convention":
        config["eagle_aux_hidden_state_convention"] = "after"
    elif what == "another model":
        config["target_hidden_size"] = 60
    elif what == "number":
        config["hidden_size"] = "many"
    save_file(tensors, path)
    (folder / "config.json").write_text(json.dumps(config))


DAMAGES = {
    "missing": "lacks the tensor 'midlayer.mlp.up_proj.weight'", "extra": "q_proj.scale", "shape": "'fc.weight'",
    "absolute ids": "d2t must be offsets", "t2d": "t2d does not mark", "nan": "holds NaN",
    "architecture": "no EAGLE-3 head",
    "layers": "num_hidden_layers = 2", "boundary": "captures boundary 4; the target has 3 layers",
    "convention": "'after'", "another model": "shape", "number": "config.json",
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_head_is_refused(what, tmp_path):
    folder = saved(tmp_path / "head")
    damage(folder, what)
    with pytest.raises(UserError) as refusal:
        read_head(folder, 3)
    assert DAMAGES[what] in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_head_of_another_model_is_refused(tiny_models, tmp_path, refused):
    folder = saved(tmp_path / "head", layer={"vocab_size": 300})
    asked = ("generate", tiny_models["llama"], "--dtype", "float32", "--speculative")
    refused(("vocab_size is 300", "260"), *asked, folder)
    with pytest.raises(UserError, match="embed_tokens"):
        check_head(make(layer={"hidden_size": 48}).config, 64, 260)
    refused(("speculative = 'ngrams'", "EAGLE-3"), *asked, "ngrams")
