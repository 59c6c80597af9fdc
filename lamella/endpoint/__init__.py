"""Talking to servers that speak OpenAI's API: retries, rate limits, a cache of answers, prices. Imports no torch."""
