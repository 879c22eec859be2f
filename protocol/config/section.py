"""The base class of every section of the config tree, and the number types that sections share."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
"""A whole number of at least 1."""
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A decay factor in [0, 1)."""
Weight = Annotated[float, Field(ge=0.0)]
"""A weight of at least 0."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share in [0, 1]."""


def _are_custom(resources: dict[str, float]) -> dict[str, float]:
    for name in resources:
        if name in RAYS_OWN:
            raise ValueError(f"custom resources must have names of their own, got {name!r}: set cpus or gpus instead")
    return resources


RAYS_OWN = ("CPU", "GPU", "memory", "object_store_memory")
CustomResources = Annotated[dict[str, Annotated[float, Field(gt=0.0)]], AfterValidator(_are_custom)]
"""Custom Ray resources by name, each above 0."""


class Section(BaseModel):
    """Base class of a section: frozen; it refuses unknown keys, and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def require_both_sides(what: str, height: int | None, width: int | None) -> None:
    """Check that both sides of an image are given, or none.

    Args:
        what: the section that holds them.
        height: in pixels.
        width: in pixels.

    Raises:
        ValueError: one of them is missing.
    """
    if (height is None) != (width is None):
        raise ValueError(f"{what}.height and {what}.width must be given together, got {height} and {width}")
