"""Calibration moments: second moments of a layer's inputs, and the Fisher and Gauss-Newton weights of its errors.

They are collected in one forward and one backward pass over the calibration windows, one layer at a time, in fp64: for
each layer the inputs' mean and covariance, the Fisher matrix of (k, v), and local Gauss-Newton weights of k and v.
docs/conversion.md has the formulas. Hidden states are stored on disk, so that memory does not grow with the number
of layers.

Legend: B windows, T tokens, H query heads, G KV heads, D head_dim, P = D/2 rotary pairs, I sampled query rows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mlaforge.checkpoint.layerwise import HEAD_ROWS, LayerStream
from mlaforge.families.spec import LayerSpec
from mlaforge.modeling.rope_mla import pairs, rotate
from mlaforge.runtime import progress
from mlaforge.tensor_store import TensorStore

# Query rows per window at which the Gauss-Newton weights are sampled, and keys drawn for each of them.
ROWS, DRAWS = 256, 4
# Variance added to every input direction, as a share of the mean: a short calibration text leaves directions without
# any weight.
MIN_VARIANCE = 1e-5
# Inputs of a layer that are stored for the ranges of codes: samples of all tokens, and the first tokens of every
# window, which all others attend to.
SAMPLES, FIRST = 4096, 4
# Weight of a token without gradient: if no token has one (o_proj is zero), all have the same weight.
MIN_IMPORTANCE = 1e-30


def roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root and inverse square root of Hermitian positive semi-definite matrices [..., n, n]."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(values[..., -1:].abs() * 1e-12 + 1e-300)
    root = (vectors * values.sqrt()[..., None, :]) @ vectors.mH
    return root, (vectors * values.rsqrt()[..., None, :]) @ vectors.mH


@dataclasses.dataclass
class LayerMoments:
    """Sums over the calibration tokens of one layer, fp64; the properties are per-token means.

    g_outer [2GD, 2GD]: gradients g of the loss by [k before RoPE; v], with labels sampled from the model.
    x_outer [hidden, hidden], x_sum [hidden], x_weight: the normalised inputs x of the projections, each token weighted
    by |g|². The loss of an error E x is E[(gᵀE x)²]; in a plain E[ggᵀ] ⊗ E[xxᵀ] the few tokens that all others attend
    to would dominate the scale of g, but hardly contribute to x. key_outer, query_outer [H, D, D]: scale² · Σ_j w_ij
    (R_{i-j} q_i)(·)ᵀ, and the same without the rotation. With norms on q and k, q_i is normalised and key_outer has
    J_jᵀ R_{i-j} q_i, J_j the Jacobian of the norm at key j. value_mix [H, H]: Σ_j a^h_ij a^h'_ij.   phase [H, P]
    complex, weight [H]: Σ w_ij e^{-iω(i-j)} and Σ w_ij. first [m, hidden] bf16: inputs x of every window's first FIRST
    tokens; samples [n, hidden] bf16: a sample of others. first_weight [m], sample_weight [n]: |g|², times the number of
    tokens that a sample represents.
    """

    x_outer: Tensor
    x_sum: Tensor
    g_outer: Tensor
    key_outer: Tensor
    query_outer: Tensor
    value_mix: Tensor
    phase: Tensor
    weight: Tensor
    samples: Tensor
    sample_weight: Tensor
    first: Tensor
    first_weight: Tensor
    x_weight: float = 0.0
    tokens: int = 0
    rows: int = 0

    @classmethod
    def empty(cls, layer: LayerSpec, hidden: int, device: torch.device) -> LayerMoments:
        H, D = layer.num_heads, layer.head_dim

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            zeros(hidden, hidden), zeros(hidden), zeros(layer.cached, layer.cached), zeros(H, D, D), zeros(H, D, D),
            zeros(H, H), zeros(H, D // 2, dtype=torch.complex128), zeros(H),
            zeros(0, hidden, dtype=torch.bfloat16), zeros(0), zeros(0, hidden, dtype=torch.bfloat16), zeros(0),
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields as tensors for safetensors; `from_tensors` restores them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        scalars = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in values.items()
                   if not isinstance(value, Tensor)}  # fmt: skip
        return {**values, **scalars, "phase": torch.view_as_real(self.phase)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> LayerMoments:
        rest = {name: tensor for name, tensor in tensors.items() if tensor.ndim and name != "phase"}
        return cls(
            **rest, phase=torch.view_as_complex(tensors["phase"]), x_weight=float(tensors["x_weight"]),
            tokens=int(tensors["tokens"]), rows=int(tensors["rows"]),
        )  # fmt: skip

    @property
    def mean(self) -> Tensor:
        """Weighted mean input, [hidden]."""
        return self.x_sum / self.x_weight

    @functools.cached_property
    def covariance(self) -> Tensor:
        """Weighted covariance of the input plus MIN_VARIANCE, [hidden, hidden]. Cached: only for complete moments."""
        measured = self.x_outer / self.x_weight - torch.outer(self.mean, self.mean)
        identity = torch.eye(len(measured), dtype=measured.dtype, device=measured.device)
        return measured + MIN_VARIANCE * measured.diagonal().mean() * identity

    @functools.cached_property
    def covariance_root(self) -> Tensor:
        """Square root of `covariance`."""
        return roots(self.covariance)[0]

    @property
    def fisher(self) -> Tensor:
        return self.g_outer / self.tokens

    @property
    def rho(self) -> Tensor:
        """Mean rotation E[e^{-iω(i-j)}] of each head's pairs, weighted by the effect of the distances, [H, P]."""
        return self.phase / self.weight.clamp_min(1e-300)[:, None]


