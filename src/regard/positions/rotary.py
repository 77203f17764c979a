"""Rotary position embeddings (RoPE): pairs of features of queries and keys are rotated by position-dependent angles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.torch_modes import under_transform
from ..errors import ConfigurationError, DeviceError, DtypeError, ShapeError, nearest
from .frequencies import Scaling, angles, check_base, check_dim, check_positions, geometric
from .sections import Axial, RotarySections

Layout = Literal["half", "interleaved"]
LAYOUTS = ("half", "interleaved")

# Numbers that are rotated at a time on a CPU. Intermediate products of this size reuse memory; those of a whole long
# sequence are allocated from the system each time, which takes several times as long as the arithmetic.
NUMBERS_AT_ONCE = 1 << 19


def apply_rotary(tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate each pair (x, y) of the first features to (x cos - y sin, x sin + y cos); copy the other features.

    Shapes: tensor (..., length, head_dim), cos and sin (..., length, dim/2) that broadcast with it.
    """
    if (
        tensor.device.type == "cpu"
        and tensor.numel() > NUMBERS_AT_ONCE
        and not (under_transform() or cos.requires_grad)
    ):
        return ChunkedRotary.apply(tensor, cos, sin, layout)  # type: ignore[return-value]
    return _rotate(tensor, cos, sin, layout)


class ChunkedRotary(torch.autograd.Function):
    """`apply_rotary` in chunks along the length, with the same numbers as for the whole tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)
        ctx.layout = layout
        length = tensor.shape[-2]
        rows = max(1, NUMBERS_AT_ONCE * length // tensor.numel())
        result = torch.empty_like(tensor)
        chunks = (whole.split(rows, dim=-2) for whole in (tensor, cos, sin, result))
        for chunk, chunk_cos, chunk_sin, out in zip(*chunks, strict=True):
            out.copy_(_rotate(chunk, chunk_cos, chunk_sin, layout))
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return apply_rotary(upstream[0], cos, -sin, ctx.layout), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        cos, sin = ctx.saved_tensors
        return apply_rotary(tangents[0], cos, sin, ctx.layout)


def _rotate(tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """`apply_rotary` for the whole tensor at once."""
    dim = 2 * cos.shape[-1]
    x, y = _pairs(tensor[..., :dim], layout)
    features = _features(x * cos - y * sin, x * sin + y * cos, layout).to(tensor.dtype)
    return features if dim == tensor.shape[-1] else torch.cat([features, tensor[..., dim:]], dim=-1)


def _pairs(features: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Split features into the first and the second of each pair: two tensors (..., dim/2)."""
    if layout == "half":
        x, y = features.chunk(2, dim=-1)
    else:
        x, y = features.unflatten(-1, (-1, 2)).unbind(-1)
    return x, y


def _features(x: Tensor, y: Tensor, layout: Layout) -> Tensor:
    """The inverse of `_pairs`: (..., dim)."""
    return torch.cat([x, y], dim=-1) if layout == "half" else torch.stack([x, y], dim=-1).flatten(-2)


