"""Run a step, or a step with a switch inside it, layer by layer. The host only dispatches.

A switch has two references, made of the same pieces. *Blocking* is `move_all`, waited for, and then the ordinary step
in the destination; it is a mode of the switch. *Target-ready* is `move_all` at some earlier time and then `run_step`
without a switch: what the step costs once the state is there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from splash_jax.layouts import local_spec
from splash_jax.models.deepseek_v3_weights import layer_kind
from splash_jax.ownership import Bucket, Layout
from splash_jax.runtime.batch import Batch
from splash_jax.runtime.checks import STEP_CHECKS, check_state, raise_faults
from splash_jax.runtime.keys import Key, StepCheckKey, StepKey, SwitchKey
from splash_jax.runtime.placing import to_devices
from splash_jax.runtime.programs import Programs
from splash_jax.runtime.sampler import Drawn, SamplerState
from splash_jax.runtime.switch import Switch, SwitchMode


@dataclass(slots=True)
class DeviceState:
    """Everything on the devices that a step reads or writes. Pools, sampler state and moving weights are donated."""

    weights: dict[str, Any]  # see `deepseek_v3_weights.model_leaves`
    pools: list[jax.Array]  # per layer [T, pages, page_size, width]
    sampler: SamplerState
    layout: Layout
    pages: int

    def __post_init__(self) -> None:
        """Raise `ConfigError` unless every array is live and every layer has a pool of its own, as the layout wants."""
        check_state(self)


class StepInputs(NamedTuple):
    """A batch on the devices."""

    rows: jax.Array
    local: jax.Array
    picks: jax.Array
    floats: jax.Array
    ints: jax.Array


def put_batch(programs: Programs, layout: Layout, bucket: Bucket, pages: int, batch: Batch) -> StepInputs:
    """Send a batch to the devices, in one transfer. With `debug_checks` raises `BoundsError` for a bad index."""
    every, dealt = NamedSharding(programs.mesh, P()), NamedSharding(programs.mesh, local_spec(layout))
    inputs = StepInputs(*to_devices(batch, (every, dealt, every, dealt, dealt)))
    if programs.shapes.debug_checks:
        key = StepCheckKey(layout=layout, bucket=bucket, pages=pages)
        raise_faults(f"a step in {layout}, bucket {bucket}", STEP_CHECKS, programs.get(key)(*inputs))
    return inputs


class Results(NamedTuple):
    """What a step leaves for the host to read: `drawn`, or with scoring the logits f32[rows, V]."""

    drawn: Drawn
    logits: jax.Array | None


def run_step(
    programs: Programs, state: DeviceState, bucket: Bucket, batch: Batch, *, score: bool = False,
    switch: Switch | None = None,
) -> Results:  # fmt: skip
    """Dispatch one step in `state.layout`, or, with `switch`, in its destination: `state` is updated in place.

    The switch moves layer i's state in the program that computes layer i - 1; the first layer's state moves before it.
    Each layer's old arrays are gone when its transfer is done. A blocking switch moves everything first.
    """
    return prepare_step(programs, state, bucket, batch, score=score, switch=switch)()


def prepare_step(
    programs: Programs, state: DeviceState, bucket: Bucket, batch: Batch, *, score: bool = False,
    switch: Switch | None = None,
) -> Callable[[], Results]:  # fmt: skip
    """Look up or compile a step's programs and send its batch to the devices.

    What this raises has left `state` as it was. Calling what it returns, once, dispatches the step.
    """
    layout, pages = (state.layout, state.pages) if switch is None else (switch.route.dst, switch.route.dst_pages)
    for key in _step_keys(programs, state, bucket, layout, pages, score, switch):
        programs.get(key)
    inputs = put_batch(programs, layout, bucket, pages, batch)
    return partial(_dispatch, programs, state, bucket, inputs, score, switch)


def _step_keys(
    programs: Programs, state: DeviceState, bucket: Bucket, layout: Layout, pages: int, score: bool,
    switch: Switch | None,
) -> Iterator[Key]:  # fmt: skip
    """Keys of all programs that `_dispatch` calls."""
    kinds = [_kind(programs, i) for i in range(len(state.pools))]
    if switch is not None and not switch.route.moves_nothing:
        yield SwitchKey(route=switch.route)
        if len(switch.rounds) > 1:
            yield SwitchKey(route=switch.route, more=True)
        if switch.mode is not SwitchMode.BLOCKING:
            *beside, last = kinds
            for kind in dict.fromkeys(beside):
                yield SwitchKey(route=switch.route, kind=kind, bucket=bucket)
            kinds = [last]
    for part in ("embed", *dict.fromkeys(kinds), "head", *(("score",) if score else ())):
        yield StepKey(part=part, layout=layout, bucket=bucket, pages=pages)


def _dispatch(
    programs: Programs, state: DeviceState, bucket: Bucket, inputs: StepInputs, score: bool, switch: Switch | None
) -> Results:
    if switch is not None and switch.mode is SwitchMode.BLOCKING:
        move_all(programs, state, switch)
        switch = None
    if switch is not None:
        state.layout, state.pages = switch.route.dst, switch.route.dst_pages
        switch = None if switch.route.moves_nothing else switch
    layout, pages = state.layout, state.pages
    step = lambda part: programs.get(StepKey(part=part, layout=layout, bucket=bucket, pages=pages))  # noqa: E731
    x = step("embed")(state.weights["embed"], state.sampler.last, inputs.rows)
    if switch is not None:
        _move(programs, state, 0, switch)
    for i in range(len(state.pools)):
        if switch is not None and i + 1 < len(state.pools):
            x = _compute_and_move_next(programs, state, bucket, inputs, x, i, switch)
        else:
            x, state.pools[i] = step(_kind(programs, i))(
                state.weights["layers"][i], x, state.pools[i], inputs.rows, inputs.local
            )
    head = {"final_norm": state.weights["final_norm"], "lm_head": state.weights["lm_head"]}
    logits = step("score")(head, x) if score else None
    state.sampler, drawn = step("head")(head, state.sampler, x, inputs.picks, inputs.floats, inputs.ints)
    return Results(drawn, logits)


def move_all(programs: Programs, state: DeviceState, switch: Switch) -> None:
    """Move the state of every layer to a switch's destination, nothing beside it, and wait until it is there."""
    state.layout, state.pages = switch.route.dst, switch.route.dst_pages
    if switch.route.moves_nothing:
        return
    for i in range(len(state.pools)):
        _move(programs, state, i, switch)
    jax.block_until_ready([state.pools, [layer["moved"] for layer in state.weights["layers"]]])


