"""The policy at the wheel, without an engine: what it is told, what it asks for, and what it survives."""

from pathlib import Path
from typing import Any

import pytest

from splash_jax.cost import Hardware, load_hardware
from splash_jax.engine.build import Blueprint, draw_up
from splash_jax.engine.config import EngineConfig
from splash_jax.engine.pilot import Pilot
from splash_jax.kv import PagePool
from splash_jax.scheduler import PolicyConfig, Request, SamplingParams, Scheduler, Switch

FACTORED = {"node": 2, "chip": 2}


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware("h200")


def blueprint(model: Path, **settings: Any) -> Blueprint:
    defaults: dict[str, Any] = {
        "num_devices": 4, "layout": "auto", "layouts": ("tp", "dp", "dop"), "dtype": "float32", "max_num_seqs": 8,
        "max_model_len": 256, "block_size": 4, "max_num_batched_tokens": 64,
    }  # fmt: skip
    return draw_up(EngineConfig(model=model, **(defaults | settings)))


class Seat:
    """A pilot with a scheduler and a pool, as an engine has them, in some layout."""

    def __init__(self, plan: Blueprint, hardware: Hardware, layout: str | None = None) -> None:
        self.pilot = Pilot(plan, hardware)
        here = plan.config.layout_of(layout or plan.config.first_layout)
        self.pool = PagePool(here, plan.shapes.kv, plan.pages[here])
        self.scheduler = Scheduler(plan.config.max_num_seqs, plan.buckets.__getitem__)

    def add(self, prompt: int = 20, new: int = 8, name: str = "0") -> Request:
        request = Request(name=name, prompt_ids=[5] * prompt, params=SamplingParams(), seed=0, max_total=prompt + new)
        self.scheduler.add(request)
        return request

    def steer(self) -> Any:
        return self.pilot.steer(self.scheduler, self.pool)


@pytest.mark.parametrize("late", [False, True])
def test_a_layout_may_be_named_by_its_role_on_a_mesh_of_two_axes(small: Path, hardware: Hardware, late: bool) -> None:
    told = PolicyConfig(pin="dp", allowed=("tp", "dp"))
    seat = Seat(blueprint(small, mesh=FACTORED, **({} if late else {"policy": told})), hardware)
    if late:
        seat.pilot.policy = told
    seat.add()
    decision = seat.steer()
    assert isinstance(decision.action, Switch) and decision.reason == "pinned"
    assert decision.action.layout == "node=dp,chip=dp"
    seat.pilot.policy = PolicyConfig(allowed=("tp", "dp"))
    assert seat.steer().reason != "nothing else fits"
    assert seat.pilot.policy.allowed == ("tp", "dp")  # what is changed at run time starts from what was said
