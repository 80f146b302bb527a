"""One family of errors. Each says what, where, the numbers, and what to do."""

from __future__ import annotations

_LONGEST = 3000  # most characters of an error, which may quote a whole file


def _cut(text: str) -> str:
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} … {text[-half:]}"


class AutoplanError(ValueError):
    """An error that the caller can fix. `hint` says how."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message, self.hint = _cut(message), _cut(hint)
        super().__init__(f"{self.message}\n  → {self.hint}" if hint else self.message)


class SourceError(AutoplanError):
    """A model could not be found or built."""


class CaptureError(AutoplanError):
    """A model's forward could not be run, or inputs could not be made for it."""


class OutsideError(AutoplanError):
    """A run of a model reaches weights past the model itself, where copies and shards cannot replace them."""


class IndivisibleError(AutoplanError):
    """A dim that would have to be split is not divisible by the tensor-parallel size."""


class PlanFileError(AutoplanError):
    """A plan file cannot be read."""


class PlanMismatchError(AutoplanError):
    """A plan was made for another model, mesh or size."""


class PlanRefusedError(AutoplanError):
    """A plan that a person wrote failed its audit, before it was applied."""


class UnprovenPlanWarning(UserWarning):
    """A plan that could not be verified is applied."""


class UntestedVersionWarning(UserWarning):
    """torch or transformers is newer than any release that autoplan was tested with."""
