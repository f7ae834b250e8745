"""Naming layouts: every way to ask for one, and what is said of one that is not there."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from splash_jax.errors import LayoutError
from splash_jax.layouts import ROLES, AbstractRole, attention_mesh, local_spec, make_layout, pool_spec, row_spec
from splash_jax.layouts.specs import check_heads, weight_spec
from splash_jax.ownership import History, Placement, Projections

ONE, TWO = {"rank": 4}, {"node": 2, "chip": 4}


@pytest.mark.parametrize("name", ROLES)
def test_a_role_is_registered_under_its_name(name):
    role = ROLES[name]
    assert isinstance(role, AbstractRole) and role.name == name
    layout = make_layout(name, ONE)
    assert [(a.name, a.size, a.role, a.placement) for a in layout.axes] == [("rank", 4, name, role.placement)]


def test_the_roles_fill_the_grid():
    cells = {Placement(projections, history) for projections in Projections for history in History}
    assert {role.placement for role in ROLES.values()} == cells and len(ROLES) == len(cells)


def test_every_spelling_of_one_layout():
    layout = make_layout({"node": "dop", "chip": "cp"}, TWO)
    assert make_layout("node=dop,chip=cp", TWO) == layout
    assert make_layout(" chip = cp , node = dop ", TWO) == layout
    assert make_layout({"chip": "cp", "node": "dop"}, TWO) == layout  # the mesh orders the axes
    assert make_layout(layout, TWO) is layout
    assert make_layout(str(layout), TWO) == layout
    assert make_layout("cp", TWO) == make_layout("node=cp,chip=cp", TWO)
    assert make_layout("rank=cp", ONE) == make_layout("cp", ONE)


@pytest.mark.parametrize(
    ("roles", "mesh", "words"),
    [
        ("pp", ONE, "unknown layout 'pp'; choose one of tp, dp, cp, dop, dcp, rep"),
        ("", ONE, "unknown layout ''; choose"),
        ("TP", TWO, "unknown layout 'TP'; choose"),
        ("node=cp,chip=x", TWO, "unknown layout 'x' for axis 'chip'"),
        ("node=cp", TWO, r"layout 'node=cp' names axes \['node'\]; the mesh has \['node', 'chip'\]"),
        ("node=cp,chip=cp,pod=cp", TWO, r"names axes \['chip', 'node', 'pod'\]; the mesh has \['node', 'chip'\]"),
        ({"rank": "cp"}, TWO, r"names axes \['rank'\]; the mesh has \['node', 'chip'\]"),
        ({}, ONE, r"names axes \[\]; the mesh has \['rank'\]"),
        ("node=cp,oops", TWO, r"names axes \['node', 'oops'\]; the mesh has"),
        (make_layout("cp", {"rank": 8}), ONE, r"layout cp is of another mesh than \{'rank': 4\}"),
        (make_layout("cp", ONE), TWO, "layout cp is of another mesh than"),
    ],
)
def test_what_is_not_there_is_refused(roles, mesh, words):
    with pytest.raises(LayoutError, match=words):
        make_layout(roles, mesh)


def test_an_axis_named_twice_is_refused():
    with pytest.raises(LayoutError, match="node"):
        make_layout("node=cp,node=tp,chip=cp", TWO)


@pytest.mark.parametrize(
    ("name", "heads", "rows"),
    [
        ("tp", ("rank",), P()),
        ("dp", None, P("rank")),
        ("cp", None, P()),
        ("dop", ("rank",), P(None)),
        ("dcp", ("rank",), P()),
        ("rep", None, P()),
    ],
)
def test_specs_follow_the_placement(name, heads, rows):
    layout = make_layout(name, ONE)
    assert weight_spec(layout, ("heads", None)) == P(heads, None)
    assert weight_spec(layout, (None, "ranks")) == P(None, ("rank",))
    assert row_spec(layout) == rows
    assert pool_spec(layout) == local_spec(layout) == P(("rank",))


def test_specs_of_hybrids():
    layout = make_layout("node=dop,chip=dp", TWO)
    assert row_spec(layout) == P(None, "chip")
    assert weight_spec(layout, ("heads", None)) == P(("node",), None)
    assert weight_spec(make_layout("tp", TWO), ("heads",)) == P(("node", "chip"))
    assert pool_spec(layout) == P(("node", "chip"))


def test_a_mesh_takes_the_first_devices_and_says_when_there_are_too_few():
    mesh = attention_mesh(TWO)
    assert dict(mesh.shape) == TWO and list(mesh.devices.flat) == jax.devices()[:8]
    assert list(attention_mesh({"rank": 2}, jax.devices()[3:]).devices.flat) == jax.devices()[3:5]
    with pytest.raises(LayoutError, match=r"mesh \{'rank': 9\} needs 9 devices and 8 are there\. On CPU set"):
        attention_mesh({"rank": 9})


def test_heads_that_do_not_divide_are_refused():
    check_heads(make_layout("tp", ONE), 8)
    with pytest.raises(LayoutError, match=r"6 attention heads cannot be split over 4 devices; .* \[1, 2, 3, 6\]"):
        check_heads(make_layout("tp", ONE), 6)
