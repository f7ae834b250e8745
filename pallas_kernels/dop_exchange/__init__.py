"""Decoupled ownership's exchange: heads of all rows to their rows' owners, packed as one message, and outputs back."""

from pallas_kernels.dop_exchange.api import PACKS, heads_to_owners, owners_to_heads
from pallas_kernels.dop_exchange.routing import Routing, route_rows
from pallas_kernels.dop_exchange.transfers import TRANSFERS, choose_transfer, transfer_seconds

__all__ = [
    "PACKS",
    "TRANSFERS",
    "Routing",
    "choose_transfer",
    "heads_to_owners",
    "owners_to_heads",
    "route_rows",
    "transfer_seconds",
]
