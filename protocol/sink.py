"""How any part of a run reports more than numbers: conditions, which hold for a while, and events.

A condition has Kubernetes' fields: a type, whether it holds, a reason in one word, a message in one line. A condition
that holds is good.
"""

from typing import Protocol

CONDITIONS = {
    "BaseModel": "The model is not a distilled few-step model. Otherwise training blurs its images.",
    "BoardConnected": "The run reaches its status board. Otherwise (also if the board's memory is full) the page shows"
    " old numbers and training continues. The newest 100 metric lines and all else wait in memory, earlier lines in the"
    " run folder; the run tries again after 2, 4, then every 5 seconds. An embedded board that died is started again,"
    " and a foreign or damaged value on a board is written again. An emptied board (`FLUSHALL`) has lost ended runs and"
    " waiting commands.",
    "BoardLease": "The run's lease on a shared board is held. Otherwise only the run folder's lease protects it.",
    "CheckpointsWritten": "The newest checkpoint is on disk. Otherwise it is written again after the next iteration.",
    "ClusterFits": "At the run's start the cluster had room for all actors, and nodes with their labels. Otherwise some"
    " wait for nodes to join.",
    "GalleryWritten": "Images and scores of the newest evaluation are in `gallery/`.",
    "Guard": "The guard's rule holds. Otherwise the run gets a warning or ends, as the guard says.",
    "LearnerReady": "The learner group works. Otherwise a new group continues from the newest checkpoint.",
    "LocalSettings": "`--local` follows every setting of the rewards. Otherwise the named ones have no effect.",
    "MetricsWritten": "`metrics.jsonl` can be written. Otherwise its lines are kept in memory and written later.",
    "NativeSize": "Images have the model's own size or more. Otherwise larger ones may show grids after training.",
    "NegativePrompts": "Negative prompts take effect. At `model.guidance` 1 there is no branch for them.",
    "OneWriter": "No other process has taken the run over. Otherwise this process ends without writing.",
    "PageServed": "The page of the run is served on loopback.",
    "PoolSettled": "A pool has its desired number of ready actors. Otherwise the reason says what it waits for:"
    " `Unschedulable`, no node has had room for 30 s; `Yields`, a role without an actor gets room first; `ActorsFail`,"
    " the newest start failed; `Starting`; `Leaving`.",
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
