"""What the devices really hold, read from JAX's live arrays while an engine runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from splash_jax import LLM
from splash_jax.ownership import Layout, footprint
from splash_jax.runtime import SwitchKey
from splash_jax.runtime.batch import FLOAT_FIELDS, INT_FIELDS, local_size
from splash_jax.runtime.shapes import MAX_STOP_IDS, MAX_TOP_LOGPROBS, sample_rows
from splash_jax.runtime.transfer import Route, map_widths


def live_bytes(ranks: int, foreign: set[int] = frozenset()) -> np.ndarray:  # type: ignore[assignment]
    """Bytes of live arrays on each of the first `ranks` devices, those whose ids are in `foreign` left out. i64[T].

    Read from shapes and shardings: to look at a shard's data makes one more live array of it.
    """
    held = np.zeros(len(jax.devices()), np.int64)
    for array in jax.live_arrays():
        if id(array) not in foreign and not array.is_deleted():
            part = int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
            for device in array.sharding.device_set:
                held[device.id] += part
    return held[:ranks]


class Residency:
    """Watches an engine, idle so far: what its fullest rank holds after a step and between dispatches of a switch."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        mine = {id(leaf) for leaf in jax.tree.leaves((self.engine.state.weights, self.engine.state.pools))}
        mine |= {id(leaf) for leaf in jax.tree.leaves(self.engine.state.sampler)}
        self._others = [array for array in jax.live_arrays() if id(array) not in mine]  # kept, so that ids stay theirs
        self._foreign = {id(array) for array in self._others}
        state = self.engine.blueprint.state
        self._idle = self.now() - state.common - state.num_layers * self.layer(self.engine.layout)  # sampler state
        self.switches: list[tuple[Layout, Layout, int]] = []  # and the most bytes on a rank while it went on

    def layer(self, layout: Layout) -> int:
        """Bytes of one layer's projections and pages on a rank."""
        blueprint = self.engine.blueprint
        held = footprint(
            blueprint.state, layout, pages=blueprint.pages[layout], page_size=blueprint.shapes.kv.page_size
        )
        return (held.projections + held.kv) // blueprint.state.num_layers

    def now(self) -> int:
        return int(live_bytes(self.engine.pool.layout.size, self._foreign).max())

    def after_step(self) -> None:
        """After every step: one layout's state and what a step needs, nothing that is left over.

        While a switch is spread over steps, what Eq. 5 allows it, with the inputs of a step in both layouts.
        """
        state, layout = self.engine.blueprint.state, self.engine.layout
        bound = state.common + state.num_layers * self.layer(layout) + self._idle + self._step(layout)
        if self.engine._spreading is not None:
            route, _ = self.engine._spreading.spread.cut
            layers = sorted((self.layer(route.src), self.layer(route.dst)))
            bound = state.common + state.num_layers * layers[1] + layers[0] + self._idle
            bound += self._step(route.src) + self._step(route.dst) + 2 * self._map_bytes(route)
        assert self.now() <= bound, f"{self.now() - bound} bytes are left over after a step in {layout}"

    @contextmanager
    def watching(self) -> Iterator["Residency"]:
        programs, get = self.engine.programs, self.engine.programs.get

        def watched(key: Any) -> Any:
            program = get(key)
            if not isinstance(key, SwitchKey):
                return program

            def call(*args: Any) -> Any:
                out = program(*args)
                pair, most = (key.route.src, key.route.dst), self.now()
                if key.kind is None and not key.more:
                    self.switches.append((*pair, most))
                else:
                    self.switches[-1] = (*pair, max(most, self.switches[-1][2]))
                return out

            return call

        programs.get = watched  # type: ignore[method-assign]
        try:
            yield self
        finally:
            del programs.get  # type: ignore[attr-defined]

    def check(self) -> None:
        """Eq. 5: of the two layouts of a switch, the larger one's state and one layer more, never two."""
        state = self.engine.blueprint.state
        for src, dst, most in self.switches:
            layers = sorted((self.layer(src), self.layer(dst)))
            bound = state.common + state.num_layers * layers[1] + layers[0]
            bound += self._idle + self._maps(src, dst) + max(self._step(src), self._step(dst))
            assert most <= bound, f"{src} -> {dst}: {most} bytes on a rank, {most - bound} more than Eq. 5 allows"

    def _maps(self, src: Layout, dst: Layout) -> int:
        """Bytes of a switch's maps on a rank, for as many rounds as there may be."""
        return self._map_bytes(self.engine.blueprint.route(src, dst))

    def _map_bytes(self, route: Route) -> int:
        rounds = -(-route.dst_pages // route.sends) if route.in_rounds else 1
        return 4 * sum(map_widths(route)) * rounds

    def _step(self, layout: Layout) -> int:
        """Bytes on a rank of the inputs and the rows of the largest step, and of the results of two."""
        shapes, bucket = self.engine.blueprint.shapes, self.engine.blueprint.buckets[layout][-1]
        rows, sampled = layout.owner_groups * bucket.rows, sample_rows(layout, bucket) // layout.size
        inputs = 3 * rows + local_size(shapes, layout, bucket) + layout.owner_groups * bucket.sequences
        drawn = sampled * (len(FLOAT_FIELDS) + len(INT_FIELDS) + MAX_STOP_IDS + 2 * 2 * (1 + MAX_TOP_LOGPROBS))
        return 4 * (inputs + drawn + rows * shapes.model.hidden_size)
