"""Several processes on one run: who is there, who is alive, how numbers and tensors pass between them."""
