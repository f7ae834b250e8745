"""Run a step, or a step with a switch inside it, layer by layer. The host only dispatches; nothing here waits."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from splash_jax.layouts import local_spec
from splash_jax.models.deepseek_v3_weights import layer_kind
from splash_jax.ownership import Bucket, Layout, SwitchPlan
from splash_jax.runtime.batch import Batch
from splash_jax.runtime.programs import Programs, StepKey, SwitchKey
from splash_jax.runtime.sampler import Drawn, SamplerState
from splash_jax.runtime.transfer import Maps, Route, make_maps


@dataclass(slots=True)
class DeviceState:
    """Everything on the devices that a step reads or writes. Pools, sampler state and moving weights are donated."""

    weights: dict[str, Any]  # see `deepseek_v3_weights.model_leaves`
    pools: list[jax.Array]  # per layer [T, pages, page_size, width]
    sampler: SamplerState
    layout: Layout
    pages: int


class StepInputs(NamedTuple):
    """A batch on the devices."""

    rows: jax.Array
    local: jax.Array
    picks: jax.Array
    floats: jax.Array
    ints: jax.Array


def put_batch(mesh: Mesh, layout: Layout, batch: Batch) -> StepInputs:
    """Send a batch to the devices, one transfer for all of it."""
    every, dealt = NamedSharding(mesh, P()), NamedSharding(mesh, local_spec(layout))
    return StepInputs(*jax.device_put(tuple(batch), (every, dealt, every, dealt, dealt)))


class Results(NamedTuple):
    """What a step leaves for the host to read: `drawn`, or with scoring the logits f32[rows, V]."""

    drawn: Drawn
    logits: jax.Array | None


def run_step(
    programs: Programs, state: DeviceState, bucket: Bucket, batch: Batch, *, score: bool = False,
    switch: tuple[SwitchPlan, Route] | None = None,
) -> Results:  # fmt: skip
    """Dispatch one step in `state.layout`, or, with `switch`, in its destination: `state` is updated in place.

    The switch moves layer i's state in the program that computes layer i - 1; the first layer's state moves before it.
    Each layer's old arrays are gone when its transfer is done.
    """
    if switch is not None:
        state.layout, state.pages = switch[1].dst, switch[1].dst_pages
    if switch is not None and switch[1].moves_nothing:
        switch = None
    layout, pages = state.layout, state.pages
    inputs = put_batch(programs.mesh, layout, batch)
    step = lambda part: programs.get(StepKey(part=part, layout=layout, bucket=bucket, pages=pages))  # noqa: E731
    x = step("embed")(state.weights["embed"], state.sampler.last, inputs.rows)
    if switch is None:
        for i in range(len(state.pools)):
            x, state.pools[i] = step(kind_of(programs, i))(
                state.weights["layers"][i], x, state.pools[i], inputs.rows, inputs.local
            )
    else:
        x = _run_layers_switching(programs, state, bucket, inputs, x, *switch)
    head = {"final_norm": state.weights["final_norm"], "lm_head": state.weights["lm_head"]}
    logits = step("score")(head, x) if score else None
    state.sampler, drawn = step("head")(head, state.sampler, x, inputs.picks, inputs.floats, inputs.ints)
    return Results(drawn, logits)


def kind_of(programs: Programs, layer: int) -> str:
    return layer_kind(programs.shapes.model, layer)


def _run_layers_switching(
    programs: Programs,
    state: DeviceState,
    bucket: Bucket,
    inputs: StepInputs,
    x: jax.Array,
    plan: SwitchPlan,
    route: Route,
) -> jax.Array:
    rounds = [_put_maps(programs, route, maps) for maps in make_maps(route, plan.kv)]
    layers, pools = state.weights["layers"], state.pools
    for i in range(len(pools) + 1):
        if i == 0:
            old = (layers[0]["moved"], pools[0])
            layers[0]["moved"], pools[0] = programs.get(SwitchKey(route=route))(*old, *rounds[0])
        elif i < len(pools):
            key = SwitchKey(route=route, kind=kind_of(programs, i - 1), bucket=bucket)
            old = (layers[i]["moved"], pools[i])
            x, pools[i - 1], layers[i]["moved"], pools[i] = programs.get(key)(
                layers[i - 1], x, pools[i - 1], inputs.rows, inputs.local, *old, *rounds[0]
            )
        else:
            key = StepKey(part=kind_of(programs, i - 1), layout=route.dst, bucket=bucket, pages=route.dst_pages)
            x, pools[i - 1] = programs.get(key)(layers[i - 1], x, pools[i - 1], inputs.rows, inputs.local)
            break
        free(old)
        for maps in rounds[1:]:
            pools[i] = programs.get(SwitchKey(route=route, more=True))(pools[i], *maps)
    return x


def _put_maps(programs: Programs, route: Route, maps: Maps) -> tuple[jax.Array, jax.Array]:
    dealt = NamedSharding(programs.mesh, local_spec(route.src))
    return jax.device_put((maps.read, maps.write), (dealt, dealt))


def free(arrays: Any) -> None:
    """Free donated arrays whose buffers could not be reused: JAX keeps those alive."""
    for array in jax.tree.leaves(arrays):
        if not array.is_deleted():
            array.delete()
