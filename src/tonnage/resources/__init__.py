"""Countable things a request needs to run: KV blocks, slots, penalty rows; who is admitted; the dispatcher of all."""
