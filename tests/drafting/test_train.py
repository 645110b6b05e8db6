"""`draft train` on tiny models: acceptance in the engine, initialisation, bitwise resumption, rejected inputs."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from mlaforge.artifact import MANIFEST, Manifest
from mlaforge.checkpoint import draft_head, loading, reader
from mlaforge.checkpoint.draft_head import read_head
from mlaforge.checkpoint.eagle3 import write_head
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.config import resolve
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data.packing import Rows
from mlaforge.demo import model as demo_model
from mlaforge.drafting import dataset, initialize, train, vocabulary
from mlaforge.drafting.config import DraftTrainConfig, VocabularyConfig
from mlaforge.drafting.objective import capture, columns
from mlaforge.drafting.unroll import UnrolledHead
from mlaforge.modeling.eagle3 import Eagle3Head
from mlaforge.runtime import Resumable, UserError
from mlaforge.sparsity import sparsify
from mlaforge.sparsity.config import SparsifyConfig
from support import block_heads
from support.eagle3_heads import make
from support.engine_driver import greedy, watched
from support.killed import check_same_tensors, killed_after
from support.sharded import check_same_training, trained_in_turns
from support.tiny_models import build, save_tokenizer

OPTIONS = {
    "steps": 6, "batch_tokens": 128, "micro_tokens": 64, "seqlen": 64, "unroll": 3, "evaluate_every": 3,
    "checkpoint_every": 2, "boundaries": "0,1,3", "device": "cpu",
}  # fmt: skip
NUM_PROMPTS, NEW_TOKENS = 48, 24
# What heads that draft in one pass need to learn as much.
LONGER = {"steps": 160, "learning_rate": 0.05}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny model trained to count in steps of 1 to 4: its answers are long and do not repeat."""
    directory = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    model = build("llama", num_hidden_layers=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        begin, pace = torch.randint(0, 256, (16, 1)), torch.randint(1, 5, (16, 1))
        ids = (begin + pace * torch.arange(32)) % 256
        loss = F.cross_entropy(model(ids).logits[:, 2:-1].flatten(0, 1), ids[:, 3:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss.detach()) < 0.2
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def text(target, tmp_path_factory):
    """Its answers to 48 prompts of 5 tokens, in the format of `draft regenerate`."""
    directory = tmp_path_factory.mktemp("text")
    prompts = [[(11 * n + (1 + n % 4) * k) % 256 for k in range(5)] for n in range(NUM_PROMPTS)]
    reference = watched(target, prefix_caching=False).generate(prompts, greedy(NEW_TOKENS))
    lines = [
        dataset.answer_line(n, "", p, o.outputs[0].token_ids)
        for n, (p, o) in enumerate(zip(prompts, reference, strict=True))
    ]
    (directory / dataset.TEXT_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    inputs = {"model": {"sha256": reader.fingerprint(target)}, "exclude": ["of judged prompts"]}
    Manifest(dataset.STAGE, {}, inputs, files={dataset.TEXT_FILE: ""}).save(directory)
    return directory


@pytest.fixture
def train_head(target, text, tmp_path):
    """train_head(name, model, options) -> (directory, manifest)."""

    def run(name="head", model=target, **options):
        config = DraftTrainConfig(**{"text": (str(text),), **OPTIONS, **options})
        return tmp_path / name, train.run(str(model), tmp_path / name, config)

    return run


def speculation_stats(target, head, prompts):
    """Return `eagle_speculation` for decoding the prompts with a head, 3 tokens drafted."""
    llm = watched(
        target, speculative=str(head), num_speculative_tokens=3, adaptive_speculation=False, prefix_caching=False
    )
    llm.generate(prompts, greedy(NEW_TOKENS))
    return llm.engine.stats().speculation.block()


@pytest.mark.parametrize(
    ("kind", "options"), [("eagle3", {}), ("parallel", LONGER), ("block", {**LONGER, "kv_heads": 4})]
)
def test_the_engine_accepts_a_trained_heads_drafts(kind, options, train_head, target, text, tmp_path):
    """An overfitted head with a draft vocabulary; its validation acceptance equals the engine's. A block head's
    language model head stays the target's."""
    vocabulary.run(str(target), [text], tmp_path / "vocab", VocabularyConfig(size=256))
    head, manifest = train_head(
        vocabulary=str(tmp_path / "vocab"), kind=kind, batch_tokens=256, micro_tokens=256, evaluate_every=40,
        sliding_window=8, **{"steps": 80, "learning_rate": 0.03, **options},
    )  # fmt: skip
    curve, losses = manifest.metrics["curve"], manifest.metrics["losses"]
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])
    assert manifest.metrics["best"]["acceptance_length"] == max(point["acceptance_length"] for point in curve) > 2.5
    train_answers, validation_answers = dataset.split(dataset.read_answers(text)[1])
    # The start, a linear map, knows the first token often.
    assert curve[0]["acceptance"][0] > 0.4
    trained = read_head(head, 3)
    config = trained.config
    if kind == "block":
        target_head = loading.load_model(target, "float32").lm_head.weight[trained.target_ids]
        assert torch.equal(trained.lm_head.weight, target_head.half().float())
        assert config.block_size == 4 and trained.fc.weight.std() > 0
    assert config.draft_vocab_size == 256 and config.sliding_window == 8 and config.boundaries == (0, 1, 3)
    block = speculation_stats(target, head, [answer.prompt_ids for answer in train_answers])
    assert block["mean_acceptance_rate"] > 0.9, (block, curve)
    block = speculation_stats(target, head, [answer.prompt_ids for answer in validation_answers])
    # Equal up to near ties of logits in fp16, the storage dtype of heads.
    assert block["mean_acceptance_length"] == pytest.approx(manifest.metrics["best"]["acceptance_length"], abs=0.1)
    assert manifest.inputs["text"][0]["exclude"] == ["of judged prompts"]


@pytest.mark.parametrize("stage", [pytest.param("sparsify", marks=pytest.mark.slow), "convert"])
def test_trains_for_a_sparse_target(stage, train_head, target, text, tmp_path):
    """Training uses the states of the sparse target, also of a conversion with coded rows, the default; the engine
    accepts the drafts."""
    readme, selection = str(Path(__file__).parents[2] / "README.md"), {"topk": 12, "sink": 2, "window": 4, "width": 8}
    if stage == "sparsify":
        config = SparsifyConfig(text=readme, seqlen=64, nsamples=2, **selection)
        sparsify.run(str(target), tmp_path / "sparse", config)
    else:
        sizes = {"seqlen": 64, "nsamples": 8, "eval_windows": 0, "device": "cpu"}
        conversion = ConvertConfig(calibration=(readme,), bits=6, **sizes, **selection)
        convert.run(str(target), tmp_path / "sparse", conversion)
    prompts = [answer.prompt_ids for answer in dataset.read_answers(text)[1]]
    inputs = json.loads((text / MANIFEST).read_text())
    inputs["inputs"]["model"]["sha256"] = reader.fingerprint(tmp_path / "sparse")
    answers = shutil.copytree(text, tmp_path / "answers")
    (answers / MANIFEST).write_text(json.dumps(inputs))
    # Before the first step they differ, because the states that they read do.
    first_points = [
        train_head(name=name, model=model, text=(str(of),), steps=steps)[1].metrics["curve"][0]
        for name, model, of, steps in (
            ("dense-head", target, text, 1), ("sparse-head", tmp_path / "sparse", answers, 40),
        )
    ]  # fmt: skip
    assert first_points[0] != first_points[1]
    assert speculation_stats(tmp_path / "sparse", tmp_path / "sparse-head", prompts)["mean_acceptance_rate"] > 0.25


def test_captured_states_match_hidden_states(target):
    """Boundaries number transformers' hidden states; the last one is before the final norm."""
    model = loading.load_model(target, "float32")
    ids = torch.arange(40)[None] * 3 % 256
    rows = Rows(ids, torch.arange(40)[None], torch.arange(1), torch.ones_like(ids, dtype=torch.bool))
    states = capture(model, rows, (0, 2, 3))
    with torch.no_grad():
        reference = model(ids, output_hidden_states=True).hidden_states
    for part, layer in zip(states.captured.split(64, dim=-1)[:2], (0, 2), strict=True):
        torch.testing.assert_close(part, reference[layer][0])
    torch.testing.assert_close(model.model.norm(states.captured[:, 128:]), reference[3][0])
    torch.testing.assert_close(states.final, reference[3][0])


def test_initialisation_solves_the_least_squares_map(target, text):
    """Same solution as torch.linalg.lstsq; a head with values of full rank reproduces its logits approximately."""
    model = loading.load_model(target, "float32")
    config = DraftTrainConfig(text=(str(text),), seqlen=64, batch_tokens=64, boundaries="0,1,3")
    rows = train.read_texts(config, dataset.read_answers(text)[1]).feed.phases[0].rows
    embedding, target_head = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
    states = capture(model, rows, (0, 1, 3))
    text = initialize.Text(rows, lambda part: capture(model, part, (0, 1, 3)), embedding, 1e-6)
    keep = ~rows.last.flatten()
    read = [*states.captured.split(64, dim=-1), embedding[rows.ids.roll(-1, dims=1).flatten()]]
    x = torch.cat([part / part.square().mean(-1, keepdim=True).sqrt() for part in read], dim=-1)[keep].double()
    y = states.final.roll(-1, dims=0)[keep].double()
    ridge = (len(x) * initialize.RIDGE * x.square().mean()).sqrt() * torch.eye(256).double()
    solution = torch.linalg.lstsq(torch.cat((x, ridge)), torch.cat((y, torch.zeros(256, 64).double()))).solution
    torch.testing.assert_close(x @ text.moments(None).solve(), x @ solution, rtol=1e-3, atol=1e-3)
    shape = train.KINDS["eagle3"].new_config(SourceModel.open(target), config, 260)
    shape = dataclasses.replace(shape, layer=copy.deepcopy(shape.layer))
    # A single head has no lookup, and values of full rank.
    shape.layer.num_key_value_heads = shape.layer.num_attention_heads = 1
    shape.layer.head_dim = 64
    head = Eagle3Head(shape).requires_grad_(False)
    initialize.initialize_head(head, text, target_head, 0)
    at, remaining = columns(rows)
    out = UnrolledHead(head, None, embedding, target_head, 1, 1.0).outputs(rows, states, at)[0][remaining > 0]
    places = (torch.arange(len(rows))[:, None] * 64 + at)[remaining > 0]
    read = torch.cat([part / part.square().mean(-1, keepdim=True).sqrt() for part in read], dim=-1).double()[places]
    head_logits, logits = head.logits(out).double(), read @ solution @ target_head.mT.double()
    assert float(torch.cosine_similarity(head_logits, logits, dim=-1).mean()) > 0.85
    assert 0.8 < float(head_logits.std() / logits.std()) < 1.25


@pytest.mark.parametrize("rank", [5, 12, 20])
def test_low_rank_factors_are_optimal(rank):
    """For inputs of different sizes, the factors are better than those of an SVD of the weight alone."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(400, 12, generator=generator).double() * torch.logspace(-1, 1, 12).double()
    weight = torch.randn(12, 9, generator=generator).double()
    values, mixed = initialize.low_rank(weight, x.mT @ x / 400, rank)
    assert values.shape == (rank, 12) and mixed.shape == (9, rank)

    def error(product):
        return float((x @ product - x @ weight).square().mean())

    U, S, Vh = torch.linalg.svd(weight, full_matrices=False)
    plain = U[:, :rank] * S[:rank] @ Vh[:rank]
    assert error(values.mT @ mixed.mT) < error(plain) + 0.01
    if rank < 9:
        assert error(values.mT @ mixed.mT) < 0.9 * error(plain)


def test_training_without_a_cache_gives_the_same_losses(train_head):
    """Up to the rounding of cached states to bf16."""
    (_, cached), (_, fresh) = train_head("kept"), train_head("fresh", cache=False)
    assert cached.metrics["losses"] == pytest.approx(fresh.metrics["losses"], rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_initialises_from_another_head(dtype, train_head, converted, tmp_path):
    """For a converted model: without training, the new head has the old one's sizes and weights."""
    layer = {"head_dim": 8, "num_attention_heads": 4}
    (tmp_path / "old").mkdir()
    write_head(make(layer=layer, boundaries=(1, 2, 3), sliding_window=9), tmp_path / "old", dtype)
    student = converted("llama", "latent", budget=0.25)
    out, manifest = train_head(model=student, init=str(tmp_path / "old"), boundaries=None, steps=2, learning_rate=1e-9)
    old, new = read_head(tmp_path / "old", 3), read_head(out, 3)
    assert new.config.sliding_window == 9 and new.config.boundaries == (1, 2, 3)
    for name, tensor in old.state_dict().items():
        torch.testing.assert_close(new.state_dict()[name], tensor, rtol=1e-3, atol=1e-3)
    assert manifest.inputs["init"] == {"sha256": reader.fingerprint(tmp_path / "old"), "text": None}
    for option in ({"boundaries": "0,1,2"}, {"boundaries": None, "kv_heads": 2}):
        with pytest.raises(UserError, match="--init defines vocabulary"):
            train_head("other", init=str(tmp_path / "old"), **option)
    (tmp_path / "others").mkdir()
    write_head(make(layer={"vocab_size": 300}, boundaries=(1, 2, 3)), tmp_path / "others", torch.float32)
    with pytest.raises(UserError, match="vocab_size is 300, the model's 260: it was trained for another model"):
        train_head("other", init=str(tmp_path / "others"), boundaries=None)


def test_kinds_of_heads_to_start_from(train_head, tmp_path):
    """A parallel head starts from an EAGLE-3 head or a parallel one; no other kind from another."""
    layer = {"head_dim": 8, "num_attention_heads": 4}
    for name, head in (("eagle3", make(layer=layer, boundaries=(1, 2, 3))),
                       ("block", block_heads.make(layer=layer, boundaries=(1, 2, 3)))):  # fmt: skip
        (tmp_path / name).mkdir()
        draft_head.write_head(head, tmp_path / name, torch.float32)
    options = {"boundaries": None, "steps": 1, "learning_rate": 1e-9}
    first, _ = train_head("first", kind="parallel", init=str(tmp_path / "eagle3"), **options)
    second, _ = train_head("second", kind="parallel", init=str(first), **options)
    old, states = read_head(tmp_path / "eagle3", 3), [read_head(folder, 3) for folder in (first, second)]
    assert all(head.config.mask_token_id is not None and float(head.mask_state.std()) > 0.5 for head in states)
    for name, tensor in old.state_dict().items():
        torch.testing.assert_close(states[0].state_dict()[name], tensor, rtol=1e-3, atol=1e-3)
    for name in ("mask_state", "markov_embed.weight", "markov_head.weight"):
        torch.testing.assert_close(*(head.state_dict()[name] for head in states), rtol=1e-3, atol=1e-3)
    for kind, init in (("eagle3", "first"), ("eagle3", "block"), ("parallel", "block"), ("block", "eagle3")):
        with pytest.raises(UserError, match="give another --kind or --init"):
            train_head("other", kind=kind, init=str(tmp_path / init), **options)


@pytest.mark.parametrize(("kind", "init"), [("parallel", False), ("parallel", True), ("block", False)])
def test_the_markov_correction_starts_as_what_follows_each_token(kind, init, train_head, tmp_path):
    """The target counts in steps of 1 to 4."""
    options = {"kind": kind, "steps": 0}
    if init:
        (tmp_path / "eagle3").mkdir()
        draft_head.write_head(
            make(layer={"head_dim": 8, "num_attention_heads": 4}, tokens=list(range(256)), boundaries=(1, 2, 3)),
            tmp_path / "eagle3", torch.float32,
        )  # fmt: skip
        options |= {"init": str(tmp_path / "eagle3"), "boundaries": None}
    head = read_head(train_head(**options)[0], 3)
    likeliest = head.target_ids[(head.markov_embed.weight @ head.markov_head.weight.T).argmax(1)]
    steps = (likeliest - head.target_ids) % 256
    assert float(((steps > 0) & (steps < 5)).float().mean()) > 0.8


@pytest.mark.parametrize("kind", ["eagle3", "parallel", "block"])
def test_a_killed_run_resumes_bitwise(kind, train_head, target, text, tmp_path):
    whole, manifest = train_head("whole", kind=kind)
    config = DraftTrainConfig(text=(str(text),), kind=kind, **OPTIONS)
    killed_after((2, 4), train, [target], tmp_path / "killed", config)
    again, resumed = train_head("killed", kind=kind)
    assert resumed.metrics["losses"] == manifest.metrics["losses"] and len(resumed.metrics["losses"]) == 6
    assert resumed.fingerprint == manifest.fingerprint
    check_same_tensors(whole, again)
    for first, other in zip(manifest.metrics["curve"], resumed.metrics["curve"], strict=True):
        assert {k: v for k, v in first.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}


def test_a_non_finite_loss_saves_its_batch(train_head, tmp_path, monkeypatch):
    forward = UnrolledHead.forward
    monkeypatch.setattr(UnrolledHead, "forward", lambda self, *args: forward(self, *args) * float("nan"))
    with pytest.raises(Resumable, match=r"not finite at step 1; its batch is in .*head\.diverged\.safetensors"):
        train_head()
    assert load_file(tmp_path / "head.diverged.safetensors")["input_ids"].shape == (2, 64)


def test_command_line(cli, target, text, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("\n".join(f"{key.replace('_', '-')}: {value}" for key, value in {**OPTIONS, "steps": 2}.items()))
    done = cli("draft", "train", target, "--text", text, "--out", tmp_path / "head", "--recipe", recipe)
    assert done.exit_code == 0, done.stderr
    assert "tokens per step with 3 drafted" in done.stdout
    assert Manifest.load(tmp_path / "head").stage == "draft train"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"text": None}, "--text is missing"),
        ({"text": ("/nowhere",)}, "not written by `mlaforge draft regenerate`"),
        ({"unroll": 0}, "unroll = 0"),
        ({"seqlen": 300}, "seqlen = 300 must be at most batch_tokens = 128"),
        ({"learning_rate": 0.0}, "above 0"),
        ({"boundaries": "1,2"}, "three numbers from 0 to 3"),
        ({"boundaries": "1,2,4"}, "three numbers from 0 to 3"),
        ({"vocabulary": "/nowhere"}, "not written by `mlaforge draft vocab`"),
        ({"seqlen": 6}, "no answer has two tokens"),
        ({"kv_heads": 3}, "kv_heads = 3 must divide the model's 4 heads"),
        ({"kv_heads": -1}, "kv_heads = -1 must be at least 0"),
    ],
)
def test_rejects_invalid_options(train_head, tmp_path, options, words):
    with pytest.raises(UserError, match=words) as caught:
        train_head(**options)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cache", "turns"),
    [("eagle3", True, (4, 2, 1)), ("eagle3", False, (1, 2, 4)), ("parallel", True, (2, 4)), ("block", True, (2, 4)),
     ("block", False, (4, 2))],
)  # fmt: skip
def test_processes_match_one(kind, cache, turns, train_head, target, text, tmp_path):
    """FSDP2 over gloo, with a sharded target or a cache: losses of every step, acceptance and weights of a run that
    each number of processes resumes. Four rows a step: with four processes each reads one."""
    options = {**OPTIONS, "batch_tokens": 256, "cache": cache, "kind": kind}
    whole = train_head("whole", **options)
    out = tmp_path / "sharded"
    manifest = trained_in_turns(turns, train, [target], out, DraftTrainConfig(text=(str(text),), **options))
    check_same_training((out, manifest), whole, "acceptance_length", atol=1e-3)


def test_the_recipe_matches_the_shipped_head():
    config = resolve(DraftTrainConfig, Path(__file__).parents[2] / "recipes" / "smollm2-draft.yaml")
    train.check_options(dataclasses.replace(config, text=("TEXT",)))
    train_head = dataset.training_manifest(demo_model.head("original"))
    # The manifest has lists as text, from an older version; both mean the same.
    hashed = {key: value for key, value in dataclasses.asdict(config).items() if key not in train.NOT_HASHED}
    # Options that came later have their defaults.
    assert train_head.config.keys() <= hashed.keys()
    assert DraftTrainConfig(**train_head.config) == DraftTrainConfig(**hashed)


def test_the_recipe_of_block_heads_is_valid():
    config = resolve(DraftTrainConfig, Path(__file__).parents[2] / "recipes" / "smollm2-block.yaml")
    train.check_options(dataclasses.replace(config, text=("TEXT",)))
    shipped = read_head(demo_model.head("original"), 30).config
    assert (config.kind, config.block_size, config.boundaries) == ("block", 4, shipped.boundaries)
