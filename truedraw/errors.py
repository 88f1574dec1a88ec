"""The exception tree. Every message is one line: the value, what is allowed, what to do.

TruedrawError
├── UsageError                what was asked for cannot be done: nothing has run yet
│   ├── InvalidParameter      a field outside its range (carries name, value, allowed)
│   ├── PromptError           a prompt that is empty or longer than the context
│   ├── ModelNotFound         no such model file, registry name or cached hub file
│   ├── ModelFileError        the file exists and is not a usable model
│   ├── CorpusError           a corpus that is missing, binary, damaged, of another tokenizer or too large
│   ├── IncompatibleModels    target, drafter and rule do not go together
│   └── MissingExtra          an optional package is not installed
└── RunError                  something failed while running
    ├── RowError              a row that is no distribution: NaN or +inf
    │   └── NoTokenLeft       bias, penalties or a constraint leave no token of a sound row
    ├── ConstraintError       a constraint broke its contract (a mask of the wrong kind)
    ├── RuleError             an acceptance rule that no exact law allows
    ├── ProposalError         a drafter broke its contract (a token its own q cannot have drawn)
    ├── RunnerError           the runner could not compute a pass
    ├── RollbackUnsupported   the cache of this model cannot forget tokens
    ├── ConversionError       a model file could not be converted
    └── TemplateError         the model's chat template failed
"""

from __future__ import annotations


class TruedrawError(Exception):
    """Base of everything that truedraw raises on purpose."""


class UsageError(TruedrawError):
    """What was asked for cannot be done; nothing has run yet."""


class InvalidParameter(UsageError, ValueError):
    """A field outside its range."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name, self.value, self.allowed = name, value, allowed
        super().__init__(f"{name} is {value!r}: allowed is {allowed}")


class PromptError(UsageError):
    """A prompt that is empty or longer than the context."""


class ModelNotFound(UsageError):
    """No such model file, registry name or cached hub file."""


class ModelFileError(UsageError):
    """The file exists and is not a usable model."""


class CorpusError(UsageError):
    """A corpus that is missing, binary, damaged, of another tokenizer or larger than its bound."""


class IncompatibleModels(UsageError):
    """Target, drafter and rule do not go together."""


class MissingExtra(UsageError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'truedraw[{extra}]'")


class RunError(TruedrawError):
    """Something failed while running."""


class RowError(RunError):
    """A row that is no distribution: NaN or +inf."""


class NoTokenLeft(RowError):
    """A sound row of which bias, penalties or a constraint leave no token."""


class ConstraintError(RunError):
    """A constraint broke its contract."""


class RuleError(RunError):
    """An acceptance rule that accepts more than an exact law allows, or that cannot exist."""


class ProposalError(RunError):
    """A drafter broke its contract."""


class RunnerError(RunError):
    """The runner could not compute a pass."""


class RollbackUnsupported(RunError):
    """The cache of this model cannot forget tokens."""


class ConversionError(RunError):
    """A model file could not be converted."""


class TemplateError(RunError):
    """The model's chat template failed."""


def one_line(error: Exception) -> str:
    """What an error of somebody else's says, or else its kind."""
    return " ".join(str(error).split())[:200] or type(error).__name__
