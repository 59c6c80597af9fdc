"""Several candidates on the same tenants and prompts: what each is worth, and what it costs."""
