"""The chunked distillation loss against the plain formula and autograd."""

import pytest
import torch
from torch.nn import functional

from mlaforge.training import kl_loss
from mlaforge.training.kl_loss import NO_LABEL, Hidden, TopK, compare, distillation_loss, top_k

N, C, V = 37, 12, 50


@pytest.fixture
def models(monkeypatch):
    """Student's and teacher's hidden states and heads; chunks that do not divide N."""
    monkeypatch.setattr(kl_loss, "ROWS", 8)
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=draw, dtype=torch.float32) for shape in ((N, C), (V, C), (N, C + 3), (V, C + 3))
    ]


def labels():
    found = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))
    found[[3, 8, N - 1]] = NO_LABEL
    return found


def plain(hidden, head, wanted, temperature, kl_weight, lm_weight):
    """The formula, on whole logits in fp64. wanted: the teacher's logits."""
    ours = hidden.double() @ head.double().T
    p, q = (wanted.double() / temperature).softmax(-1), (ours / temperature).log_softmax(-1)
    divergence = temperature**2 * (p * (p.log() - q)).sum(-1).mean()
    text = functional.cross_entropy(ours, labels(), ignore_index=NO_LABEL)
    return kl_weight * divergence + lm_weight * text, divergence, text


@pytest.mark.parametrize(("temperature", "kl_weight", "lm_weight"), [(1.0, 1.0, 0.0), (2.0, 0.7, 0.3), (0.5, 0.0, 1.0)])
def test_the_plain_formula_and_its_gradients(models, temperature, kl_weight, lm_weight):
    hidden, head, their_hidden, their_head = models
    hidden, head = hidden.requires_grad_(True), head.requires_grad_(True)
    wanted = plain(hidden, head, their_hidden @ their_head.T, temperature, kl_weight, lm_weight)
    expected = torch.autograd.grad(3 * wanted[0], (hidden, head))
    found = distillation_loss(
        hidden, head, Hidden(their_hidden, their_head), temperature, kl_weight, labels(), lm_weight
    )
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-5, atol=1e-6)
    if lm_weight:
        torch.testing.assert_close(found[2].double(), wanted[2], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(3 * found[0], (hidden, head)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_frozen_head_gets_no_gradient(models):
    hidden, head, their_hidden, their_head = models
    distillation_loss(hidden.requires_grad_(True), head, Hidden(their_hidden, their_head))[0].backward()
    assert hidden.grad is not None and head.grad is None


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kept_logits_are_one_outcome_each_and_the_rest_one_more(models, temperature):
    hidden, head, their_hidden, their_head = models
    hidden = hidden.requires_grad_(True)
    kept = top_k(their_hidden, their_head, 5, temperature)
    ours = (hidden.double() @ head.double().T / temperature).softmax(-1)
    theirs = (their_hidden.double() @ their_head.double().T / temperature).softmax(-1)
    tokens = theirs.topk(5, dim=-1).indices
    p, q = (
        torch.cat((x.gather(-1, tokens), 1 - x.gather(-1, tokens).sum(-1, keepdim=True)), dim=-1)
        for x in (theirs, ours)
    )
    wanted = temperature**2 * (p * (p / q).log()).sum(-1).mean()
    found = distillation_loss(hidden, head, kept, temperature)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(found, hidden)[0], torch.autograd.grad(wanted, hidden)[0], rtol=1e-3, atol=1e-6
    )


def test_all_logits_kept_are_all_logits(models):
    hidden, head, their_hidden, their_head = models
    whole = distillation_loss(hidden, head, Hidden(their_hidden, their_head), 2.0)[0]
    kept = distillation_loss(hidden, head, top_k(their_hidden, their_head, V, 2.0), 2.0)[0]
    torch.testing.assert_close(kept, whole, rtol=1e-4, atol=1e-5)


def test_a_teacher_that_is_certain_leaves_numbers(models):
    hidden, head, _, _ = models
    hidden = hidden.requires_grad_(True)
    logits = torch.zeros(N, 2)
    logits[:, 0] = 200.0
    kept = TopK(logits, torch.arange(2).expand(N, 2).int(), logits.logsumexp(-1))
    found = distillation_loss(hidden, head, kept, 1.0)[0]
    found.backward()
    assert torch.isfinite(found) and torch.isfinite(hidden.grad).all()


def test_never_more_logits_than_a_chunk_has(models, monkeypatch):
    """The point of it: no tensor of N x V is made, neither forward nor backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest[0] = max(largest[0], tensor.numel())
            return out

    hidden, head, their_hidden, their_head = models
    hidden = hidden.requires_grad_(True)
    with Watch():
        distillation_loss(hidden, head, Hidden(their_hidden, their_head), labels_N=labels(), lm_weight=1.0)[
            0
        ].backward()
    assert largest[0] <= max(8 * V, V * (C + 3))


def test_comparison(models):
    hidden, head, their_hidden, their_head = models
    labels = torch.arange(N)
    ours, theirs = hidden.double() @ head.double().T, their_hidden.double() @ their_head.double().T
    found, close = compare((hidden, head), (their_hidden, their_head), labels), {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found[0].double(), functional.cross_entropy(ours, labels, reduction="none"), **close)
    torch.testing.assert_close(found[1].double(), functional.cross_entropy(theirs, labels, reduction="none"), **close)
    divergence = functional.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="none")
    torch.testing.assert_close(found[2].double(), divergence.sum(-1), rtol=1e-4, atol=1e-6)
    assert torch.equal(found[3], ours.argmax(-1) == theirs.argmax(-1))
