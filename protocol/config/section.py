"""The base class of every section of the config tree, and the number types that sections share."""

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
"""A whole number of at least 1."""
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A decay factor in [0, 1)."""
Weight = Annotated[float, Field(ge=0.0)]
"""A weight of at least 0."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share in [0, 1]."""
WORD_OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""Marks a key that has the value `off`, which YAML reads as false unless it is quoted."""


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

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if _has_wrong_truth_value(value, annotation):
            many = isinstance(value, list | tuple | dict)
            raise PydanticCustomError("number", "input should hold numbers" if many else "input should be a number")
        return value


def _has_wrong_truth_value(value: Any, annotation: Any) -> bool:
    """Tell whether a number of this annotation is given as a truth value, also one in a list or a mapping."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    kinds = _kinds_of(annotation)
    if isinstance(value, bool):
        return bool(kinds & {int, float}) and not kinds & {bool, Any}
    return any(
        _has_wrong_truth_value(each, inner)
        for each in held
        for kind in kinds
        if get_origin(kind) in (tuple, dict)
        for inner in get_args(kind)
        if inner is not Ellipsis
    )


def _kinds_of(annotation: Any) -> set[Any]:
    """Return the types of a field's annotation; a list or a mapping counts as one type, with its items' types."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return set().union(*map(_kinds_of, get_args(annotation)))
    is_kind = isinstance(annotation, type) or annotation is Any or get_origin(annotation) in (tuple, dict)
    return {annotation} if is_kind else set()


def require_both_sides(what: str, height: int | None, width: int | None) -> None:
    """Check that both sides of an image are given, or none.

    Args:
        what: the section that holds them.

    Raises:
        ValueError: one of them is missing.
    """
    if (height is None) != (width is None):
        raise ValueError(f"{what}.height and {what}.width must be given together, got {height} and {width}")
