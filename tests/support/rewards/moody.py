"""A reward server that answers 500 to a third of all requests, by a seed."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from deploy.api.auth import Access
from deploy.api.rewards import make_app
from rewards.scorer import build_scorer
from tests.support.rewards.reward_servers import Here, reward_service


@contextmanager
def moody_server(seed: int) -> Iterator[tuple[str, Counter[int]]]:
    """Its address, and how often it answered what."""
    from fastapi import Request, Response

    numbers = random.Random(seed)
    answered: Counter[int] = Counter()
    app = make_app(
        {"redness": Here(build_scorer("tests.support.rewards.judges:Redness"))}, Access(host="127.0.0.1", token=None)
    )

    @app.middleware("http")
    async def moody(request: Request, call_next) -> Response:
        if request.method == "POST" and numbers.random() < 1 / 3:
            answered[500] += 1
            return Response("not now", status_code=500)
        answered[200] += 1
        return await call_next(request)

    with reward_service(app) as url:
        yield url, answered
