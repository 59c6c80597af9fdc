"""Adapters and merged models in the forms that other engines read."""
