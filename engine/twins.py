"""Finds requests that must get the very same answer, so that it is computed once.

Two greedy sequences with equal tokens and settings are twins: the later one follows the earlier one
while that is unfinished, and gets a copy of its answer. Nothing here schedules.
"""

from dataclasses import replace
from hashlib import blake2b

from headrace.engine.kv.prefix_cache import token_content
from headrace.engine.sequence import Sequence


class Twins:
    """Leaders by what they ask, and who follows them."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, Sequence] = {}
        self._asked: dict[int, bytes] = {}
        self._given: dict[int, list[int]] = {}
        self._followers: dict[int, list[Sequence]] = {}
        self._leader_of: dict[int, Sequence] = {}

    def __len__(self) -> int:
        """Sequences that follow another one."""
        return len(self._leader_of)

    def enter(self, seq: Sequence) -> bool:
        """Whether `seq` follows an unfinished twin; otherwise it leads from now on."""
        if not seq.params.greedy:
            return False
        key = blake2b(
            token_content(seq.prompt_token_ids) + b"|" + token_content(seq.output_token_ids),
            digest_size=16,
        ).digest()
        leader = self._leaders.get(key)
        if leader is not None and self._same(leader, seq):
            self._followers.setdefault(leader.seq_id, []).append(seq)
            self._leader_of[seq.seq_id] = leader
            return True
        if leader is None:
            self._leaders[key] = seq
            self._asked[seq.seq_id] = key
            self._given[seq.seq_id] = list(seq.output_token_ids)
        return False

    def leave(self, seq: Sequence) -> list[Sequence]:
        """`seq` has ended. Returns its followers, which now follow nobody."""
        leader = self._leader_of.pop(seq.seq_id, None)
        if leader is not None:
            self._followers[leader.seq_id].remove(seq)
            return []
        key = self._asked.pop(seq.seq_id, None)
        if key is None:
            return []
        del self._leaders[key], self._given[seq.seq_id]
        followers = self._followers.pop(seq.seq_id, [])
        for follower in followers:
            del self._leader_of[follower.seq_id]
        return followers

    def follows(self, seq: Sequence) -> bool:
        return seq.seq_id in self._leader_of

    def _same(self, leader: Sequence, seq: Sequence) -> bool:
        return (
            leader.salt == seq.salt
            and leader.prompt_token_ids == seq.prompt_token_ids
            and self._given[leader.seq_id] == seq.output_token_ids
            and replace(leader.params, seed=None) == replace(seq.params, seed=None)
        )


def copy_answer(leader: Sequence, follower: Sequence) -> None:
    """Give the follower all that the leader's answer consists of."""
    follower.output_token_ids = list(leader.output_token_ids)
    follower.logprobs = list(leader.logprobs)
    follower.text = leader.text
    follower.finish_reason = leader.finish_reason
    follower.stop_reason = leader.stop_reason
    follower.failure = leader.failure
    follower.num_cached_tokens = leader.num_cached_tokens
    follower.first_token_time = leader.first_token_time
    follower.finish_time = leader.finish_time
    follower.status = leader.status
