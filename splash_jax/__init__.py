"""SPLASH for JAX: serving whose attention layout is live state (arXiv 2609.37626)."""
