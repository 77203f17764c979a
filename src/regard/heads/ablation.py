"""Ablate heads of a model, and measure the effect of each head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, ShapeError, nearest
from .output_projection import HeadProjection, head_projection, head_projections

Replace = Literal["zero", "mean"] | Mapping[str, Tensor]
Outputs = Mapping[str, nn.Module | str]


@contextmanager
def ablating(
    model: nn.Module,
    heads: Mapping[str, Iterable[int]],
    *,
    replace: Replace = "zero",
    outputs: Outputs | None = None,
) -> Iterator[None]:
    """Ablate some heads inside a `with` block: their input to the output projection is replaced.

    For models of `regard.nn` and of transformers, whatever computes their attention. Attention weights recorded in the
    block are not changed by it.

    Args:
        model: the model that the block runs.
        heads: the numbers of the heads, from 0, by the name of their attention module.
        replace: "zero" (Michel et al. 2019, arXiv 1905.10650, section 3), or "mean", the head's mean over all
            positions and sequences of the call: it removes what differs by token, and leaves the constant part. A
            call of one position, as in step-by-step decoding, has no such mean: there, and wherever later positions
            must not be read, give means of other text, (heads, width) by module, as `mean_outputs` returns them.
        outputs: the output projection, a module or its name, of attention modules where it is not found by name.

    Raises:
        ConfigurationError: a module or head that does not exist, heads that are no lists by module, an output
            projection that is not found, another `replace`, means that lack a module; in the block, a call of one
            position with "mean".
        ShapeError: means of another shape.

    >>> import torch, regard
    >>> layer = regard.nn.Attention(regard.nn.Projections(4, num_heads=2, bias=False))
    >>> model, x = torch.nn.Sequential(layer), torch.randn(1, 3, 4)
    >>> with ablating(model, {"0": [0, 1]}):
    ...     model(x).abs().max().item()
    0.0
    """
    if not isinstance(replace, Mapping) and replace not in ("zero", "mean"):
        raise ConfigurationError(f"replace needs 'zero', 'mean', or means by module; it is {replace!r}")
    with ExitStack() as hooks:
        for name, chosen in _checked_mapping(heads).items():
            projection = head_projection(model, name, outputs)
            numbers = _checked_heads(name, chosen, projection.heads)
            batch_first = getattr(model.get_submodule(name), "batch_first", True) is not False
            instead = _mean_of_call(name, batch_first) if replace == "mean" else _constant(name, projection, replace)
            hook = _ReplaceHeads(projection, numbers, instead)
            hooks.callback(projection.module.register_forward_pre_hook(hook).remove)
        yield


def mean_outputs(model: nn.Module, run: Callable[[], Any], *, outputs: Outputs | None = None) -> dict[str, Tensor]:
    """The mean output of each head over all positions and sequences of all calls in `run`, (heads, width) by module.

    `ablating(..., replace=means)` puts them in the place of heads, the same ones at each position of each call: so a
    step of decoding is ablated as the whole sequence is. Padded positions count as any other: run text without them.

    Args:
        model: the model that `run` runs.
        run: takes no argument and runs the model on some text, once or several times, without autograd.
        outputs: output projections, as in `ablating`.

    Returns the means, in float32 at least, of the modules that were called: a head's part of what its output
    projection reads.

    Raises:
        ConfigurationError: no attention module of the model was called.

    >>> import torch, regard
    >>> layer = regard.nn.Attention(regard.nn.Projections(4, num_heads=2), mask=regard.masks.causal())
    >>> model, text = torch.nn.Sequential(layer), torch.randn(5, 7, 4)
    >>> means = mean_outputs(model, lambda: model(text))
    >>> means["0"].shape
    torch.Size([2, 2])
    >>> with ablating(model, {"0": [0, 1]}, replace=means):
    ...     whole, step = model(text), model(text[:, :1])
    >>> torch.allclose(whole[:, :1], step)
    True
    """
    found = head_projections(model, outputs)
    sums = {name: _OutputSums(projection) for name, projection in found.items()}
    with ExitStack() as hooks, torch.no_grad():
        for name, projection in found.items():
            hooks.callback(projection.module.register_forward_pre_hook(sums[name]).remove)
        run()
    means = {name: each.total / each.count for name, each in sums.items() if each.count}
    if not means:
        raise ConfigurationError(
            f"mean_outputs found {len(found)} attention modules, of which none was called: run needs to run the model "
            "on at least one position, and a model whose heads can be told apart"
        )
    return means


def head_effects(
    model: nn.Module,
    measure: Callable[[], float | Tensor],
    heads: Mapping[str, Iterable[int]] | None = None,
    *,
    replace: Replace = "zero",
    outputs: Outputs | None = None,
) -> dict[str, dict[int, float]]:
    """The change of a number when one head is ablated, for each head: measure without it - measure with it.

    `measure` takes no argument, runs the model and returns a number, such as its loss on some text. It is called once,
    and once for each head, without autograd.

    Args:
        model: the model that `measure` runs.
        measure: runs the model and returns the number.
        heads: the heads to ablate, by the name of their attention module; by default all heads of all known modules.
        replace: what replaces the output of a head, as in `ablating`.
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
    heads = _checked_mapping(heads)
    effects: dict[str, dict[int, float]] = {}
    with torch.no_grad():
        baseline = float(measure())
        for name, chosen in heads.items():
            effects[name] = {}
            for head in chosen:
                with ablating(model, {name: [head]}, replace=replace, outputs=outputs):
                    effects[name][head] = float(measure()) - baseline
    return effects


