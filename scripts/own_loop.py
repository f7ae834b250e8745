"""Your own serving loop from the pieces, without the engine: decode in tp, then in dp, one step doing the switch.

NPROC=32 python scripts/own_loop.py
"""

import numpy as np
from jax.sharding import NamedSharding

from splash_jax import small_model
from splash_jax.engine.platform import prepare_platform
from splash_jax.kv import PagePool
from splash_jax.kv.store import empty_pools, pool_struct
from splash_jax.layouts import attention_mesh, make_layout, pool_spec, weight_spec
from splash_jax.models.config import read_model_config
from splash_jax.models.deepseek_v3_weights import model_leaves
from splash_jax.models.load import load_tree, open_weights
from splash_jax.models.tokenizer import Tokenizer
from splash_jax.ownership import Bucket, KVShape, plan_switch
from splash_jax.runtime import DeviceState, Draw, Programs, Shapes, Work, build_batch, fresh_state, plan_route, run_step
from splash_jax.runtime.sizes import state_bytes
from splash_jax.runtime.switch import prepare_switch

prepare_platform(4)  # virtual devices where there is no accelerator
model, tokenizer = small_model(), Tokenizer.open(small_model())
cfg, mesh = read_model_config(model), attention_mesh({"rank": 4})
tp, dp = (make_layout(role, {"rank": 4}) for role in ("tp", "dp"))
kv = KVShape(page_size=16, interleave=16, bytes_per_token=4 * (cfg.kv_lora_rank + cfg.qk_rope_head_dim))
shapes = Shapes(model=cfg, dtype="float32", kv=kv, max_model_len=256, slots=4, penalties=False)
programs, bucket = Programs(mesh, shapes), Bucket(decode=4, tiles=4, tile=16)
checkpoint, leaves = open_weights(cfg, model), model_leaves(cfg, 4)
weights = load_tree(checkpoint, leaves, lambda leaf: NamedSharding(mesh, weight_spec(tp, leaf.dims)), "float32")
struct = pool_struct(NamedSharding(mesh, pool_spec(tp)), kv, 64, shapes.width, "float32")
state = DeviceState(weights, empty_pools(struct, cfg.num_layers), fresh_state(mesh, shapes), tp, 64)
pool = PagePool(tp, kv, 64)  # which page of which rank holds what
prompts = ["The river is", "In the morning she", "A computer is a"]
tokens = {str(i): tokenizer.encode(text) for i, text in enumerate(prompts)}
for slot, name in enumerate(tokens):
    pool.add(name, home=slot)
for step in range(24):
    switch = None
    if step == 12:
        plan = plan_switch(pool.manifest(), dp, pages_per_rank=48, state=state_bytes(cfg, "float32", 4, kv))
        pool, switch = PagePool.adopt(plan.after), prepare_switch(programs, plan, plan_route(shapes, plan))
        print(f"weights {plan.weights.primitive}, history {plan.kv.primitive}: {sum(plan.bytes_per_rank())} bytes")
    works = []
    for slot, (name, ids) in enumerate(tokens.items()):
        start = pool.num_tokens(name)
        pool.grow(name, len(ids))
        works.append(Work(name=name, slot=slot, start=start, ids=np.asarray(ids[start:], np.int32), draw=Draw()))
    batch, places = build_batch(shapes, pool.layout, bucket, pool, works)
    drawn = np.asarray(run_step(programs, state, bucket, batch, switch=switch).drawn.tokens)
    for name, row in places.sampled.items():
        tokens[name].append(int(drawn[row, 0]))
for ids in tokens.values():
    print(tokenizer.decode(ids))
