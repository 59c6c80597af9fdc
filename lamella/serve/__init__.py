"""An OpenAI-compatible server on a store, with an adapter per tenant."""