def head_gradients(
    model: nn.Module, measure: Callable[[], Tensor], *, outputs: Outputs | None = None
) -> dict[str, Tensor]:
    """Σ o · ∂S/∂o over the output o of each head, (heads,) per module: the first-order change of S from ablating it.

    It equals gradient × attention summed over all pairs of the head, and takes one forward and one backward pass for
    all heads. The `.grad` of the model's parameters does not change.

    Args:
        model: the model that `measure` runs.
        measure: takes no argument, runs the model with autograd and returns S, one number.
        outputs: output projections, as in `ablating`.

    Raises:
        ConfigurationError: no output projection is found in the model, or S depends on none of its heads.

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
            hooks.callback(projection.module.register_forward_pre_hook(_CollectInputs(inputs[name])).remove)
        result = measure()
    collected = [(name, tensor) for name in found for tensor in inputs[name]]
    if not collected or not result.requires_grad:
        raise ConfigurationError(
            f"head_gradients found {len(found)} attention modules, of which {sum(map(bool, inputs.values()))} were "
            "called: measure needs to run the model with autograd, and a model whose heads can be told apart"
        )
    gradients = torch.autograd.grad(result, [tensor for _, tensor in collected], allow_unused=True)
    sums = {name: torch.zeros(projection.heads) for name, projection in found.items()}
    for (name, tensor), gradient in zip(collected, gradients, strict=True):
        if gradient is not None:
            product = (tensor.detach() * gradient).unflatten(-1, (found[name].heads, -1))
            sums[name] = sums[name].to(product) + product.sum(-1).flatten(0, -2).sum(0)
    return sums


class _ReplaceHeads:
    """A forward pre-hook that replaces the part of some heads in the input of an output projection.

    instead: of the parts of all heads, (..., heads, width), to what replaces them, (heads, width) or a number.
    """

    def __init__(self, projection: HeadProjection, heads: list[int], instead: Callable[[Tensor], Tensor]) -> None:
        self.projection, self.heads, self.instead = projection, heads, instead

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = _parts(self.projection, inputs[0])
        chosen = torch.zeros(self.projection.heads, 1, dtype=torch.bool, device=parts.device)
        chosen[self.heads] = True
        return (torch.where(chosen, self.instead(parts), parts).flatten(-2), *inputs[1:])


def _mean_of_call(name: str, batch_first: bool) -> Callable[[Tensor], Tensor]:
    """A function of the parts of all heads: their mean over positions and sequences."""

    def mean(parts: Tensor) -> Tensor:
        positions = parts.shape[-3 if batch_first else 0]
        if positions == 1:
            raise ConfigurationError(
                f"replace='mean' takes the mean over the positions of a call, and {name!r} was called with one, as a "
                "step of decoding is: give the means of a whole text, as replace=regard.heads.mean_outputs(model, run)"
            )
        return parts.flatten(0, -3).mean(0)

    return mean


def _constant(name: str, projection: HeadProjection, replace: Replace) -> Callable[[Tensor], Tensor]:
    """A function of the parts of all heads: zero, or the means that were given, in their dtype and on their device."""
    if not isinstance(replace, Mapping):
        return lambda parts: parts.new_zeros(())
    if name not in replace:
        raise ConfigurationError(f"replace has no means of {name!r}; {nearest(name, replace)}")
    means, needs = replace[name], (projection.heads, projection.width)
    if tuple(means.shape) != needs:
        raise ShapeError(
            f"the means of {name!r} have the shape {tuple(means.shape)}; they need {needs}, (heads, width)"
        )
    return means.to


class _OutputSums:
    """A forward pre-hook that adds up the outputs of heads over all positions of all calls."""

    def __init__(self, projection: HeadProjection) -> None:
        self.projection, self.count = projection, 0
        self.total = torch.zeros(projection.heads, projection.width, device="cpu")

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        rows = _parts(self.projection, inputs[0]).detach().flatten(0, -3)
        dtype = torch.promote_types(rows.dtype, torch.float32)
        self.total = self.total.to(rows.device, dtype) + rows.sum(0, dtype=dtype)
        self.count += len(rows)


def _parts(projection: HeadProjection, features: Tensor) -> Tensor:
    """The input of an output projection by heads, (..., heads, width)."""
    return features.unflatten(-1, (projection.heads, projection.width))


class _CollectInputs:
    """A forward pre-hook that collects the inputs of an output projection, as tensors that require a gradient."""

    def __init__(self, collected: list[Tensor]) -> None:
        self.collected = collected

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tensor = inputs[0] if inputs[0].requires_grad else inputs[0].detach().requires_grad_()
        self.collected.append(tensor)
        return (tensor, *inputs[1:])


def _checked_mapping(heads: Mapping[str, Iterable[int]]) -> Mapping[str, Iterable[int]]:
    """Check that the heads are a mapping from names of modules to lists of numbers."""
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


def _checked_heads(name: str, chosen: Iterable[int], heads: int) -> list[int]:
    numbers = list(chosen)
    wrong = [head for head in numbers if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < heads]
    if wrong:
        raise ConfigurationError(f"{name!r} has the heads 0 to {heads - 1}; it was asked for {wrong[0]!r}")
    return numbers
