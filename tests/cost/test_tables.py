"""The fitted form against the paper's tables, and the rules that it must beat. Aims are those of the project."""

from pathlib import Path

import numpy as np
import pytest

from splash_jax.cost import tables
from splash_jax.cost.batches import BatchConstants, batch_seconds, fit_batches
from splash_jax.errors import ConfigError
from splash_jax.layouts import ROLES, make_layout

FOLDER = Path(__file__).resolve().parents[1] / "data" / "paper"
ORDER = ("tp", "dp", "cp", "dop")
LAYOUTS = {name: make_layout(name, {"rank": 8}) for name in ORDER}


@pytest.fixture(scope="module")
def b200() -> tables.Table:
    return tables.read_table(FOLDER / "table4_b200.csv")


@pytest.fixture(scope="module")
def dcu() -> tables.Table:
    return tables.read_table(FOLDER / "table5_dcu.csv")


def in_sample(table: tables.Table, rule: tables.Rule) -> tables.Score:
    return tables.score(table, rule(table, table))


def test_simple_rules_lose_what_is_known_of_them(b200, dcu):
    """Always CP 4.27 / 23.1 %, DOP 9.39 / 42.2, DP 12.72 / 47.2; three thresholds 0.63 / 9.3, and 0.99 on Table 5."""
    known = {"cp": (4.27, 23.1), "dop": (9.39, 42.2), "dp": (12.72, 47.2)}
    for name, expected in known.items():
        found = in_sample(b200, tables.always(name))
        assert (100 * found.mean_regret, 100 * found.worst_regret) == pytest.approx(expected, abs=0.05)
    rule = tables.thresholds(ORDER, "cp")
    assert 100 * in_sample(b200, rule).mean_regret == pytest.approx(0.63, abs=0.005)
    assert 100 * in_sample(b200, rule).worst_regret == pytest.approx(9.3, abs=0.05)
    assert 100 * in_sample(dcu, rule).mean_regret == pytest.approx(0.99, abs=0.005)


def test_the_nearest_neighbour_sees_no_row_of_its_own_position(b200):
    assert in_sample(b200, tables.nearest_neighbour).agreement == 1
    held = tables.hold_out(b200, tables.nearest_neighbour)
    twice = (b200.inputs == 65_536) & (b200.batches == 16)  # in two sweeps: both rows are left out
    assert twice.sum() == 2 and tables.score(b200, held).agreement < 0.8


def test_the_form_fitted_to_table_4_beats_three_thresholds_there(b200):
    found = in_sample(b200, tables.cost_model(LAYOUTS))
    assert found.mean_regret <= 0.006 and found.worst_regret <= 0.10
    assert found.mean_regret < in_sample(b200, tables.thresholds(ORDER, "cp")).mean_regret


def test_the_form_fixed_on_table_4_chooses_on_table_5(b200, dcu):
    guess = tables.fit_table(b200, LAYOUTS)
    found = in_sample(dcu, tables.cost_model(LAYOUTS, guess))
    assert found.mean_regret <= 0.01
    assert found.mean_regret < in_sample(dcu, tables.thresholds(ORDER, "cp")).mean_regret


@pytest.mark.slow
def test_with_a_position_held_out(b200, dcu):
    assert tables.score(b200, tables.hold_out(b200, tables.cost_model(LAYOUTS))).mean_regret <= 0.015
    guess = tables.fit_table(b200, LAYOUTS)
    assert tables.score(dcu, tables.hold_out(dcu, tables.cost_model(LAYOUTS, guess))).mean_regret <= 0.02


def test_constants_are_found_again_in_times_that_they_made():
    """Choices of a fit to noiseless times are perfect, and the times come out again."""
    true = BatchConstants(token_everywhere=80, token_dealt=36, token_owned=32, crowding=9, exchange=5, hidden=4)
    inputs, batches = (a.ravel() for a in np.meshgrid(2 ** np.arange(10, 20), 2 ** np.arange(0, 9)))
    columns = list(LAYOUTS.values())
    times = batch_seconds(true, columns, inputs, batches, 1024)
    found = batch_seconds(fit_batches(times, columns, inputs, batches, 1024), columns, inputs, batches, 1024)
    assert np.abs(np.log(found / times)).mean() < 0.06  # the guess and the softness of the choice pull
    lost = 1 - times.min(1) / times[np.arange(len(times)), found.argmin(1)]
    assert lost.mean() < 0.002


def test_a_platform_that_is_slower_throughout_chooses_alike(b200):
    """The guess of another platform is scaled: units of time change nothing."""
    slow = tables.Table(
        layouts=b200.layouts, inputs=b200.inputs, batches=b200.batches, throughput=b200.throughput / 7.0
    )  # fmt: skip
    rule = tables.cost_model(LAYOUTS)
    assert (rule(slow, slow) == rule(b200, b200)).mean() > 0.95


def test_the_form_follows_placements_and_refuses_what_no_table_has():
    """12 requests on 8 owners wait for those that have two; 16 do not, and nobody waits where nobody owns."""
    inputs, batches = np.array([4096, 65_536]), np.array([12, 16])
    usual, patient = (
        batch_seconds(c, list(LAYOUTS.values()), inputs, batches, 1024)
        for c in (BatchConstants(), BatchConstants(idle_token=1e-12, idle_pair=1e-12))
    )
    waits = usual - patient
    assert waits[0].tolist() == pytest.approx([0, 0.09, 0, 0.09], abs=0.03) and np.abs(waits[1]).max() < 1e-9
    assert waits[0, 1] > 0.05
    for role in set(ROLES) - set(LAYOUTS):
        with pytest.raises(ConfigError, match=f"batches of layout {role} cannot be priced: no table has measured it"):
            tables.cost_model({role: make_layout(role, {"rank": 8})})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("input_len,B,tp\n1,1,1\n", "needed are input_len, B and two layouts or more"),
        ("input_len,tp,dp\n1,1,1\n", r"line 1 has columns .*; needed are input_len, B, each once"),
        ("input_len,B,tp,dp\n1024,1,2\n", "line 2 has something else than numbers: '' is not a finite number"),
        ("", "has columns \\[\\]"),
        ("input_len,B,tp,dp\n1024,1,2,x\n", "line 2 has something else than numbers"),
        ("input_len,B,tp,dp\n1024,1,2,3\n1024,2,2,0\n", "line 3 has numbers that are not above 0"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path, text, words):
    file = tmp_path / "table.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        tables.read_table(file)
    with pytest.raises(ConfigError, match=r"nowhere\.csv: cannot be read"):
        tables.read_table(tmp_path / "nowhere.csv")
