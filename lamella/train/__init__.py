"""From a `RunConfig` to a run folder: adapter, checkpoints, metrics and receipt."""
