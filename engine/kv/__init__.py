"""Blocks of the KV cache: who holds them, what they contain, where they lie."""
