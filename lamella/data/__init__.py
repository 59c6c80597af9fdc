"""JSONL rows to encoded rows with label masks, and to packed batches."""
