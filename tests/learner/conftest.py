"""Tests of the learner build many policies of the tiny pipeline: its text encoders are loaded once."""

from collections.abc import Callable

import pytest

from protocol.config.run import RunConfig


@pytest.fixture(scope="session")
def tiny_config(
    tiny_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., RunConfig]:
    """`tiny_config(...)` with the embeddings of all prompts in a cache."""
    cache = str(tmp_path_factory.mktemp("embeddings"))
    return lambda **sections: tiny_config(
        **sections | {"model": {"embedding_cache": cache} | sections.get("model", {})}
    )
