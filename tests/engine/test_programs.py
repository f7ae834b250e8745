"""How many programs an engine compiles: they grow with layouts and with directions, never with depth."""

import json
from pathlib import Path

import pytest

from splash_jax.engine import EngineConfig, draw_up
from splash_jax.runtime import StepKey, SwitchKey
from tests.support import HYBRIDS, LAYOUTS, MESHES, SMALL


def keys_of(folder: Path, depth: int, **settings: object) -> set[object]:
    """What an engine of so many layers, three of them dense, would compile. Needs no weights."""
    config = SMALL | {"num_hidden_layers": depth, "first_k_dense_replace": 3}
    (folder / "config.json").write_text(json.dumps(config))
    own: dict[str, object] = {"num_devices": 8, "layouts": LAYOUTS, "max_num_seqs": 8, "block_size": 4}
    own |= {"decode_buckets": (8,), "penalties": False}
    return set(draw_up(EngineConfig(model=folder, **(own | settings))).keys())  # type: ignore[arg-type]


def test_depth_costs_no_program(tmp_path: Path) -> None:
    shallow, deep = keys_of(tmp_path, 8), keys_of(tmp_path, 78)
    parts = [[type(key).__name__ for key in keys] for keys in (shallow, deep)]
    assert sorted(parts[0]) == sorted(parts[1])


def test_six_layouts_and_thirty_directions(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, 78)
    steps = [key for key in keys if isinstance(key, StepKey)]
    switches = [key for key in keys if isinstance(key, SwitchKey)]
    # Embedding, two kinds of layers and head in two buckets, and scoring.
    assert len(steps) == len(LAYOUTS) * (2 * 4 + 1)
    # A transfer alone and beside each kind of layer in two buckets; four directions only change block tables; gathers
    # may go on.
    moving = {(key.route.src, key.route.dst) for key in switches}
    assert len(moving) == 26
    assert len([key for key in switches if not key.more]) == 5 * len(moving)
    assert {(str(key.route.src), str(key.route.dst)) for key in switches if key.more} == {
        ("dp", "tp"), ("cp", "tp"), ("dop", "tp"), ("dcp", "tp"), ("dp", "rep"), ("cp", "rep")
    }  # fmt: skip


def test_a_switch_costs_only_the_programs_of_its_modes(tmp_path: Path) -> None:
    count = {
        modes: len([key for key in keys_of(tmp_path, 8, switch_modes=modes) if isinstance(key, SwitchKey)])
        for modes in (("blocking",), ("splash",), ("splash", "blocking"), ("spread",))
    }
    assert count["blocking",] == 26 + 6
    assert count["splash",] == count["splash", "blocking"] == 5 * 26 + 6
    assert count["spread",] == 0


@pytest.mark.parametrize("mesh", MESHES)
def test_hybrids_cost_what_others_cost(tmp_path: Path, mesh: str) -> None:
    sizes = MESHES[mesh]
    ranks = sizes["node"] * sizes["chip"]
    keys = keys_of(tmp_path, 78, num_devices=ranks, mesh=sizes, layout=HYBRIDS[0], layouts=HYBRIDS)
    assert len([key for key in keys if isinstance(key, StepKey)]) == len(HYBRIDS) * 9
    assert len([key for key in keys if isinstance(key, SwitchKey)]) <= 30 * 6
