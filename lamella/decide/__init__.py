"""Whether deploying is worth it: costs, what quality is worth, one verdict, what would change it. Pure arithmetic, no torch."""
