from deploy.library import (
    Assessed,
    Comparison,
    Outcome,
    Run,
    RunConfig,
    compare,
    evaluate,
    evaluate_async,
    load_config,
    read_run,
    train,
    train_async,
)

__all__ = [
    "Assessed",
    "Comparison",
    "Outcome",
    "Run",
    "RunConfig",
    "compare",
    "evaluate",
    "evaluate_async",
    "load_config",
    "read_run",
    "train",
    "train_async",
]
