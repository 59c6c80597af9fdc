"""Adapters and models in the forms that other engines read, with all that belongs to them."""
