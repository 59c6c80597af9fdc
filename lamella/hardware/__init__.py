"""What this machine has: memory, threads, instruction sets."""
