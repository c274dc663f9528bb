"""Evaluation: two models answer the same questions, and what one of them lost is told with its
uncertainty. `headrace verify` is its command. Nothing here knows Redis, queues or jobs.
"""
