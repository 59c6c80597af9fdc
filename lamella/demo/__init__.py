"""Real weights and data from registry packages, and the whole job on them."""
