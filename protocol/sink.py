"""How any part of a run reports more than numbers: conditions, which hold for a while, and events.

A condition has Kubernetes' fields: a type, whether it holds, a reason in one word, a message in one line. A condition
that holds is good.
"""

from typing import Protocol

CONDITIONS = {
    "BaseModel": "The model is not a distilled few-step model. Otherwise training blurs its images.",
    "BoardConnected": "The run reaches its status board. Otherwise the page shows old numbers; training continues.",
    "BoardLease": "The run's lease on a shared board is held. Otherwise only the run folder's lease protects it.",
    "CheckpointsWritten": "The newest checkpoint is on disk. Otherwise it is written again after the next iteration.",
    "ClusterFits": "The cluster has room for all actors. Otherwise some wait for nodes to join.",
    "GalleryWritten": "Images and scores of the newest evaluation are in `gallery/`.",
    "Guard": "The guard's rule holds. Otherwise the run gets a warning or ends, as the guard says.",
    "LearnerReady": "The learner group works. Otherwise a new group continues from the newest checkpoint.",
    "LocalSettings": "`--local` follows every setting of the rewards. Otherwise the named ones have no effect.",
    "MetricsWritten": "`metrics.jsonl` can be written. Otherwise its lines are kept in memory and written later.",
    "NativeSize": "Images have the model's own size or more. Otherwise larger ones may show grids after training.",
    "NegativePrompts": "Negative prompts take effect. At `model.guidance` 1 there is no branch for them.",
    "OneWriter": "No other process has taken the run over. Otherwise this process ends without writing.",
    "PageServed": "The page of the run is served on loopback.",
    "PoolSettled": "A pool has its desired number of ready actors. Otherwise the message says what it waits for.",
    "PromptsApart": "No held-out prompt is trained on. Otherwise its score measures memory.",
    "PromptsEnough": "Training draws each prompt 20 times at most. Otherwise the model may learn the prompts by heart.",
    "PromptsFit": "Every prompt fits the text encoder. Otherwise the ends of the long ones are lost.",
    "PromptsPlain": "A prompt file holds prompts, not rows of a table. Otherwise other cells are part of the prompts.",
    "SameVersions": "Code and libraries are the same as at the checkpoint. Otherwise results may differ.",
    "ScoresComplete": "A reward gives a score to every image. Otherwise scores are missing, never 0.",
    "SecretsKept": "No secret was sent as an environment variable of Ray's, which Ray logs and shows.",
    "StatusShown": "The status document could be made.",
    "StatusWritten": "`status.json` can be written.",
    "Tracker": "The tracker takes its lines. Otherwise it misses them; the run folder has them.",
}
"""What each type of condition says when it holds and what follows when it does not; `/NAME` may follow a type."""


class StatusSink(Protocol):
    """Implemented by `deploy.monitor.journal.RunJournal`; may be called from any thread and never fails."""

    def condition(self, type: str, holds: bool | None, reason: str, message: str) -> None:  # noqa: A002, FBT001
        """State that something holds (good), does not hold, or is unknown (None).

        Args:
            type: what the condition is about, such as `ClusterFits`; there is one condition of a type.
            reason: one word in CamelCase, for programs.
            message: one line for people.
        """
        ...

    def event(self, message: str, kind: str = "info") -> None:
        """Report that something happened; `kind` is `info`, `warning`, `error` or a word of its own."""
        ...
