"""Other engines, each run as its own process, asked for what they make of given tokens."""
