"""The verbs. Each module has `register(app)` and imports torch only when its verb runs."""
