"""The exception tree. Every class takes one string (so that it pickles across Ray): the rule, the value, the remedy.

FlowcreditError
├── InputError           the user's mistake: one line on stderr, exit code 2, nothing written
│   ├── ConfigError      unknown preset or key, wrong type, value out of range
│   ├── PromptError      a prompt file that is missing or has a broken line
│   ├── ModelError       a model folder that is missing, of another family, or binds no LoRA module
│   ├── RunFolderError   a run folder that cannot be written, or that belongs to another config
│   └── ScorerError      a scorer that cannot be found or built
├── LeaseLostError       another process took this run over while this one was silent
├── BoardError           the status board does not answer, or refuses what was asked
├── ContractError        a part of the program broke its promise: wrong length, NaN, out of range, digest differs
├── ParityError          learner and rollout compute different log-probs from equal adapter
├── CheckpointError      a checkpoint that is partial, truncated or altered
├── NonFiniteError       latents, rewards, loss or gradient hold NaN or infinity
├── PoolError            a pool of remote actors used up its restarts, or a call its deadline
├── RewardError          an image got no score after all tries, and the policy is to fail
├── LearnerFailedError     the learner died or hangs: the run goes on from its newest checkpoint
├── ShardLostError       trajectories or images went down with their node: they are drawn again
├── GuardError           a guard against silent wrongness stops the run
└── StaleAdapterError    a rollout actor holds another policy version than the request asks for
"""


class FlowcreditError(Exception):
    """Root of everything this project raises on purpose."""


LONGEST_LINE = 400
"""Characters that `one_line` keeps: enough for a cause and its remedy, short enough for a condition or a log line."""


def one_line(error: object) -> str:
    """Return the message of an exception (or a text) as one bounded line; its type's name if there is no message."""
    return " ".join(str(error).split())[:LONGEST_LINE] or type(error).__name__


class InputError(FlowcreditError):
    """The user can mend this: shown as one line, exit code 2."""


class ConfigError(InputError):
    """Unknown preset or key, wrong type, value out of range."""


class PromptError(InputError):
    """A prompt file is missing or has a broken line."""


class ModelError(InputError):
    """A model folder is missing, belongs to another family, or no module takes the LoRA."""


class RunFolderError(InputError):
    """A run folder cannot be written, or belongs to another config."""


class ScorerError(InputError):
    """A scorer cannot be found or built."""


class LeaseLostError(FlowcreditError):
    """Another process took this run over while this one was silent; this one stops without writing."""


class BoardError(FlowcreditError):
    """The status board does not answer, or refuses what was asked."""


class ContractError(FlowcreditError):
    """A part of the program broke its promise."""


class ParityError(FlowcreditError):
    """Learner and rollout compute different log-probs from equal adapter."""


class CheckpointError(FlowcreditError):
    """A checkpoint is partial, truncated or altered."""


class NonFiniteError(FlowcreditError):
    """Latents, rewards, loss or gradient hold NaN or infinity."""


class PoolError(FlowcreditError):
    """A pool of remote actors used up its restarts, or a call its deadline."""


class RewardError(FlowcreditError):
    """An image got no score after all tries, and the failure policy is to fail."""


class LearnerFailedError(FlowcreditError):
    """The learner died or hangs; a new one goes on from the newest checkpoint."""


class ShardLostError(FlowcreditError):
    """Trajectories or images were lost with the node that held them; the same request draws them again."""


class GuardError(FlowcreditError):
    """A guard against silent wrongness stops the run; the message names the guard, its rule and the value."""


class StaleAdapterError(FlowcreditError):
    """A rollout actor holds another policy version than the request asks for."""
