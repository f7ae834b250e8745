"""Which implementation of an op runs: the first of an order that accepts, or the one the caller names.

An implementation refuses by NotImplementedError with the reason, before it builds anything. The last of every order is
`ref`, which accepts whatever the op's api does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def run_first(
    op: str, implementations: Mapping[str, Callable[..., Any]], order: Sequence[str], backend: str | None
) -> Callable[..., Any]:
    """A function that calls `backend`, or without one the first of `order` that does not refuse.

    Raises ValueError for a backend that is not there, NotImplementedError with every reason if all refuse.
    """
    if backend is not None:
        if backend not in implementations:
            raise ValueError(f"{op} has no backend {backend!r}; it has: {', '.join(implementations)}.")
        return implementations[backend]

    def call(*args: Any, **kwargs: Any) -> Any:
        reasons = []
        for name in order:
            try:
                return implementations[name](*args, **kwargs)
            except NotImplementedError as refusal:
                reasons.append(f"{name}: {refusal}")
        raise NotImplementedError(f"no backend of {op} accepts these arguments. {' '.join(reasons)}")

    return call


def run_first_with(
    op: str,
    implementations: Mapping[str, Callable[..., Any]],
    order: Sequence[str],
    backend: str | None,
    **options: Any,
) -> Callable[..., Any]:
    """`run_first`, where every implementation but "ref" takes `options`."""

    def told(name: str) -> Callable[..., Any]:
        call = implementations[name]
        return call if name == "ref" else lambda *args: call(*args, **options)

    return run_first(op, {name: told(name) for name in implementations}, order, backend)
