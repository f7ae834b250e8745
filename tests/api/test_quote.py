"""`LLM.quote`: what a switch would add on given hardware, beside the plan that it prices."""

import pytest

from splash_jax.errors import ConfigError, LayoutError
from tests.support import make_llm, write_checkpoint


def test_a_quote_prices_the_plan(tmp_path):
    llm = make_llm(write_checkpoint(tmp_path), layout="tp", layouts=("tp", "dp", "cp"))
    tokens = [64, 128, 64, 32]
    for dst, src in (("dp", "tp"), ("cp", "dp"), ("tp", "cp")):
        plan, quote = llm.plan(src, dst, tokens=tokens), llm.quote(dst, src=src, tokens=tokens, hardware="h200")
        assert quote.weight_bytes == plan.weights.bytes_per_rank
        assert quote.kv_bytes == pytest.approx(max(plan.kv.bytes_received(4)))
        assert 0 < quote.transfer <= quote.exposed <= quote.blocking
        assert quote.spread.steps >= 2
    nothing = llm.quote("cp", src="dp", hardware="h200")  # no request is live
    assert (nothing.kv_bytes, nothing.weight_bytes, nothing.exposed) == (0, 0, 0)
    for src in ("tp", "dp", None):  # the present layout is tp
        for held in (None, [], tokens):
            dst = src or "tp"
            assert set(llm.plan(src, dst, tokens=held).bytes_per_rank()) == {0}
            stays = llm.quote(dst, src=src, tokens=held, hardware="h200")
            seconds = stays.transfer, stays.blocking, stays.exposed, stays.cheapest
            assert (stays.kv_bytes, stays.weight_bytes, *seconds) == (0,) * 6
    with pytest.raises(LayoutError, match="dop"):
        llm.quote("dop", hardware="h200")
    with pytest.raises(ConfigError, match="no hardware config is named 'tpu'"):
        llm.quote("dp", hardware="tpu")
