"""What a model does without some of its heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError
from .output_projection import HeadProjection, head_projection, head_projections

Replace = Literal["zero", "mean"]
Outputs = Mapping[str, nn.Module | str]


@contextmanager
def ablating(
    model: nn.Module,
    heads: Mapping[str, Iterable[int]],
    *,
    replace: Replace = "zero",
    outputs: Outputs | None = None,
) -> Iterator[None]:
    """Run a model without some heads: what they give to the output projection of their attention is replaced.

    Works in models of `regard.nn` and of transformers, whatever computes their attention; weights that are looked at
    meanwhile are those of the heads all the same.

    Args:
        model: what the block runs.
        heads: by the name of the attention module, the numbers of the heads, from 0.
        replace: "zero" (Michel et al. 2019, arXiv 1905.10650, section 3), or "mean", the head's mean over all
            positions and sequences of the call, which takes what it says of each token and leaves what it always adds.
        outputs: the output projection of attention modules that do not show which it is, the module or its name.

    Raises:
        ConfigurationError: a module or a head that is not there, heads that are no lists by module, an output
            projection that cannot be told, another `replace`.

    >>> import torch, regard
    >>> layer = regard.nn.Attention(regard.nn.Projections(4, num_heads=2, bias=False))
    >>> model, x = torch.nn.Sequential(layer), torch.randn(1, 3, 4)
    >>> with ablating(model, {"0": [0, 1]}):
    ...     model(x).abs().max().item()
    0.0
    """
    if replace not in get_args(Replace):
        raise ConfigurationError(f"replace needs 'zero' or 'mean'; it is {replace!r}")
    with ExitStack() as hooks:
        for name, chosen in _by_module(heads).items():
            projection = head_projection(model, name, outputs)
            hook = _Replacing(projection, _checked(name, chosen, projection.heads), replace)
            hooks.callback(projection.module.register_forward_pre_hook(hook).remove)
        yield


def head_effects(
    model: nn.Module,
    measure: Callable[[], float | Tensor],
    heads: Mapping[str, Iterable[int]] | None = None,
    *,
    replace: Replace = "zero",
    outputs: Outputs | None = None,
) -> dict[str, dict[int, float]]:
    """How a number changes when each head is taken away by itself: measure without it - measure with it.

    `measure` takes nothing, runs the model and gives a number, such as its loss on some text; it is called once, and
    once for each head, without autograd.

    Args:
        model: the model that `measure` runs.
        measure: what is looked at.
        heads: by the name of the attention module the heads asked about; all heads of all known modules without it.
        replace: what stands for a head's output, as in `ablating`.
        outputs: output projections, as in `ablating`.

    Returns the changes by module and head. Raises what `ablating` raises.

    >>> import torch, regard
    >>> model, x = torch.nn.Sequential(regard.nn.Attention(regard.nn.Projections(4, num_heads=2))), torch.randn(1, 3, 4)
    >>> effects = head_effects(model, lambda: model(x).square().mean())
    >>> list(effects), list(effects["0"])
    (['0'], [0, 1])
    """
    if heads is None:
        heads = {name: range(found.heads) for name, found in head_projections(model, outputs).items()}
    heads = _by_module(heads)
    effects: dict[str, dict[int, float]] = {}
    with torch.no_grad():
        whole = float(measure())
        for name, chosen in heads.items():
            effects[name] = {}
            for head in chosen:
                with ablating(model, {name: [head]}, replace=replace, outputs=outputs):
                    effects[name][head] = float(measure()) - whole
    return effects


def head_gradients(
    model: nn.Module, measure: Callable[[], Tensor], *, outputs: Outputs | None = None
) -> dict[str, Tensor]:
    """Σ o · ∂S/∂o over the output o of each head: to the first order what S loses without it, (heads,) a module.

    It equals gradient × attention summed over all pairs of the head, and takes one forward and one backward pass for
    all heads. The gradients of the model's parameters are not touched.

    Args:
        model: the model that `measure` runs.
        measure: takes nothing, runs the model with autograd and gives S, one number.
        outputs: output projections, as in `ablating`.

    Raises:
        ConfigurationError: no head can be told apart in the model, or S does not depend on any.

    Source: Michel et al. 2019 (arXiv 1905.10650), section 4.1, who take its absolute value for each example.

    >>> import torch, regard
    >>> model, x = torch.nn.Sequential(regard.nn.Attention(regard.nn.Projections(4, num_heads=2))), torch.randn(1, 3, 4)
    >>> head_gradients(model, lambda: model(x).sum())["0"].shape
    torch.Size([2])
    """
    found = head_projections(model, outputs)
    inputs: dict[str, list[Tensor]] = {name: [] for name in found}
    with ExitStack() as hooks, torch.enable_grad():
        for name, projection in found.items():
            hooks.callback(projection.module.register_forward_pre_hook(_Keeping(inputs[name])).remove)
        result = measure()
    kept = [(name, tensor) for name in found for tensor in inputs[name]]
    if not kept or not result.requires_grad:
        raise ConfigurationError(
            f"head_gradients found {len(found)} attention modules, of which {sum(map(bool, inputs.values()))} were "
            "called: measure needs to run the model with autograd, and a model whose heads can be told apart"
        )
    gradients = torch.autograd.grad(result, [tensor for _, tensor in kept], allow_unused=True)
    sums = {name: torch.zeros(projection.heads) for name, projection in found.items()}
    for (name, tensor), gradient in zip(kept, gradients, strict=True):
        if gradient is not None:
            product = (tensor.detach() * gradient).unflatten(-1, (found[name].heads, -1))
            sums[name] = sums[name].to(product) + product.sum(-1).flatten(0, -2).sum(0)
    return sums


class _Replacing:
    """A hook that replaces the part of some heads in the input of an output projection."""

    def __init__(self, projection: HeadProjection, heads: list[int], replace: Replace) -> None:
        self.projection, self.heads, self.replace = projection, heads, replace

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = inputs[0].unflatten(-1, (self.projection.heads, self.projection.width))
        chosen = torch.zeros(self.projection.heads, 1, dtype=torch.bool, device=parts.device)
        chosen[self.heads] = True
        means = parts.flatten(0, -3).mean(0) if self.replace == "mean" else torch.zeros_like(parts[:0].sum())
        return (torch.where(chosen, means, parts).flatten(-2), *inputs[1:])


class _Keeping:
    """A hook that keeps the input of an output projection, with a gradient."""

    def __init__(self, kept: list[Tensor]) -> None:
        self.kept = kept

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tensor = inputs[0] if inputs[0].requires_grad else inputs[0].detach().requires_grad_()
        self.kept.append(tensor)
        return (tensor, *inputs[1:])


def _by_module(heads: Mapping[str, Iterable[int]]) -> Mapping[str, Iterable[int]]:
    """The heads as they are given, if they are lists of numbers by the names of modules."""
    if not isinstance(heads, Mapping):
        raise ConfigurationError(
            f"heads needs the numbers of heads by the name of their module, such as {{'name': [0, 1]}}; it is {heads!r}"
        )
    for name, chosen in heads.items():
        if not isinstance(chosen, Iterable):
            raise ConfigurationError(
                f"heads of {name!r} need to be a list of numbers, such as [0]; they are {chosen!r}"
            )
    return heads


def _checked(name: str, chosen: Iterable[int], heads: int) -> list[int]:
    numbers = list(chosen)
    wrong = [head for head in numbers if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < heads]
    if wrong:
        raise ConfigurationError(f"{name!r} has the heads 0 to {heads - 1}; it was asked for {wrong[0]!r}")
    return numbers
