"""A server on Lamella's own store: one base in memory, an adapter per tenant, batches across tenants."""
