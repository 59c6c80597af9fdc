"""Classification tasks measured: predictions, metrics with intervals, one table of systems."""
