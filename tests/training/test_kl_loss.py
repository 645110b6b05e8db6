"""The chunked distillation loss against the plain formula and autograd."""

import pytest
import torch
from torch.nn import functional

from mlaforge.training import kl_loss
from mlaforge.training.kl_loss import NO_LABEL, HiddenTargets, TopKTargets, compare, distillation_loss, top_k

N, C, V = 37, 12, 50


@pytest.fixture
def models(monkeypatch):
    """Hidden states and heads of student and teacher; the chunk size does not divide N."""
    monkeypatch.setattr(kl_loss, "CHUNK_ROWS", 8)
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float32)
        for shape in ((N, C), (V, C), (N, C + 3), (V, C + 3))
    ]


def labels():
    result = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))
    result[[3, 8, N - 1]] = NO_LABEL
    return result


def reference_loss(hidden, head, teacher_logits, temperature, kl_weight, lm_weight):
    """Reference in fp64 on full logits. teacher_logits: [N, V]."""
    student_logits = hidden.double() @ head.double().T
    p, q = (teacher_logits.double() / temperature).softmax(-1), (student_logits / temperature).log_softmax(-1)
    divergence = temperature**2 * (p * (p.log() - q)).sum(-1).mean()
    text = functional.cross_entropy(student_logits, labels(), ignore_index=NO_LABEL)
    return kl_weight * divergence + lm_weight * text, divergence, text


@pytest.mark.parametrize(("temperature", "kl_weight", "lm_weight"), [(1.0, 1.0, 0.0), (2.0, 0.7, 0.3), (0.5, 0.0, 1.0)])
def test_matches_the_unchunked_formula_and_its_gradients(models, temperature, kl_weight, lm_weight):
    hidden, head, teacher_hidden, teacher_head = models
    hidden, head = hidden.requires_grad_(True), head.requires_grad_(True)
    expected = reference_loss(hidden, head, teacher_hidden @ teacher_head.T, temperature, kl_weight, lm_weight)
    expected_grads = torch.autograd.grad(3 * expected[0], (hidden, head))
    result = distillation_loss(
        hidden, head, HiddenTargets(teacher_hidden, teacher_head), temperature, kl_weight, labels(), lm_weight
    )
    torch.testing.assert_close(result[0].double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result[1].double(), expected[1], rtol=1e-5, atol=1e-6)
    if lm_weight:
        torch.testing.assert_close(result[2].double(), expected[2], rtol=1e-5, atol=1e-6)
    for grad, expected_grad in zip(torch.autograd.grad(3 * result[0], (hidden, head)), expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-6)


def test_a_frozen_head_gets_no_gradient(models):
    hidden, head, teacher_hidden, teacher_head = models
    distillation_loss(hidden.requires_grad_(True), head, HiddenTargets(teacher_hidden, teacher_head))[0].backward()
    assert hidden.grad is not None and head.grad is None


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_top_k_targets_merge_all_other_tokens_into_one_outcome(models, temperature):
    hidden, head, teacher_hidden, teacher_head = models
    hidden = hidden.requires_grad_(True)
    cached = top_k(teacher_hidden, teacher_head, 5, temperature)
    student_probs = (hidden.double() @ head.double().T / temperature).softmax(-1)
    teacher_probs = (teacher_hidden.double() @ teacher_head.double().T / temperature).softmax(-1)
    tokens = teacher_probs.topk(5, dim=-1).indices
    p, q = (
        torch.cat((x.gather(-1, tokens), 1 - x.gather(-1, tokens).sum(-1, keepdim=True)), dim=-1)
        for x in (teacher_probs, student_probs)
    )
    expected = temperature**2 * (p * (p / q).log()).sum(-1).mean()
    result = distillation_loss(hidden, head, cached, temperature)[0]
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(result, hidden)[0], torch.autograd.grad(expected, hidden)[0], rtol=1e-3, atol=1e-6
    )


def test_top_k_of_the_whole_vocabulary_equals_full_targets(models):
    hidden, head, teacher_hidden, teacher_head = models
    whole = distillation_loss(hidden, head, HiddenTargets(teacher_hidden, teacher_head), 2.0)[0]
    cached = distillation_loss(hidden, head, top_k(teacher_hidden, teacher_head, V, 2.0), 2.0)[0]
    torch.testing.assert_close(cached, whole, rtol=1e-4, atol=1e-5)


def test_a_certain_teacher_gives_finite_loss_and_gradients(models):
    hidden, head, _, _ = models
    hidden = hidden.requires_grad_(True)
    logits = torch.zeros(N, 2)
    logits[:, 0] = 200.0
    cached = TopKTargets(logits, torch.arange(2).expand(N, 2).int(), logits.logsumexp(-1))
    result = distillation_loss(hidden, head, cached, 1.0)[0]
    result.backward()
    assert torch.isfinite(result) and torch.isfinite(hidden.grad).all()


def test_peak_size_is_that_of_one_chunk(models, monkeypatch):
    """No tensor of N x V is allocated, neither in the forward nor in the backward pass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest[0] = max(largest[0], tensor.numel())
            return out

    hidden, head, teacher_hidden, teacher_head = models
    hidden = hidden.requires_grad_(True)
    with Watch():
        distillation_loss(hidden, head, HiddenTargets(teacher_hidden, teacher_head), labels_N=labels(), lm_weight=1.0)[
            0
        ].backward()
    assert largest[0] <= max(8 * V, V * (C + 3))


def test_compare_matches_torch(models):
    hidden, head, teacher_hidden, teacher_head = models
    labels = torch.arange(N)
    student_logits, teacher_logits = (
        hidden.double() @ head.double().T,
        teacher_hidden.double() @ teacher_head.double().T,
    )
    result, close = compare((hidden, head), (teacher_hidden, teacher_head), labels), {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(
        result[0].double(), functional.cross_entropy(student_logits, labels, reduction="none"), **close
    )
    torch.testing.assert_close(
        result[1].double(), functional.cross_entropy(teacher_logits, labels, reduction="none"), **close
    )
    divergence = functional.kl_div(
        student_logits.log_softmax(-1), teacher_logits.log_softmax(-1), log_target=True, reduction="none"
    )
    torch.testing.assert_close(result[2].double(), divergence.sum(-1), rtol=1e-4, atol=1e-6)
    assert torch.equal(result[3], student_logits.argmax(-1) == teacher_logits.argmax(-1))
