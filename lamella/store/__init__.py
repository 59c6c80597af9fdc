"""The layer store: a model's base weights in 4 bits, one file per decoder layer, described by one manifest.

Import `Store` from `lamella.store.reader`, `quantize_checkpoint` from `lamella.store.quantize`.
"""
