"""Help before a run: a first run.toml, what this environment can do, the reference of settings and verbs."""