def _kind(programs: Programs, layer: int) -> str:
    return layer_kind(programs.shapes.model, layer)


def _move(programs: Programs, state: DeviceState, i: int, switch: Switch) -> None:
    """Move layer i's state."""
    layer, pool = state.weights["layers"][i], state.pools[i]
    old = layer["moved"], pool
    layer["moved"], state.pools[i] = programs.get(SwitchKey(route=switch.route))(*old, *switch.rounds[0])
    _end_move(programs, state, i, switch, old)


def _compute_and_move_next(
    programs: Programs, state: DeviceState, bucket: Bucket, inputs: StepInputs, x: jax.Array, i: int, switch: Switch
) -> jax.Array:
    """Compute layer i and move layer i + 1's state, in one program."""
    layers, pools = state.weights["layers"], state.pools
    key = SwitchKey(route=switch.route, kind=_kind(programs, i), bucket=bucket)
    old = layers[i + 1]["moved"], pools[i + 1]
    x, pools[i], layers[i + 1]["moved"], pools[i + 1] = programs.get(key)(
        layers[i], x, pools[i], inputs.rows, inputs.local, *old, *switch.rounds[0]
    )
    _end_move(programs, state, i + 1, switch, old)
    return x


def _end_move(programs: Programs, state: DeviceState, i: int, switch: Switch, old: Any) -> None:
    """Free layer i's old arrays, then move what its first round had no room for."""
    free(old)
    for maps in switch.rounds[1:]:
        state.pools[i] = programs.get(SwitchKey(route=switch.route, more=True))(state.pools[i], *maps)


def free(arrays: Any) -> None:
    """Free donated arrays whose buffers could not be reused: JAX keeps those alive."""
    for array in jax.tree.leaves(arrays):
        if not array.is_deleted():
            array.delete()
