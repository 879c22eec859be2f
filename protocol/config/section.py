"""The base class of every section of the config tree, and the number types that sections share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
"""A whole number of at least 1."""
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A decay factor in [0, 1)."""
Weight = Annotated[float, Field(ge=0.0)]
"""A weight of at least 0."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share in [0, 1]."""


class Section(BaseModel):
    """Base class of a section: frozen; it refuses unknown keys, and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
