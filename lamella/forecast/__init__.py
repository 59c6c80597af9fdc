"""What a run will take, before any weight is loaded: from shapes, settings, data and a machine to memory, time, money and what
serving takes. Pure functions; imports no torch."""
