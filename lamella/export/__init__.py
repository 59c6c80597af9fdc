"""What leaves Lamella: adapters in other engines' layouts, merged models, and the proof that they say the same."""
