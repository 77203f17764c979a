"""What the sections of an experiment have in common, and the kinds of numbers in them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _refuse_truth_values(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("needs to be a number")
    return value


def _expand_shorthand(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


NotTruth = BeforeValidator(_refuse_truth_values)
Count = Annotated[int, NotTruth, Field(ge=1)]
WholeNumber = Annotated[int, NotTruth, Field(ge=0)]
Positive = Annotated[float, NotTruth, Field(gt=0)]
Share = Annotated[float, NotTruth, Field(ge=0, lt=1)]
Shorthand = BeforeValidator(_expand_shorthand)


class Settings(BaseModel):
    """A section: unknown keys are refused, values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
