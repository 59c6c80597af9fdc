"""What each device does: from shapes, speeds, memory and links to a split, and from a step's rows to a list of work. Pure
functions; imports no torch."""