def _gauss_newton(
    moments: LayerMoments, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, rope: tuple[Tensor, Tensor],
    w_o: Tensor, scale: float, generator: torch.Generator, sinks: Tensor | None = None,
    norms: tuple[nn.Module, nn.Module] | None = None,
) -> None:  # fmt: skip
    """Add one window's local Gauss-Newton weights at ROWS random query rows.

    q [H, T, D], k and v [G, T, D]: outputs of the projections; rope: cos and sin [T, P]; w_o [hidden, H·D]; sinks [H];
    norms: of q and k before RoPE.
    An error δk_j changes the output of head h by Σ_i a_ij (v_j - o_i) (∂logit_ij/∂k_j)·δk_j, projected by W_o.
    """
    T = q.shape[1]
    device = q.device
    projected = k
    if norms is not None:
        q, k = norms[0](q), norms[1](k)
    rows = torch.randperm(T, generator=generator)[:ROWS].sort().values.to(device)
    cos, sin = rope
    q_rot, k_rot = rotate(q, cos, sin), rotate(k, cos, sin)
    k_rot, v = (t.repeat_interleave(layer.group, dim=0) for t in (k_rot, v))
    q_rows = q_rot[:, rows]
    visible = torch.arange(T, device=device)[None] <= rows[:, None]
    if layer.window is not None:
        visible &= torch.arange(T, device=device)[None] > rows[:, None] - layer.window
    logits = (q_rows @ k_rot.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
    if sinks is None:
        a_HIT = torch.softmax(logits, dim=-1)
    else:
        # The sink is one more key with value zero: the other formulas are unchanged.
        a_HIT = torch.softmax(torch.cat((logits, sinks[:, None, None].expand(-1, len(rows), 1)), -1), -1)[..., :-1]
    moments.value_mix += torch.einsum("hit,git->hg", a_HIT, a_HIT).double()

    w_o_HND = w_o.view(w_o.shape[0], layer.num_heads, layer.head_dim).transpose(0, 1)
    gram = w_o_HND.transpose(1, 2) @ w_o_HND
    out = a_HIT @ v
    v_gram = v @ gram
    distance = (v_gram * v).sum(-1)[:, None] - 2 * out @ v_gram.transpose(1, 2)
    distance += ((out @ gram) * out).sum(-1)[..., None]
    w_HIT = a_HIT.square() * distance.clamp_min(0)
    total_HI = w_HIT.sum(-1)

    # Sample keys in proportion to their weight instead of summing over all of them.
    cdf = w_HIT.cumsum(-1)
    draw = torch.rand(*total_HI.shape, DRAWS, generator=generator).to(device) * total_HI[..., None]
    key_at = torch.searchsorted(cdf, draw).clamp_max(T - 1)
    share = (scale**2 * total_HI / DRAWS)[..., None].expand_as(draw).reshape(layer.num_heads, -1)
    # R_{i-j} q_i: the rotated query rotated back by j (including the scaling of cos and sin, once for both rotations).
    gradient = rotate(q_rows[:, :, None].expand(-1, -1, DRAWS, -1).flatten(1, 2)[:, None],
                      cos[key_at].flatten(1, 2), -sin[key_at].flatten(1, 2))[:, 0]  # fmt: skip
    if norms is not None:
        # The logit's gradient by the projected key: backward through the norm at that key.
        index = key_at.flatten(1)[..., None].expand(-1, -1, layer.head_dim)
        sampled_keys = projected.repeat_interleave(layer.group, dim=0).gather(1, index)
        gradient = torch.func.vjp(norms[1], sampled_keys)[1](gradient)[0]
    moments.key_outer += torch.einsum("hnd,hn,hne->hde", gradient, share, gradient).double()
    q_plain = q[:, rows]
    moments.query_outer += torch.einsum("hid,hi,hie->hde", q_plain, scale**2 * total_HI, q_plain).double()

    angle_cos = cos[rows][None, :, None] * cos[key_at] + sin[rows][None, :, None] * sin[key_at]
    angle_sin = sin[rows][None, :, None] * cos[key_at] - cos[rows][None, :, None] * sin[key_at]
    rotation = torch.complex(angle_cos.double(), -angle_sin.double())
    # cos and sin may contain an attention scaling; a phase has modulus one.
    rotation = rotation / rotation.abs().clamp_min(1e-300)
    draw_weight = (total_HI / DRAWS).double()
    moments.phase += torch.einsum("hinp,hi->hp", rotation, draw_weight.to(rotation.dtype))
    moments.weight += total_HI.double().sum(-1)
    moments.rows += len(rows)


@contextmanager
def _capture(attention: nn.Module, captured: dict[str, Any]) -> Iterator[None]:
    """Context in which each forward stores the attention's q, k, v, input and rotary tables in `captured`."""
    handles = []
    for name in ("q_proj", "k_proj", "v_proj"):

        def capture(_: nn.Module, args: Any, out: Tensor, name: str = name) -> None:
            out.retain_grad()
            captured[name] = out
            captured["x"] = args[0].detach()

        handles.append(getattr(attention, name).register_forward_hook(capture))

    def rope(_: nn.Module, args: Any, kwargs: Any) -> None:
        captured["rope"] = kwargs["position_embeddings"]

    handles.append(attention.register_forward_pre_hook(rope, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sampled_gradient(hidden_NC: Tensor, head: Tensor, generator: torch.Generator) -> Tensor:
    """Return dl/dhidden of l = -Σ log p(y), with y sampled from p; `head` [vocabulary, C] is applied to HEAD_ROWS rows
    at a time."""
    grads = []
    for rows in hidden_NC.split(HEAD_ROWS):
        p = torch.softmax((rows @ head.T).float(), dim=-1)
        cdf = p.cumsum(-1)
        draw = torch.rand(len(rows), 1, generator=generator).to(cdf.device) * cdf[:, -1:]
        y = torch.searchsorted(cdf, draw).clamp_max(p.shape[-1] - 1)
        p.scatter_add_(-1, y, torch.full_like(draw, -1.0))
        grads.append(p.to(rows.dtype) @ head)
    return torch.cat(grads)


def _seeded(*parts: int) -> torch.Generator:
    """Return a generator for one layer and window, so that samples do not depend on earlier ones."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))


class Observer(Protocol):
    """Observer of the loaded layers during calibration. It must store its results on disk: a resumed run does not
    repeat the calls."""

    def head(self, window: int, norm: Any, head: Tensor, hidden_BTC: Tensor) -> None:
        """Called with the last layer's output on a window, the final norm and the LM head."""

    def layer(self, index: int, layer: Any) -> AbstractContextManager[Callable[[dict[str, Any]], None]]:
        """Return a context manager of a function that takes each window's captured tensors (see `_capture`), in
        order."""


def collect(
    stream: LayerStream, layers: Collection[int], windows: Sequence[Tensor], store: TensorStore, seed: int,
    observer: Observer | None = None,
) -> None:  # fmt: skip
    """Collect the moments of `layers` in `store`, for `load`.

    windows: token ids [B, T] each. A forward pass stores every layer's inputs; the backward pass reads them from the
    last layer to the first of `layers`, one layer in memory at a time. Results that the store already has (of a killed
    run) are not computed again.
    """
    first, last = min(layers), stream.num_layers
    if not any(_backward_key(i) in store for i in range(first, last)):
        _forward(stream, windows, store, first)
        _head_gradient(stream, windows, store, seed, observer)
    for index in progress(range(last - 1, first - 1, -1), "calibrate, backward"):
        if _backward_key(index) not in store:
            _backward(stream, index, windows, store, index in layers, seed, observer)
            store[_backward_key(index)] = {}
        for prefix in (f"input-{index:03d}-", f"input-{index + 1:03d}-", f"gradient-{index + 1:03d}-"):
            store.drop(prefix)
    store.drop("gradient-")


def load(store: TensorStore, index: int, device: torch.device | str = "cpu") -> LayerMoments:
    """Load the moments of one layer that `collect` stored, to `device`."""
    return LayerMoments.from_tensors({name: t.to(device) for name, t in store[f"moments-{index:03d}"].items()})


def _backward_key(index: int) -> str:
    return f"backward-{index:03d}"


def _key(what: str, index: int, window: int) -> str:
    return f"{what}-{index:03d}-{window:04d}"


@torch.no_grad()
def _forward(stream: LayerStream, windows: Sequence[Tensor], store: TensorStore, first: int) -> None:
    """Store input-<layer>-<window> for every layer from `first` on; input-<num_layers> is the last one's output."""
    last, numbers = stream.num_layers, range(len(windows))
    start = max((i for i in range(last + 1) if all(_key("input", i, n) in store for n in numbers)), default=None)
    if start is None:
        start = 0
        for n, ids in enumerate(windows):
            store[_key("input", 0, n)] = {"x": stream.embed(ids)}
    for index in progress(range(start, last), "calibrate, forward", last - start):
        with stream.layer(index) as layer:
            for n in numbers:
                if _key("input", index + 1, n) not in store:
                    hidden = store[_key("input", index, n)]["x"].to(stream.device)
                    store[_key("input", index + 1, n)] = {"x": stream.run(layer, index, hidden)}
        if index < first:
            store.drop(f"input-{index:03d}-")


@torch.enable_grad()
def _head_gradient(
    stream: LayerStream, windows: Sequence[Tensor], store: TensorStore, seed: int, observer: Observer | None
) -> None:
    """Store the gradient of the sampled loss by the last layer's output, through the final norm."""
    last = stream.num_layers
    with stream.head() as (norm, head):
        for n in progress(range(len(windows)), "sample labels", len(windows)):
            if _key("gradient", last, n) in store:
                continue
            hidden = store[_key("input", last, n)]["x"].to(stream.device).requires_grad_(True)
            if observer is not None:
                observer.head(n, norm, head, hidden.detach())
            out = norm(hidden)
            with torch.no_grad():
                gradient = _sampled_gradient(out.detach().flatten(0, 1), head, _seeded(seed, n))
            out.backward(gradient.view_as(out))
            assert hidden.grad is not None
            store[_key("gradient", last, n)] = {"g": hidden.grad}


@torch.enable_grad()
def _backward(
    stream: LayerStream, index: int, windows: Sequence[Tensor], store: TensorStore, with_moments: bool, seed: int,
    observer: Observer | None,
) -> None:  # fmt: skip
    """Recompute one layer from its inputs and backpropagate through it; store gradient-<index> and its moments."""
    spec = stream.spec.layers[index]
    moments = LayerMoments.empty(spec, stream.spec.hidden_size, stream.device)
    stride = max(1, sum(ids.numel() for ids in windows) // SAMPLES)
    with stream.layer(index) as layer, observer.layer(index, layer) if observer else nullcontext() as observe:
        attention = layer.self_attn
        for n in range(len(windows)):
            hidden = store[_key("input", index, n)]["x"].to(stream.device).requires_grad_(True)
            captured: dict[str, Any] = {}
            with _capture(attention, captured):
                out = stream.run(layer, index, hidden)
            out.backward(store[_key("gradient", index + 1, n)]["g"].to(stream.device))
            assert hidden.grad is not None
            store[_key("gradient", index, n)] = {"g": hidden.grad}
            if observe is not None:
                observe(captured)
            if with_moments:
                _accumulate(
                    moments, spec, captured, attention, stream.spec.softmax_scale, _seeded(seed, index, n), stride
                )
    if with_moments:
        store[f"moments-{index:03d}"] = moments.tensors()


@torch.no_grad()
def _accumulate(
    moments: LayerMoments, layer: LayerSpec, captured: dict[str, Any], attention: Any, scale: float,
    generator: torch.Generator, stride: int,
) -> None:  # fmt: skip
    """Add one forward and backward pass of one layer, and store every `stride`-th input. Products are in fp32, sums in
    fp64."""
    x = captured["x"].flatten(0, 1).float()
    g = torch.cat((captured["k_proj"].grad, captured["v_proj"].grad), dim=-1).flatten(0, 1).float()
    moments.g_outer += (g.T @ g).double()
    importance = g.square().sum(-1) + MIN_IMPORTANCE
    moments.x_outer += ((x * importance[:, None]).T @ x).double()
    moments.x_sum += (importance @ x).double()
    moments.x_weight += float(importance.sum())
    moments.tokens += len(x)
    x_BTC, weight_BT = captured["x"].bfloat16(), importance.view(captured["x"].shape[:2]).double()
    first, rest = slice(0, FIRST), slice(FIRST, None, stride)
    moments.first = torch.cat((moments.first, x_BTC[:, first].flatten(0, 1)))
    moments.first_weight = torch.cat((moments.first_weight, weight_BT[:, first].flatten()))
    moments.samples = torch.cat((moments.samples, x_BTC[:, rest].flatten(0, 1)))
    moments.sample_weight = torch.cat((moments.sample_weight, stride * weight_BT[:, rest].flatten()))
    w_o = attention.o_proj.weight.float()
    sinks = attention.sinks.float() if layer.sinks else None
    norms = (attention.q_norm, attention.k_norm) if layer.qk_norm else None
    cos, sin = (pairs(table, layer.head_dim // 2).float() for table in captured["rope"])
    for b in range(captured["x"].shape[0]):
        q, k, v = (
            captured[name][b].detach().float().view(captured[name].shape[1], -1, layer.head_dim).transpose(0, 1)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        row = min(b, cos.shape[0] - 1)
        _gauss_newton(moments, layer, q, k, v, (cos[row], sin[row]), w_o, scale, generator, sinks, norms)
