"""Hugging Face checkpoints on disk: names, shapes, dtypes, tensor classes; tensors read in bounded memory."""