@dataclass(frozen=True)
class Rotary:
    """(x, y) -> (x cos a - y sin a, x sin a + y cos a), a = p · base^(-2i/dim): pair i of a vector at position p.

    The dot product of a rotated query and a rotated key depends on the difference of their positions alone. There are
    no parameters; any device, floating-point dtype and position works, also negative positions.

    - `dim`: the number of features that are rotated, the first ones; the others are unchanged.
    - `layout`: the features of pair i. "half": i and i + dim/2, as in GPT-NeoX and in Llama's checkpoints of
      transformers. "interleaved": 2i and 2i + 1, as in the paper, in GPT-J and in Meta's own Llama checkpoints.
    - `scaling`: how frequencies change for sequences longer than those in training: `LinearScaling`, `NTK`,
      `DynamicNTK`, `YaRN`, `Llama3`, `LongRoPE`.

    - `sections`: positions along several axes, as of pictures and films: `Sections` and `InterleavedSections` for
      M-RoPE, `Axial` for rows and columns. `rotation` then takes a tuple of positions, one tensor for each axis; a
      single tensor stands for all of them, as for text.

    Layers with the same positions can share `rotation(positions)`, which is computed once and rotates many tensors.

    Raises:
        ConfigurationError: a dim that is odd or below 2, a base that is not above 1, an unknown layout, a scaling or
            sections of another type, or that do not fit the dim or each other.

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.2.2.

    >>> rotary = Rotary(dim=2)
    >>> rotary.rotate(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """

    dim: int
    base: float = 10000.0
    layout: Layout = "half"
    scaling: Scaling | None = None
    sections: RotarySections | None = None

    def __post_init__(self) -> None:
        check_dim("Rotary", self.dim)
        check_base("Rotary", self.base)
        if self.layout not in LAYOUTS:
            raise ConfigurationError(f"Rotary has no layout {self.layout!r}; {nearest(str(self.layout), LAYOUTS)}")
        if self.scaling is not None:
            if not isinstance(self.scaling, Scaling):
                raise ConfigurationError(
                    f"Rotary needs a scaling of regard.positions, LinearScaling(factor=2.0) for instance; it is "
                    f"{self.scaling!r}"
                )
            self.frequencies(torch.zeros(1, dtype=torch.int64, device="cpu"))  # a scaling may not fit every dim
        if self.sections is not None:
            self._check_sections(self.sections)

    def _check_sections(self, sections: object) -> None:
        if not isinstance(sections, RotarySections):
            raise ConfigurationError(
                "Rotary needs sections of regard.positions, such as Sections((16, 24, 24)), InterleavedSections or "
                f"Axial; they are {sections!r}"
            )
        sections.axis_of_pairs(self.dim // 2)  # they may not fit every dim
        if self.scaling is not None and isinstance(sections, Axial):
            raise ConfigurationError(
                f"Rotary with {sections!r} has frequencies of its own for each axis, which {self.scaling!r} does not "
                "scale: leave scaling out, or use Sections"
            )

    def frequencies(self, positions: Tensor) -> Tensor:
        """The frequency of each pair for a sequence at these positions: (dim/2,), radians per position.

        Only the scalings `DynamicNTK` and `LongRoPE` depend on the positions: the largest one, plus 1, is the length of
        the sequence.

        >>> Rotary(dim=4, base=100.0).frequencies(torch.arange(3))
        tensor([1.0000, 0.1000], dtype=torch.float64)
        """
        if self.scaling is None and self.sections is not None:
            return self.sections.frequencies(self.dim, self.base, positions.device)
        if self.scaling is None:
            return geometric(self.dim, self.base, positions.device)
        return self.scaling.frequencies(self.dim, self.base, positions)

    def rotation(self, positions: Tensor | Sequence[Tensor], *, dtype: torch.dtype = torch.float32) -> Rotation:
        """The cosines and sines at the given positions, which rotate any number of tensors.

        Shapes: positions (length,), or (*batch, length) if they differ between sequences; with `sections` also a tuple
        of such tensors, one for each axis: `tuple(position_ids)` of transformers' (3, batch, length). Angles are
        computed in double precision, also under autocast. `dtype` is that of cosines and sines: float64 for float64
        tensors, float32 for all others.

        Raises:
            DtypeError: positions that are not whole numbers, or a dtype other than these two.
            ShapeError: positions without an axis, or not one tensor for each axis.

        >>> rotary = Rotary(dim=4)
        >>> rotation = rotary.rotation(torch.arange(7))
        >>> query, key = rotation.rotate(torch.ones(2, 8, 7, 4)), rotation.rotate(torch.ones(2, 2, 7, 4))
        >>> query.shape, key.shape
        (torch.Size([2, 8, 7, 4]), torch.Size([2, 2, 7, 4]))
        """
        several = isinstance(positions, tuple | list)
        at = self._along_axes(positions) if several else positions
        check_positions(self, at)  # type: ignore[arg-type]
        if not isinstance(at, Tensor) or at.ndim == several:
            raise ShapeError(
                f"{self} needs positions of the shape (length,) or (*batch, length); these have no axis: call "
                ".unsqueeze(0)"
            )
        if dtype not in (torch.float32, torch.float64):
            raise DtypeError(
                f"a rotation needs cosines and sines in torch.float32 or torch.float64; dtype is {dtype}. "
                "Rotated tensors may be narrower, and keep their dtype"
            )
        frequencies = self.frequencies(at)
        if several and self.sections is not None:
            axis = torch.tensor(self.sections.axis_of_pairs(self.dim // 2), device=at.device)
            radians = at.movedim(0, -1)[..., axis].to(frequencies.dtype) * frequencies  # [..., length, dim/2]
        else:
            radians = angles(at, frequencies)  # [..., length, dim/2]
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return Rotation((magnitude * radians.cos()).to(dtype), (magnitude * radians.sin()).to(dtype), self.layout)

    def _along_axes(self, positions: Sequence[Tensor]) -> Tensor:
        """The positions of each axis, (axes, ..., length)."""
        axes = 0 if self.sections is None else self.sections.axes
        if len(positions) != axes:
            raise ShapeError(
                f"{self} got the positions of {len(positions)} axes; it needs "
                + (f"those of {axes}, one tensor for each" if axes else "one tensor, as it has no sections")
            )
        for each in positions:
            check_positions(self, each)
        return torch.stack(torch.broadcast_tensors(*positions))

    def rotate(self, tensor: Tensor, positions: Tensor | Sequence[Tensor]) -> Tensor:
        """Queries or keys rotated by their positions: `rotation(positions).rotate(tensor)`; see there for shapes."""
        wide = isinstance(tensor, Tensor) and tensor.dtype == torch.float64
        return self.rotation(positions, dtype=torch.float64 if wide else torch.float32).rotate(tensor)


@dataclass(frozen=True, eq=False)
class Rotation:
    """The cosines and sines of a `Rotary` at given positions, each (*batch, length, dim/2), and its layout."""

    cos: Tensor
    sin: Tensor
    layout: Layout

    def rotate(self, tensor: Tensor) -> Tensor:
        """Queries or keys, rotated; shape and dtype do not change.

        Shapes: (..., heads, length, head_dim), with the same positions for all heads, (batch, length, head_dim) or
        (length, head_dim). Products are computed in float32 at least and rounded once.

        Raises:
            DtypeError: a tensor that is not floating point.
            DeviceError: a tensor on another device than the positions.
            ShapeError: a head_dim below the dim of the rotation, or a shape that does not fit the positions.
        """
        self._check(tensor)
        cos, sin = self.cos, self.sin
        if cos.ndim > 2 and tensor.ndim >= 4:
            cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # the same for every head
        return apply_rotary(tensor, cos, sin, self.layout)

    def _check(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            has = tensor.dtype if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise DtypeError(f"a rotation needs a floating-point tensor; this is {has}")
        if tensor.device != self.cos.device:
            raise DeviceError(
                f"the tensor to rotate is on {tensor.device}, but the positions of the rotation are on "
                f"{self.cos.device}: move one of them with .to(device)"
            )
        dim, shape = 2 * self.cos.shape[-1], tuple(tensor.shape)
        if tensor.ndim < 2:
            raise ShapeError(
                f"a rotation needs (..., heads, length, head_dim), (batch, length, head_dim) or (length, head_dim); "
                f"this tensor has the shape {shape}"
            )
        if shape[-1] < dim:
            raise ShapeError(
                f"a rotation of {dim} features cannot rotate a tensor whose head_dim is {shape[-1]} (shape {shape}): "
                f"create Rotary with a dim of {shape[-1]} or less"
            )
        positions = tuple(self.cos.shape[:-1])
        axes = (*shape[:-3], shape[-2]) if tensor.ndim >= 4 else shape[:-1]
        fitting = all(size in (1, axis) for size, axis in zip(positions[-2::-1], axes[-2::-1], strict=False))
        if len(positions) > len(axes) or positions[-1] != axes[-1] or not fitting:
            raise ShapeError(
                f"positions of the shape {positions} do not fit a tensor of the shape {shape}: they need "
                f"({axes[-1]},), one for each of its {axes[-1]} tokens, or {axes} if sequences have their own"
            )
