"""Which models gain from a choice of layout, told from a config alone: those whose KV is not split by head."""

from collections.abc import Mapping


def why_unsuitable(config: Mapping[str, object], ranks: int) -> str | None:
    """Why a model's KV cannot be placed apart from its heads, and what still works; None where it can.

    `config` is a Hugging Face `config.json`. A latent that all heads share (MLA) can lie anywhere; so can the few KV
    heads of grouped queries, as far as there are fewer of them than ranks.
    """
    if config.get("kv_lora_rank") is not None:
        return None
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads < 1 or kv_heads < 1:
        return None
    kind = str(config.get("model_type", "this model"))
    if kv_heads >= heads:
        return (
            f"{kind} has multi-head attention, {kv_heads} KV heads for {heads} query heads: its KV is split by head "
            f"with its projections. Tensor parallelism over {ranks} ranks holds 1/{min(ranks, kv_heads)} of the KV on "
            "each and repeats nothing, so giving histories owners while projections are split (dop) returns no memory, "
            "and a switch would have to move every head's KV. What still works, elsewhere: tp up to one head per rank, "
            "and dp or cp with whole projections. This engine serves MLA models only."
        )
    if kv_heads >= ranks:
        return (
            f"{kind} has {kv_heads} KV heads for {ranks} ranks: tensor parallelism splits its KV {ranks} ways and "
            f"repeats nothing, so dop returns no memory at this size. With more than {kv_heads} ranks it would. This "
            "engine serves MLA models only."
        )
    return (
        f"{kind} has {kv_heads} KV heads for {heads} query heads: tensor parallelism over {ranks} ranks holds each "
        f"{ranks // kv_heads} times, and dop would return that. This engine does not serve it yet: MLA models only."
    )
