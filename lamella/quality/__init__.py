"""How much of a model quantising or merging has cost: divergence of logits, and the gate of `lamella quantize --check`."""
