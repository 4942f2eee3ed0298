"""Countable things a request needs to run: KV blocks, sequence slots, and the dispatcher that asks for all of them."""
