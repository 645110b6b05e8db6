"""`eval --criteria` and `list`: measures, verdicts, and the rejection of text that the student was tuned on."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.artifact import Manifest
from mlaforge.checkpoint import loading, source_model
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus
from mlaforge.evaluation import criteria, needle
from mlaforge.evaluation import student as acceptance
from mlaforge.evaluation.config import EvalConfig
from mlaforge.evaluation.criteria import Criterion, Measurement
from mlaforge.ops.mxfp4_experts import Mxfp4Experts
from mlaforge.runtime import UserError
from support.tiny_models import save_packed


@pytest.fixture
def run_eval(cli, tiny_models, converted, tmp_path):
    """run_eval(criteria, student) -> result of `eval` on a copy of a converted model."""

    def run(*criteria_entries, student=None, teacher=None, seed=0):
        if student is None:
            student = tmp_path / "student"
            if not student.exists():
                shutil.copytree(converted("llama", "latent", budget=0.5), student)
        path = tmp_path / "criteria.yaml"
        path.write_text(yaml.safe_dump({"seed": seed, "criteria": list(criteria_entries)}))
        return cli(
            "eval",
            "--teacher",
            teacher or tiny_models["llama"],
            "--student",
            student,
            "--criteria",
            path,
            "--device",
            "cpu",
        )

    return run


def test_measures_match_the_full_models(run_eval, tiny_models, converted, evaluation_file, tmp_path):
    text = {"text": str(evaluation_file), "windows": 3, "seqlen": 64}
    done = run_eval(
        {"measure": "perplexity", "relative": 5, **text}, {"measure": "kl", "delta": 9, **text},
        {"measure": "top1", "delta": 1, **text},
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    ids = corpus.windows(source_model.load_tokenizer(tiny_models["llama"]), str(evaluation_file), 3, 64).ids
    logs = []
    for path in (tmp_path / "student", tiny_models["llama"]):
        with torch.no_grad():
            logs.append(loading.load_model(path, "float32")(ids).logits[:, :-1].double().log_softmax(-1))
    student, teacher = logs
    loss = [torch.exp(-x.gather(-1, ids[:, 1:, None]).mean()).item() for x in logs]
    divergences = (teacher.exp() * (teacher - student)).sum(-1)
    kl = divergences.mean().item()
    agreements = (student.argmax(-1) == teacher.argmax(-1)).double().mean().item()
    verdicts = Manifest.load(tmp_path / "student").acceptance["criteria"]
    assert [(f["student"], f["teacher"]) for f in verdicts] == [
        pytest.approx(loss, rel=1e-4), pytest.approx((kl, 0), rel=1e-3), pytest.approx((agreements, 1))
    ]  # fmt: skip
    assert [f.get("p99") for f in verdicts] == [None, pytest.approx(divergences.quantile(0.99).item(), rel=1e-3), None]
    assert [f["worse"] for f in verdicts] == pytest.approx([loss[0] / loss[1] - 1, kl, 1 - agreements], rel=1e-3)
    assert all(f["interval"][0] <= f["worse"] <= f["interval"][1] and f["documents"] == 3 for f in verdicts)


def test_canonical_requires_all_criteria(run_eval, cli, evaluation_file, tmp_path):
    text = {"text": str(evaluation_file), "windows": 2, "seqlen": 64}
    good, bad = {"measure": "top1", "delta": 1, **text}, {"measure": "kl", "delta": 0, **text}
    for calls, code in (((good,), 0), ((good, bad), 1), ((good,), 0)):
        done = run_eval(*calls)
        assert done.exit_code == code and "Traceback" not in done.stderr
        assert Manifest.load(tmp_path / "student").canonical is (code == 0)
        listed = cli("list", tmp_path)
        assert listed.exit_code == 0 and listed.stdout.endswith("canonical\n" if code == 0 else " s\n")
        assert ("failed: kl" in done.stdout) == (code == 1)
    assert json.loads(cli("list", tmp_path, "--json").stdout)[0]["canonical"] is True
    assert {path.name for path in tmp_path.iterdir()} == {"student", "criteria.yaml"}


def test_marking_keeps_the_artifacts_identity(run_eval, evaluation_file, tmp_path, converted):
    before = Manifest.load(converted("llama", "latent", budget=0.5))
    run_eval({"measure": "top1", "delta": 1, "text": str(evaluation_file), "windows": 2, "seqlen": 64})
    after = Manifest.load(tmp_path / "student")
    assert after.fingerprint == before.fingerprint and after.metrics == before.metrics and after.files == before.files


def test_rejects_text_that_the_student_was_tuned_on(run_eval, calibration_file, tmp_path):
    done = run_eval({"measure": "kl", "delta": 1, "text": str(calibration_file), "windows": 300, "seqlen": 64})
    assert done.exit_code == 2 and "share text" in done.stderr
    assert Manifest.load(tmp_path / "student").canonical is False


def test_bootstrap_interval_covers_the_mean():
    """About 95 of 100 intervals contain the true mean."""
    rng, hits = np.random.default_rng(0), 0
    for seed in range(100):
        values = rng.normal(1.0, 1.0, 60)
        measured = Measurement(values, np.zeros(60), np.ones(60), higher=False)
        low, high = measured.evaluate(Criterion("kl", delta=1.0), seed)["interval"]
        hits += low <= 1.0 <= high
    assert 85 <= hits <= 100


@given(st.integers(1, 6), st.booleans(), st.integers(0, 100))
def test_documents_are_weighted_by_length(n, higher, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 9, n).astype(float)
    student, teacher = rng.random(n) * counts, rng.random(n) * counts
    verdicts = Measurement(student, teacher, counts, higher, exp=True).evaluate(
        Criterion("perplexity", relative=0.1), 0
    )
    a, b = np.exp(student.sum() / counts.sum()), np.exp(teacher.sum() / counts.sum())
    assert verdicts["worse"] == pytest.approx((b - a if higher else a - b) / b)
    assert verdicts["passed"] == (verdicts["worse"] <= 0.1)
    assert (verdicts["interval"] is None) == (n == 1)


def test_nan_fails():
    measured = Measurement(np.array([np.nan]), np.array([1.0]), np.ones(1), higher=False)
    assert measured.evaluate(Criterion("kl", delta=9.0), 0)["passed"] is False


def test_windows_do_not_span_documents(tiny_models, tmp_path):
    """No window spans two documents, and each has the number of its document."""
    tokenizer = source_model.load_tokenizer(tiny_models["llama"])
    path = tmp_path / "a.jsonl"
    texts = ["x" * 150, "y" * 30, "z" * 64]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    verdicts = acceptance.eval_windows(tokenizer, Criterion("kl", delta=1.0, text=str(path), seqlen=64, windows=9), [])
    assert [(p.document, len(p.ids)) for p in verdicts] == [(0, 64), (0, 64), (2, 64)]


def test_needle_cases_and_retrieval(tiny_models):
    tokenizer = source_model.load_tokenizer(tiny_models["llama"])
    cases = needle.cases(tokenizer, ["hay " * 400], [300, 400], [0.0, 0.5, 1.0], 2, seed=0)
    assert [(c.length, c.depth) for c in cases] == [(n, d) for n in (300, 400) for d in (0.0, 0.5, 1.0) for _ in "ab"]
    for case in cases:
        text, answer = tokenizer.decode(case.ids), tokenizer.decode(case.ids[-case.answer :])
        assert len(case.ids) == case.length and text.count(answer.strip()) == 2
        at = text.index("The special magic")
        assert at < 10 if case.depth == 0 else at > 50
        # A model that predicts the whole answer, and one that misses the last token.
        right = torch.nn.functional.one_hot(case.ids.roll(-1), 260).float()
        assert needle.is_retrieved(right, torch.eye(260), case)
        right[-2] = 0
        assert not needle.is_retrieved(right, torch.eye(260), case)
    with pytest.raises(UserError, match="needs between 1 and"):
        needle.cases(tokenizer, ["hay " * 10], [400], [0.0], 1, seed=0)


def test_needle_criterion(run_eval, tmp_path):
    done = run_eval({"measure": "needle", "delta": 1, "lengths": [256], "depths": [0, 1], "repeats": 1, "seqlen": 64})
    assert done.exit_code == 0, done.stderr
    assert Manifest.load(tmp_path / "student").acceptance["criteria"][0]["documents"] == 2


@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        ({"measure": "kl"}, "one of delta and relative"),
        ({"measure": "kl", "relative": 0.1}, "kl needs delta"),
        ({"measure": "ppl", "delta": 1}, "measure"),
        ({"measure": "kl", "delta": 1, "txt": "a"}, "unknown key 'txt'"),
        ({"measure": "task", "delta": 1}, "go together"),
        ({"measure": "needle", "delta": 1, "depths": "0,2"}, "number 1: depths = 2.0 must be at least 0 and at most 1"),
        ({"measure": "kl", "delta": 1, "text": "/nowhere"}, "does not exist"),
        ({"measure": "kl", "delta": 1, "seqlen": 8}, "seqlen = 8 must be at least 48"),
    ],
)
def test_rejects_invalid_criteria(run_eval, criterion, words):
    done = run_eval(criterion)
    # A line on the dtype may precede the error.
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("dtype auto: ")]
    assert done.exit_code == 2 and len(lines) == 1 and words in lines[0], done.stderr


def test_rejects_mismatched_arguments(run_eval, cli, tiny_models, tmp_path):
    good = {"measure": "kl", "delta": 1}
    done = run_eval(good, student=tiny_models["llama"])
    assert done.exit_code == 2 and "only a model made by mlaforge" in done.stderr
    for arguments in (("--criteria", tmp_path / "criteria.yaml"), ("--teacher", tiny_models["llama"]), ()):
        assert cli("eval", *arguments).exit_code == 2
    (tmp_path / "criteria.yaml").write_text("criteria: 5\n")
    with pytest.raises(UserError, match="a list of"):
        criteria.read(tmp_path / "criteria.yaml")
    assert cli("list", tmp_path / "nowhere").exit_code == 2


def test_the_evaluation_is_an_artifact(run_eval, cli, tiny_models, evaluation_file, tmp_path):
    run_eval({"measure": "top1", "delta": 1, "text": str(evaluation_file), "windows": 2, "seqlen": 64})
    config = EvalConfig(
        teacher=str(tiny_models["llama"]), student=str(tmp_path / "student"), criteria=str(tmp_path / "criteria.yaml"),
        device="cpu",
    )  # fmt: skip
    first = acceptance.run(config, tmp_path / "out")
    assert first.stage == "acceptance" and first.metrics["passed"]
    assert acceptance.run(config, tmp_path / "out").seconds == first.seconds


@pytest.fixture
def yes_or_no(tmp_path):
    """A task of six questions."""
    questions = [{"question": f"{n} and", "choices": [" yes", " no"], "answer": n % 2} for n in range(6)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = {
        "task": "yes_or_no", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "q.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    return str(tmp_path / "task.yaml")


@pytest.fixture
def packed_teacher(tiny_models, calibration_file, evaluation_file, tmp_path):
    """A model with MXFP4 experts, and its conversion."""
    teacher = save_packed(tiny_models["gpt_oss"], tmp_path / "packed")
    config = ConvertConfig(
        calibration=str(calibration_file), evaluation=str(evaluation_file), seqlen=64, nsamples=12, eval_windows=4,
        device="cpu", budget=0.5,
    )  # fmt: skip
    convert.run(str(teacher), tmp_path / "student", config)
    return teacher


def test_local_task(run_eval, yes_or_no, tmp_path):
    """Needs lm-eval, which is not a development dependency."""
    pytest.importorskip("lm_eval.models")
    done = run_eval({"measure": "task", "delta": 1, "task": yes_or_no})
    assert done.exit_code == 0, done.stderr
    (verdicts,) = Manifest.load(tmp_path / "student").acceptance["criteria"]
    assert verdicts["documents"] == 6 and 0 <= verdicts["student"] <= 1
    done = run_eval({"measure": "task", "delta": 1, "task": yes_or_no, "metric": "f1"})
    assert done.exit_code == 2 and "has no metric 'f1'" in done.stderr


def test_local_task_on_packed_experts(run_eval, packed_teacher, yes_or_no, tmp_path):
    pytest.importorskip("lm_eval.models")
    done = run_eval({"measure": "task", "delta": 1, "task": yes_or_no}, teacher=packed_teacher)
    assert done.exit_code == 0, done.stderr
    (verdicts,) = Manifest.load(tmp_path / "student").acceptance["criteria"]
    assert verdicts["documents"] == 6 and 0 <= verdicts["student"] <= 1


def test_tasks_run_on_packed_experts(run_eval, packed_teacher, tmp_path, monkeypatch):
    """The model in lm-eval has packed experts, and its logits match the unpacked model's."""
    calls = []

    def scores(model, tokenizer, *_):
        ids = torch.tensor([tokenizer.encode("How old is the oldest oak?")])
        with torch.no_grad():
            calls.append((model, model(ids).logits))
        return np.zeros(1), True, ["How old is the oldest oak?"]

    monkeypatch.setattr("mlaforge.evaluation.lm_eval_tasks.scores", scores)
    done = run_eval({"measure": "task", "delta": 1, "task": "oaks"}, teacher=packed_teacher)
    assert done.exit_code == 0, done.stderr
    for (model, logits), directory in zip(calls, (tmp_path / "student", packed_teacher), strict=True):
        assert any(isinstance(module, Mxfp4Experts) for module in model.modules())
        ids = torch.tensor([source_model.load_tokenizer(directory).encode("How old is the oldest oak?")])
        with torch.no_grad():
            unpacked = loading.load_model(directory, "float32")(ids).logits
        # bf16 has 8 bits of precision, and errors accumulate over a few layers.
        assert (logits.float() - unpacked).norm() < 0.03 * unpacked.norm()
