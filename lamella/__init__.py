"""Lamella fine-tunes language models that do not fit, one thin layer at a time."""

__version__ = "0.1.0"
