"""How much a rank computes in one layer of a step of a case: the counts of `splash_jax.cost`, on balanced loads."""

from splash_jax.cost import ServedModel, Work, layer_stages, loads
from splash_jax.ownership import Layout
from splash_jax.preflight.case import Case


def layer_work(case: Case, layout: Layout, step: str, kind: str) -> dict[str, Work]:
    """The stages of one layer of a step, by the named scope that its programs give them.

    Every rank has its even share. A prompt's rows see half of the context on average.
    """
    prompt = case.prefill_tokens if step == "prefill" else 0
    groups, rows, model = layout.owner_groups, case.batch + prompt, ServedModel.of(case.model, case.shapes.dtype)
    even = loads(
        model,
        rows=rows / groups,
        drawn=case.batch / groups,
        all_rows=rows,
        tokens=case.batch * case.context / groups,
        pairs=(case.batch * case.context + prompt * case.context / 2) / groups,
    )
    return {stage.name: stage.work(even) for stage in layer_stages(model, layout, kind)}
