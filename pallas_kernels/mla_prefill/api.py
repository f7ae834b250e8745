"""Entry point of the op: shapes, which form of the attention, and which implementation serves it.

Letters: T tiles of Q rows, R = T * Q rows, S sequences, H heads, W pages per sequence, P pages, K tokens per page;
C latent, N unrotated key, E rotary and V value columns.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_latents, check_pages, check_queries, indices, within_table
from pallas_kernels.chip import known_chip, target_chip
from pallas_kernels.formats import is_fp8
from pallas_kernels.mla_attention.heads import absorb, unabsorb
from pallas_kernels.mla_prefill import absorbed, expanded, ref
from pallas_kernels.mla_prefill.account import FORMS, Call, expansion_pays
from pallas_kernels.mla_prefill.tuning import config_for
from pallas_kernels.select import run_first

BACKENDS = ("triton", "ref")


def mla_prefill(
    q: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    seen: jax.Array,
    *,
    tile: int,
    value_width: int,
    sequence: jax.Array | None = None,
    w_uk: jax.Array | None = None,
    w_uv: jax.Array | None = None,
    form: str | None = None,
    backend: str | None = None,
    chip: str | None = None,
    config: Any = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of prompt rows over the paged tokens of their sequences, the rows' own among them.

    Rows come in tiles of `tile`, each tile of one sequence, as `mla_attention` lays them out; a sequence may have
    several tiles. Row r sees the first seen[r] tokens that are held here of its sequence: for the last n rows of a
    history of h tokens that is h - n + 1 to h.

    Args:
      q: [R, H, C + E], absorbed and scaled; with `w_uk` [R, H, N + E], scaled.
      pool: [P, K, C + E], rows whose first C columns are the latents; or u8[P, K, bytes], FP8 rows as `pack_fp8` makes
        them. Pages and slots beyond what a tile's rows see are never read as numbers: they may hold NaN.
      pages: i32[S, W]: token t of sequence s lies in page pages[s, t // K], slot t % K. Beyond what its rows see any
        number may stand.
      seen: i32[R], W * K at most; 0 or less for padding.
      tile: Q.
      value_width: C.
      sequence: i32[T]: the row of `pages` of each tile; None where every tile has its own, S = T. A tile of padding may
        name any. The expanded form makes the keys of a sequence once for all the tiles that name it.
      w_uk, w_uv: [H, C, N] and [H, V, C], made width first: how a head's keys and values are made of latents.
        Without them only the absorbed form is possible.
      form: "absorbed" (all heads over the latents) or "expanded" (keys and values made per head, then narrower
        attention). None: with the weights, whichever `account.expansion_pays` finds cheaper for what the rows see, in
        the program itself; else, and where the chip is unknown, "absorbed".
      backend: "triton" or "ref"; None takes the first that accepts: "ref" where the chip is none of CHIPS.
      chip: a key of CHIPS that the program is compiled for; None is the default device's.
      config: of the form, `TileConfig` or `ExpandedConfig`; None is the tuning table's. Without `form` it says which.
      interpret: run the kernel without a GPU, slowly.

    Returns f32[R, H, C] and its log-sum-exp, base e, f32[R, H]; with the weights f32[R, H, V]. (0, -inf) for a row that
    sees nothing.
    Raises ValueError for shapes that contradict each other, NotImplementedError where the named backend refuses.
    """
    pages, seen = indices(pages=pages, seen=seen)
    _check(q, pool, pages, seen, tile, value_width, sequence, w_uk, w_uv, form)
    seen = within_table(seen, pool, pages)
    if config is not None:
        of = "expanded" if isinstance(config, expanded.ExpandedConfig) else "absorbed"
        if form not in (None, of):
            raise ValueError(f"a {type(config).__name__} is of the {of} form, not of the {form} one.")
        form = of
    target = target_chip(chip)
    tiles = seen.shape[0] // tile
    if sequence is None:
        own = jnp.arange(tiles, dtype=jnp.int32)
    else:
        own = jnp.clip(indices(sequence=sequence)[0], 0, pages.shape[0] - 1)

    def config_of(form: str) -> Any:
        if config is not None:
            return config
        return config_for(known_chip(target, "triton"), form, "fp8" if is_fp8(pool) else "plain", q.shape[1], tile)

    def absorbing(attend: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        queries = q if w_uk is None else absorb(q, w_uk)
        out, lse = attend(queries, pool, pages[own], seen, tile=tile, value_width=value_width, **options)
        return (out if w_uv is None else unabsorb(out, w_uv)), lse

    def absorbed_form() -> tuple[jax.Array, jax.Array]:
        return absorbing(absorbed.attend, config=config_of("absorbed"), interpret=interpret)

    def triton() -> tuple[jax.Array, jax.Array]:
        if w_uk is None or w_uv is None:
            return absorbed_form()
        made_by = w_uk, w_uv

        def expanded_form() -> tuple[jax.Array, jax.Array]:
            options: Any = {"tile": tile, "config": config_of("expanded"), "interpret": interpret}
            return expanded.attend(q, pool, pages, own, seen, *made_by, **options)

        if form is not None:
            return expanded_form() if form == "expanded" else absorbed_form()
        if (known := target) is None:
            return absorbed_form()
        call = Call(
            rows=q.shape[0], sequences=1, keys=0, tile=tile, heads=q.shape[1], latent=value_width,
            rotary=q.shape[-1] - w_uk.shape[-1], nope=w_uk.shape[-1], value=w_uv.shape[1], fp8=is_fp8(pool),
        )  # fmt: skip

        def cheaper_form() -> tuple[jax.Array, jax.Array]:
            made = expanded.tokens_made(expanded.tokens_seen(seen, own, pages.shape[0], tile), config_of("expanded"))
            pays = expansion_pays(call, known, seen.sum(dtype=jnp.float32), made)
            return jax.lax.cond(pays, expanded_form, absorbed_form)

        # What one form alone takes, it serves.
        forms = {"both": cheaper_form, "absorbed": absorbed_form, "expanded": expanded_form}
        return run_first("mla_prefill's forms", forms, tuple(forms), None)()

    def reference() -> tuple[jax.Array, jax.Array]:
        return absorbing(ref.attend)

    order = ("ref",) if target is None else BACKENDS
    return run_first("mla_prefill", {"triton": triton, "ref": reference}, order, backend)()


def _check(
    q: jax.Array, pool: jax.Array, pages: jax.Array, seen: jax.Array, tile: int, value_width: int,
    sequence: jax.Array | None, w_uk: jax.Array | None, w_uv: jax.Array | None, form: str | None,
) -> None:  # fmt: skip
    R, H, D = q.shape
    check_queries(R, H)
    check_pages(pool, pages)
    if (w_uk is None) != (w_uv is None):
        raise ValueError("w_uk and w_uv go together: one of them is missing.")
    if form is not None and form not in FORMS:
        raise ValueError(f"mla_prefill has no form {form!r}; it has: {', '.join(FORMS)}.")
    if w_uk is not None and w_uv is not None:
        if w_uk.shape[:2] != (H, value_width) or w_uv.shape[::2] != (H, value_width):
            raise ValueError(
                f"{H} heads and {value_width} latent columns, but w_uk of {w_uk.shape} and w_uv of {w_uv.shape}."
            )
        D = value_width + D - w_uk.shape[-1]
    elif form == "expanded":
        raise ValueError("the expanded form makes keys and values of the latents: give w_uk and w_uv.")
    check_latents(pool, D, value_width)
    tiles = pages.shape[0] if sequence is None else sequence.shape[0]
    if tiles * tile != R or seen.shape != (R,):
        raise ValueError(f"{tiles} tiles of {tile} rows, but {R} queries and {seen.shape[0]} counts of what they see.")
