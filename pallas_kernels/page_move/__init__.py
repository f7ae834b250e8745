"""Pages gathered from a pool, scattered into it, and sent between ranks in chunks: bytes move, bits do not change."""

from pallas_kernels.page_move.api import GATHERS, gather_pages, scatter_pages, send_pages

__all__ = ["GATHERS", "gather_pages", "scatter_pages", "send_pages"]
