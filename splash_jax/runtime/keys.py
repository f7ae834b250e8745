"""What a program is looked up by."""

from dataclasses import dataclass

from splash_jax.ownership import Bucket, Layout
from splash_jax.runtime.transfer import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKey:
    """A program of an ordinary step. `part` is "embed", "head", "score" or a layer kind."""

    part: str
    layout: Layout
    bucket: Bucket
    pages: int

    def __str__(self) -> str:
        return f"{self.part} {self.layout} {self.bucket}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchKey:
    """A program of a switch: a layer's transfer, with the layer before it computed beside it when `kind` is set.

    With `more` it is a further round of a gather that one round could not hold.
    """

    route: Route
    kind: str | None = None
    bucket: Bucket | None = None
    more: bool = False

    def __str__(self) -> str:
        beside = f" beside {self.kind} {self.bucket}" if self.kind else ""
        return f"transfer {self.route.src}->{self.route.dst}{' (more)' if self.more else ''}{beside}"


@dataclass(frozen=True, slots=True)
class ResetKey:
    """The program that sets the token counts of a slot."""

    def __str__(self) -> str:
        return "reset slot"


Key = StepKey | SwitchKey | ResetKey
