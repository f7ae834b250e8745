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


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginKey:
    """The program that makes the destination of a layer that moves in parts: its pool as far as it stays in place."""

    route: Route

    def __str__(self) -> str:
        return f"begin {self.route.src}->{self.route.dst}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKey:
    """A program that moves one of `parts` parts of a layer, with another layer's step beside it when there is one."""

    route: Route  # its `sends` and `locals` are those of a part
    parts: int
    beside: StepKey | None = None

    def __str__(self) -> str:
        beside = f" beside {self.beside}" if self.beside else ""
        return f"part of {self.route.src}->{self.route.dst}{beside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverKey:
    """The program that takes rows between layers from the order of one layout's bucket to that of another."""

    src: Layout
    dst: Layout
    src_bucket: Bucket
    dst_bucket: Bucket

    def __str__(self) -> str:
        return f"rows {self.src} {self.src_bucket} -> {self.dst} {self.dst_bucket}"


@dataclass(frozen=True, slots=True)
class ResetKey:
    """The program that sets the token counts of a slot."""

    def __str__(self) -> str:
        return "reset slot"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheckKey:
    """The program that looks for indices out of bounds in what a step is handed."""

    layout: Layout
    bucket: Bucket
    pages: int

    def __str__(self) -> str:
        return f"check {self.layout} {self.bucket}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCheckKey:
    """The program that looks for indices out of bounds in a round of a switch's maps."""

    route: Route

    def __str__(self) -> str:
        return f"check {self.route.src}->{self.route.dst}"


Key = StepKey | SwitchKey | BeginKey | PartKey | HandoverKey | ResetKey | StepCheckKey | SwitchCheckKey
